"""The spiral data of FedNH's motivating examples: one arm per class in the plane. Needs no data on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fl_core import rng
from fl_core.datasets import FIXED
from fl_core.datasets.augmentation import Augmentation
from fl_core.datasets.sources.arrays import FullDataset, SplitArrays

CLASSES = FIXED["spiral"].classes
TRAIN, TEST = 400, 100
INNER, OUTER, JITTER = 1.0, 10.0, 0.5


def read(name: str, root: Path | None) -> FullDataset:
    """Draw both splits, identical in every process. Reads no files.

    A point of class c lies at radius r, from 1 to 10 in equal steps, and angle (c + (r - 1) / 9) 2 pi / C + U(0, 0.5),
    clockwise from the vertical axis. Source: FedNH; the five arms of 400 and 100 points are our choice.
    """
    del root
    return FullDataset(name, CLASSES, _half("train", TRAIN), _half("test", TEST), Augmentation())


def _half(split: str, per_class: int) -> SplitArrays:
    c = torch.arange(len(CLASSES)).repeat_interleave(per_class)  # (N,)
    along = torch.linspace(0, 1, per_class).repeat(len(CLASSES))
    jitter = torch.rand(len(c), generator=rng.stream(0, "spiral", split)) * JITTER
    angle = (c + along) / len(CLASSES) * 2 * torch.pi + jitter
    radius = INNER + (OUTER - INNER) * along
    x = torch.stack([radius * torch.sin(angle), radius * torch.cos(angle)], 1)
    return SplitArrays(x, c.numpy().astype(np.int64))
