"""The preprocessing of any image file for a model: the same as in training, and described in words.

One rule: a sentence for the readers of a model card, executed by `consilium predict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_core.datasets.catalogue import PUBLISHED
from fl_core.datasets.decoding.dicom import Window
from fl_core.datasets.image_files import IMAGENET_MEAN, IMAGENET_STD, ImageExamples, ImageTransform
from fl_core.datasets.image_loader import ImageLoader
from fl_core.datasets.sources import class_folders, isic2019
from fl_core.extensions import registry
from fl_core.tensors import Tensor, torch
from fl_core.types.columns import width
from fl_core.types.records import Schema
from fl_core.types.values import Examples

_FILES = ("folder", "manifest", "isic2019")
"""Data whose examples are image files of any size."""
_LUMA = (19595, 38470, 7471)
"""ITU-R BT.601, of 65536, as Pillow makes grey of colours; of equal colours it makes their value."""


def normalisation(data: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the standard deviation per channel of a data set's normalisation, if any."""
    if data in _FILES:
        return IMAGENET_MEAN, IMAGENET_STD
    published = PUBLISHED.get(data) or registry.loaded("data", data)
    return tuple(getattr(published, "mean", ())), tuple(getattr(published, "std", ()))


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """What a run on a data set (by its name) does to examples before they have the shape of its schema."""

    data: str
    schema: Schema

    @property
    def takes_images(self) -> bool:
        """Tell whether an image file can become an example: square ones of one or three channels."""
        shape = self.schema.shape
        return len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2] and not self.schema.columns

    def examples(self, files: Sequence[Path], loader: ImageLoader) -> Examples:
        """Return image files as unlabelled examples (-1), decoded when read, which raises DataError (E-DATA-04)."""
        labels = torch.full((len(files),), -1)
        kind = ImageExamples if self.schema.shape[0] == 3 else _GreyExamples
        return kind(files, labels, self._transform, loader=loader)

    def sentence(self, graph: bool = False) -> str:
        """Describe `examples` in words. graph: mean and standard deviation are inside the exported graph."""
        if columns := self.schema.columns:
            return (
                f"each row's {len(columns)} columns become {width(columns)} numbers by the ranges and categories "
                "that the file declares, never by values computed from records"
            )
        shape = " x ".join(map(str, self.schema.shape))
        if not self.takes_images:
            return f"none: examples from {self.data} are used unchanged ({shape} values each)"
        transform, side, channels = self._transform, self.schema.shape[-1], self.schema.shape[0]
        colours = "RGB of 8 bits" if channels == 3 else "grey of 8 bits (ITU-R BT.601)"
        crop = "" if transform.stored == side else f", of which the middle {side} x {side} are kept"
        steps = [
            f"each image is decoded, turned upright and made {colours}",
            f"its middle square is resized to {transform.stored} x {transform.stored} pixels by Pillow's bilinear "
            f"filter{crop}",
            "values are divided by 255",
        ]
        if any(normalisation(self.data)):
            mean, std = (", ".join(f"{v:g}" for v in values) for values in (transform.mean, transform.std))
            steps.append(
                f"mean ({mean}) is subtracted and the result divided by standard deviation ({std}), channel by channel"
                + (", inside the graph" if graph else "")
            )
        return f"{self._dicom()}{'; '.join(steps)}"

    def _dicom(self) -> str:
        """Describe the window of DICOM values, for hospitals' own files."""
        if self.data not in ("folder", "manifest"):
            return ""
        if (window := self.schema.window) is None:
            return "DICOM grey values are mapped by the window that each file declares; "
        return f"DICOM grey values are mapped by the window of centre {window[0]:g} and width {window[1]:g}; "

    @property
    def _transform(self) -> ImageTransform:
        size, window = self.schema.shape[-1], self.schema.window
        if self.data == "isic2019":
            return isic2019.transform(size)
        if self.data in _FILES:
            return class_folders.transform(size, None if window is None else Window(*window))
        channels, (mean, std) = self.schema.shape[0], normalisation(self.data)
        return ImageTransform(size, mean=tuple(mean) or (0.0,) * channels, std=tuple(std) or (1.0,) * channels)


class _GreyExamples(ImageExamples):
    """Image files as (1, size, size)."""

    def stored(self, index: Tensor) -> Tensor:
        weights = torch.tensor(_LUMA, dtype=torch.int32).view(3, 1, 1)
        luma = (super().stored(index).int() * weights).sum(1, keepdim=True)
        return (luma + (1 << 15) >> 16).to(torch.uint8)
