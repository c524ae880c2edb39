"""Updates in files."""

from __future__ import annotations

from pathlib import Path

import torch

from fl_core.aggregation.aggregator import BLOCK
from fl_core.types.values import Bundle, Part, PartSpec
from protos.wire import codec
from protos.wire.bundle_file import BundleFile

SHAPES = {"large": (2, BLOCK // 2 + 3), "small": (5,), "none": (0, 3)}
LAYOUT = {"p": PartSpec(SHAPES, ())}


def drawn(seed: int, scale: float = 1.0, weight: float = 3.0) -> dict[str, Part]:
    generator = torch.Generator().manual_seed(seed)
    return {"p": Part.of({k: torch.randn(s, generator=generator) * scale for k, s in SHAPES.items()}, weight)}


def stored(bundle: Bundle, folder: Path, name: str = "bundle") -> BundleFile:
    codec.write_bundle(bundle, folder / name)
    return BundleFile(folder / name)
