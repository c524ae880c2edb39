"""What a source of data gives a silo: examples of both splits, their public schema, and a fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_core.datasets.augment import Augmentation, augmented
from fl_core.types import Examples, Schema, Split

SPLITS = (Split.TRAIN, Split.TEST)
"""The splits that a hospital's own data has."""


@dataclass(frozen=True, slots=True)
class SiloDataset:
    """One silo's data.

    origin:      the canonical reference it was loaded from
    fingerprint: SHA-256 (hex) over what identifies the data; the same after a move to another folder
    """

    schema: Schema
    train: Examples
    test: Examples
    origin: str
    fingerprint: str


class TensorExamples(Examples):
    """Examples in memory: x (n, *shape) float32, y (n,) int64."""

    def __init__(
        self, x: Tensor, y: Tensor, groups: tuple[str, ...] | None = None, how: Augmentation | None = None
    ) -> None:
        if len(x) != len(y) or (groups is not None and len(groups) != len(y)):
            found = f"{len(x)} examples, {len(y)} labels and {'no' if groups is None else len(groups)} groups"
            raise ValueError(f"expected as many labels and groups as examples, found {found}")
        self.x = x.float()
        self.labels = y.long()
        self.groups = groups
        self._how = how or Augmentation()

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read the examples at `index` (B,); x in [0, 1] is augmented when a generator is given."""
        x = self.x[index]
        return (x if augment is None else augmented(x, self._how, augment)), self.labels[index]


def fingerprint(*fields: Iterable[str | int] | str | bytes) -> str:
    """Hash a sequence of fields to SHA-256 (hex); each field and each of its entries is framed by its length."""
    h = hashlib.sha256()
    for field in fields:
        entries = [field] if isinstance(field, (str, bytes)) else list(field)
        h.update(len(entries).to_bytes(8, "little"))
        for entry in entries:
            raw = entry if isinstance(entry, bytes) else str(entry).encode()
            h.update(len(raw).to_bytes(8, "little"))
            h.update(raw)
    return h.hexdigest()
