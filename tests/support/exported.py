"""An exported model of images, as `coordinator export` writes it: digits as PNG, one of them taught by no hospital."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from consilium.report.export import export_model
from consilium.research.simulate import runner
from consilium.research.simulate.results import Result
from coordinator.config.hydra_config import compose_simulation
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import write_state
from tests.support.cards import lead

TAUGHT = tuple("012345678")
UNKNOWN = "9"


@dataclass(frozen=True)
class Exported:
    """A model, and images below `images`: hospital/{train,test}/<digit>, new/<digit>, unknown."""

    model: Path
    images: Path
    result: Result

    @property
    def hospital(self) -> str:
        return f"folder:{self.images / 'hospital'}"

    @property
    def new(self) -> str:
        return f"folder:{self.images / 'new'}"


def write_digits(root: Path) -> None:
    """Write the digits, a third of each to every place; of the untaught one all to a place of their own."""
    found = load_digits()
    for k, (image, digit) in enumerate(zip(found.images, found.target, strict=True)):
        place = "unknown" if str(digit) == UNKNOWN else f"{('hospital/train', 'hospital/test', 'new')[k % 3]}/{digit}"
        (root / place).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(image * 255 / 16).astype(np.uint8)).save(root / place / f"{k}.png")


def exported(folder: Path) -> Exported:
    """Train in closed form and export."""
    images = folder / "images"
    write_digits(images)
    words = [
        *(
            "method=analytic",
            "model=random_features",
            "model.kind=cosine",
            "model.width=1500",
            "model.length=1",
            "rounds=1",
        ),
        *("threads=1", "federation=iid-2", "data=folder", f"data.path={images / 'hospital'}", "data.image_size=8"),
        "data.classes=[" + ",".join(f"'{c}'" for c in TAUGHT) + "]",
    ]
    result = runner.run(compose_simulation(words))
    return Exported(_export(result, folder, None), images, result)


def exported_without(made: Exported, folder: Path, *classes: str) -> Path:
    """Export the same model as that of a run whose hospitals had no record of these classes."""
    hospitals = [int(name not in classes) for name in TAUGHT]
    return _export(made.result, folder, pb.ClassCoverage(classes=TAUGHT, hospitals=hospitals, least=1))


def _export(result: Result, folder: Path, coverage: pb.ClassCoverage | None) -> Path:
    write_state(result.server, folder / "state")
    info = pb.RunInfo(
        run_id="digits-1",
        method=result.manifest.method.name,
        model_digest=result.model_digest,
        manifest_digest=result.manifest.digest(),
        model_object="a" * 64,
        coverage=coverage,
    )
    detail = pb.RunDetail(info=info, manifest_json=result.manifest.to_json())
    return export_model(detail, folder / "state", folder / "models", lead(folder / "consortium")).model
