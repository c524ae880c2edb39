"""BloodMNIST: 17,092 images of single blood cells, 8 classes, as the MedMNIST project publishes them.

Yang, Shi, Wei, Liu, Zhao, Ke, Pfister and Ni, "MedMNIST v2", Scientific Data 2023. Get `bloodmnist.npz` from its
authors, who set the terms of its use, and name its folder with --data-root.
"""

from pathlib import Path
from typing import ClassVar

import numpy as np

from consilium.extending import ArrayData, DataError


class BloodMnist(ArrayData):
    """Colour images of 28x28 pixels, channels first, as bytes."""

    shape: ClassVar[tuple[int, ...]] = (3, 28, 28)
    classes: ClassVar[tuple[str, ...]] = (
        *("basophil", "eosinophil", "erythroblast", "immature granulocyte"),
        *("lymphocyte", "monocyte", "neutrophil", "platelet"),
    )
    mean: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    std: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    model: ClassVar[str] = "consilium_example.model:TwoLayers"

    def read(self, root: Path | None):
        file = (root or Path()) / "bloodmnist.npz"
        if not file.is_file():
            raise DataError("E-DATA-02", f"expected MedMNIST's bloodmnist.npz, found none at {file}: give --data-root")
        with np.load(file) as arrays:  # no pickles: np.load refuses them by default
            return tuple(
                (arrays[f"{split}_images"].transpose(0, 3, 1, 2), arrays[f"{split}_labels"].reshape(-1))
                for split in ("train", "test")
            )
