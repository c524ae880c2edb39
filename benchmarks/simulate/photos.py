"""Made-up photographs for models that digits are too small for."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from fl_core.extensions.user_data import ArrayData, Split


class Photos(ArrayData):
    """Noise in ten classes, 3 x 32 x 32: the work is that of photographs, the accuracy says nothing."""

    shape: ClassVar[tuple[int, ...]] = (3, 32, 32)
    classes: ClassVar[tuple[str, ...]] = tuple("abcdefghij")
    model: ClassVar[str] = "resnet18"

    def read(self, root: Path | None) -> tuple[Split, Split]:  # noqa: ARG002
        draw = torch.Generator().manual_seed(0)
        train, test = (torch.randint(256, (n, *self.shape), dtype=torch.uint8, generator=draw) for n in (128, 32))
        return (train, torch.arange(128) % 10), (test, torch.arange(32) % 10)
