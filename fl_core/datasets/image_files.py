"""Image files, read lazily: decode, square, crop, augment, normalise."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fl_core.datasets.augmentation import Augmentation, augmented
from fl_core.errors import DataError
from fl_core.types.values import Examples

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp"})
EIGHT_BIT = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
_CACHE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """From a file to x (3, size, size).

    size:   pixels of a side of x
    margin: the shorter side is first resized to round(margin * size), from which a square of `size` is cropped: the
            centre, or at random when augmented. FLamby: 224 / 200.
    mean, std: per channel, of x in [0, 1]
    """

    size: int
    margin: float = 1.0
    how: Augmentation = field(default_factory=Augmentation)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @property
    def stored(self) -> int:
        """Return the side of the square that is kept before the last crop."""
        return round(self.size * self.margin)


MOST_PIXELS = 1 << 26
"""Of one image file, 8192 x 8192: decoded and turned it takes half a gigabyte."""


class UnreadableError(Exception):
    """An image file that cannot be decoded; the message says why."""


def open_image(path: Path) -> Image.Image:
    """Decode a file to the last byte, turned upright, in RGB.

    Raises UnreadableError on what no decoder reads to the end, and on pixels of more than 8 bits, which a silent
    conversion would saturate to white. One of more than MOST_PIXELS is not decoded.
    """
    try:
        with Image.open(path) as file:
            if file.mode not in EIGHT_BIT:
                raise UnreadableError(f"pixels of mode {file.mode}, not of 8 bits: convert the file")
            if file.width * file.height > MOST_PIXELS:
                raise UnreadableError(f"{file.width} x {file.height} pixels, more than {MOST_PIXELS}: make it smaller")
            file.load()
            return ImageOps.exif_transpose(file).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # PIL raises SyntaxError on broken PNG chunks, ValueError on broken headers.
        raise UnreadableError(str(error).replace(str(path), path.name) or type(error).__name__) from error


def decode(path: Path, side: int) -> Tensor:
    """Decode a file to its middle square (3, side, side) uint8, whose side is the image's shorter one, resized."""
    square = ImageOps.fit(open_image(path), (side, side), method=Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


class ImageExamples(Examples):
    """Examples in image files, decoded when first read and kept as bytes up to a memory bound.

    Guarantees: the number of threads changes no result; a file that cannot be read names itself (E-DATA-04).
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Tensor,
        transform: ImageTransform,
        groups: tuple[str, ...] | None = None,
        *,
        threads: int = 2,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        if len(paths) != len(labels) or (groups is not None and len(groups) != len(labels)):
            raise ValueError(f"expected one label per path, found {len(labels)} labels and {len(paths)} paths")
        self.paths = tuple(paths)
        self.labels = labels.long()
        self.groups = groups
        self._transform = transform
        self._threads = threads
        self._room = cache_bytes // (3 * transform.stored**2)
        self._kept: dict[int, Tensor] = {}

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read the examples at `index` (B,): x (B, 3, size, size), normalised; raises DataError."""
        wanted: list[int] = index.tolist()
        x = self._read(wanted).float() / 255
        x = self._crop(x, augment)
        if augment is not None:
            x = augmented(x, self._transform.how, augment)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self._transform.mean, self._transform.std))
        return (x - mean) / std, self.labels[index]

    def _read(self, wanted: list[int]) -> Tensor:
        """Return the squares (B, 3, stored, stored) uint8, from memory or from their files."""
        new = [i for i in dict.fromkeys(wanted) if i not in self._kept]
        with ThreadPoolExecutor(self._threads) as pool:
            fresh = dict(zip(new, pool.map(self._open, new), strict=True))
        squares = [self._kept[i] if i in self._kept else fresh[i] for i in wanted]
        for i in new[: max(0, self._room - len(self._kept))]:
            self._kept[i] = fresh[i]
        side = self._transform.stored
        return torch.stack(squares) if squares else torch.zeros(0, 3, side, side, dtype=torch.uint8)

    def _open(self, i: int) -> Tensor:
        try:
            return decode(self.paths[i], self._transform.stored)
        except UnreadableError as error:
            raise DataError(
                "E-DATA-04",
                f"expected a readable image at {self.paths[i]}, found: {error}. Restore the file, or take it out of "
                "the dataset's description; `silo data check --deep` finds all such files before a run",
            ) from error

    def _crop(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Cut out (size, size): the middle, or anywhere."""
        size, slack = self._transform.size, self._transform.stored - self._transform.size
        if slack == 0 or len(x) == 0:
            return x[..., :size, :size]
        if generator is None:
            at = slack // 2
            return x[..., at : at + size, at : at + size]
        corners = torch.randint(0, slack + 1, (len(x), 2), generator=generator).tolist()
        return torch.stack([v[:, r : r + size, c : c + size] for v, (r, c) in zip(x, corners, strict=True)])
