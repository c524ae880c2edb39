"""Image files as examples, read lazily: square, crop, augment, normalise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fl_core.datasets.augmentation import Augmentation, augmented
from fl_core.datasets.decoding.dicom import Window
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.image_loader import ImageFormat, ImageLoader, SquareKey, shared_loader
from fl_core.errors import DataError
from fl_core.tensors import Tensor, torch
from fl_core.types.values import Examples

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """From a file to x (3, size, size).

    size: side of x in pixels
    margin: the shorter side is first resized to round(margin * size), from which a square of `size` is cropped: the
    centre, or at random for augmentation. FLamby: 224 / 200.
    mean, std: per channel, of x in [0, 1]
    window: of DICOM's grey values, the same at every hospital of a run; None: each file's own (`decoding.dicom`)
    """

    size: int
    margin: float = 1.0
    how: Augmentation = field(default_factory=Augmentation)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    window: Window | None = None

    @property
    def stored(self) -> int:
        """Return the side of the cached square, before the last crop."""
        return round(self.size * self.margin)


class ImageExamples(Examples):
    """Examples in image files, decoded when first read; loader: decodes and caches them, shared.

    Guarantees: loader and number of threads do not change results; the error of an unreadable file names it
    (E-DATA-04).
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Tensor,
        transform: ImageTransform,
        groups: tuple[str, ...] | None = None,
        *,
        loader: ImageLoader | None = None,
    ) -> None:
        if len(paths) != len(labels) or (groups is not None and len(groups) != len(labels)):
            raise ValueError(f"expected one label per path, found {len(labels)} labels and {len(paths)} paths")
        self.paths = tuple(paths)
        self.labels = labels.long()
        self.groups = groups
        self._transform = transform
        self._loader = loader or shared_loader()
        self._seen: dict[int, SquareKey | None] = {}

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read the examples at `index` (B,): x (B, 3, size, size), normalised; raises DataError."""
        return self.prepared(self.stored(index), augment), self.labels[index]

    def prepared(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:
        x = self._crop(x.float() / 255, augment)
        if augment is not None:
            x = augmented(x, self._transform.how, augment)
        mean, std = (torch.tensor(v).view(-1, 1, 1).to(x) for v in (self._transform.mean, self._transform.std))
        return (x - mean) / std

    def stored(self, index: Tensor) -> Tensor:
        """Return the square images (B, 3, stored, stored) uint8, of each file as it was when first read."""
        wanted = index.tolist()
        for i in wanted:
            if i not in self._seen:
                self._seen[i] = SquareKey.of(self.paths[i])
        form = ImageFormat(self._transform.stored, self._transform.window)
        try:
            squares = self._loader.squares([(self.paths[i], self._seen[i]) for i in wanted], form)
        except UnreadableError as error:
            raise DataError(
                "E-DATA-04",
                f"expected a readable image at {error.path}, found: {error}. Restore the file, or remove it from the "
                "dataset's description; `silo data check` finds all such files before a run",
            ) from error
        return torch.from_numpy(squares).permute(0, 3, 1, 2).contiguous()

    def without(self, broken: Collection[int]) -> ImageExamples:
        """Return the same examples, each in its first state, except those at some positions."""
        kept = [i for i in range(len(self)) if i not in broken]
        groups = None if self.groups is None else tuple(self.groups[i] for i in kept)
        paths, labels = [self.paths[i] for i in kept], self.labels[torch.tensor(kept, dtype=torch.long)]
        fewer = ImageExamples(paths, labels, self._transform, groups, loader=self._loader)
        fewer._seen = {k: self._seen[i] for k, i in enumerate(kept) if i in self._seen}
        return fewer

    def _crop(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Cut out (size, size): the centre, or at random."""
        size, slack = self._transform.size, self._transform.stored - self._transform.size
        if slack == 0 or len(x) == 0:
            return x[..., :size, :size]
        if generator is None:
            at = slack // 2
            return x[..., at : at + size, at : at + size]
        corners = torch.randint(0, slack + 1, (len(x), 2), generator=generator).tolist()
        return torch.stack([v[:, r : r + size, c : c + size] for v, (r, c) in zip(x, corners, strict=True)])
