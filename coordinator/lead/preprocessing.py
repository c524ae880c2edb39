"""What hospitals did to an example before the model saw it, in one sentence that somebody else can follow."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.lead.portable import normalisation
from fl_core.datasets.catalogue import KNOWN
from fl_core.datasets.decoding.dicom import Window
from fl_core.datasets.image_files import ImageTransform
from fl_core.datasets.sources import class_folders, isic2019
from fl_core.rounds.manifest import RunManifest


def transform_of(manifest: RunManifest) -> ImageTransform | None:
    """Return how image files of a run become examples; None where its examples are no files."""
    if manifest.data == "isic2019":
        return isic2019.transform(manifest.image_size)
    window = manifest.schema.window
    if manifest.data in ("folder", "manifest"):
        return class_folders.transform(manifest.image_size, None if window is None else Window(*window))
    return None


def sentence(manifest: RunManifest) -> str:
    """Say it of evaluations, which augment nothing."""
    schema = manifest.schema
    if schema.columns:
        names = ", ".join(column.name for column in schema.columns)
        return (
            f"The columns {names} of a row become {schema.shape[0]} numbers as the manifest's schema says "
            "(docs/data.md), and nothing else is done to them."
        )
    transform = transform_of(manifest)
    if transform is not None:
        return _of_files(transform)
    mean, std = normalisation(manifest.data)
    shape = " x ".join(map(str, schema.shape))
    known = manifest.data == "digits" or (manifest.data in KNOWN and len(schema.shape) == 3)
    values = f"{shape} numbers in [0, 1]" if known else f"{shape} numbers as its reader gives them"
    steps = f", less {_listed(mean)}, divided by {_listed(std)} per channel" if mean else ", and nothing else is done"
    return f"Examples are those of the data set {manifest.data}: {values}{steps}."


def _of_files(how: ImageTransform) -> str:
    window = "the file's own window" if how.window is None else f"the window {how.window[0]:g}, {how.window[1]:g}"
    crop = "" if how.stored == how.size else f", of which the middle {how.size} x {how.size} are cut out"
    return (
        f"An image file is decoded, turned upright and made RGB of 8 bits (DICOM through {window}), its middle square "
        f"is resized to {how.stored} x {how.stored} pixels (bilinear){crop}, and values are divided by 255, less "
        f"{_listed(how.mean)}, divided by {_listed(how.std)} per channel."
    )


def _listed(numbers: Sequence[float]) -> str:
    return f"({', '.join(f'{n:g}' for n in numbers)})"
