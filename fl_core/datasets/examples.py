"""A silo's data from any source: examples of both splits, their public schema, and a fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fl_core.datasets.augmentation import Augmentation, augmented
from fl_core.datasets.label_dictionary import NO_DICTIONARY, LabelDictionary
from fl_core.tensors import Tensor, torch
from fl_core.types.enums import Split
from fl_core.types.records import Schema
from fl_core.types.values import Examples

SPLITS = (Split.TRAIN, Split.TEST)
"""The splits of a hospital's own data."""


class ListedRecord(NamedTuple):
    """A record in a file, as its source lists it; group: empty without one   size: in bytes, -1 if it is missing."""

    name: str
    label: str
    split: str
    group: str
    size: int


@dataclass(frozen=True, slots=True)
class SiloDataset:
    """One silo's data.

    origin:      the canonical reference it was loaded from
    fingerprint: SHA-256 (hex) that identifies the data; the same after a move to another folder
    public:      the official test set, if the silo's own test examples were held out of its training data
    dictionary:  translates the hospital's own labels to classes
    records:     of examples in files: training examples, then test examples
    earlier:     reads the same data as 0.1.0 did, if that version named, divided or numbered them differently
    """

    schema: Schema
    train: Examples
    test: Examples
    origin: str
    fingerprint: str
    public: Examples | None = None
    dictionary: LabelDictionary = NO_DICTIONARY
    records: tuple[ListedRecord, ...] = ()
    earlier: Callable[[], SiloDataset] | None = None

    @property
    def coarse(self) -> bool:
        """Whether coarse labels are declared for these data, independent of the records."""
        return self.dictionary.is_coarse(self.schema.classes)


class TensorExamples(Examples):
    """Examples in memory: x (n, *shape) float32, y (n,) int64."""

    def __init__(
        self, x: Tensor, y: Tensor, groups: tuple[str, ...] | None = None, how: Augmentation | None = None
    ) -> None:
        if len(x) != len(y) or (groups is not None and len(groups) != len(y)):
            counts = f"{len(x)} examples, {len(y)} labels and {'no' if groups is None else len(groups)} groups"
            raise ValueError(f"expected as many labels and groups as examples, found {counts}")
        self.x = x.float()
        self.labels = y.long()
        self.groups = groups
        self._how = how or Augmentation()

    def stored(self, index: Tensor) -> Tensor:
        return self.x[index]

    def prepared(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:
        return x if augment is None else augmented(x, self._how, augment)

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.prepared(self.stored(index), augment), self.labels[index]


class ArrayExamples(Examples):
    """Some rows of an array that all silos of a simulation share; bytes become floats batch by batch.

    Attributes:
        whole: (N, *shape), uint8 images or float32
        index: (n,) its rows
        labels: (n,)
        mean, std: per channel, of x in [0, 1], nothing where there is no normalisation
    """

    def __init__(
        self,
        whole: Tensor,
        index: Tensor,
        labels: Tensor,
        how: Augmentation | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
    ) -> None:
        if len(index) != len(labels):
            raise ValueError(f"expected a label per row, found {len(labels)} labels and {len(index)} rows")
        self.labels = labels.long()
        self.groups = None
        self._whole = whole
        self._index = index
        self._how = how or Augmentation()
        self._mean = torch.tensor(mean).view(-1, 1, 1)
        self._std = torch.tensor(std).view(-1, 1, 1)

    def stored(self, index: Tensor) -> Tensor:
        return self._whole[self._index[index]]

    def prepared(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        if augment is not None:
            x = augmented(x, self._how, augment)
        return (x - self._mean.to(x)) / self._std.to(x) if len(self._mean) else x

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read the examples at `index` (B,), augmented when a generator is given, then normalised."""
        return self.prepared(self.stored(index), augment), self.labels[index]


def fingerprint_of(records: Iterable[ListedRecord]) -> str:
    """Hash names, labels, splits, groups and sizes in bytes. Pixels are not hashed, since that would take minutes."""
    return fingerprint(*sorted(records))


def fingerprint(*fields: Iterable[str | int] | str | bytes) -> str:
    """Hash a sequence of fields to SHA-256 (hex); each field and each of its entries is framed by its length."""
    h = hashlib.sha256()
    for field in fields:
        entries = [field] if isinstance(field, (str, bytes)) else list(field)
        h.update(len(entries).to_bytes(8, "little"))
        for entry in entries:
            raw = entry if isinstance(entry, bytes) else str(entry).encode(errors="surrogateescape")
            h.update(len(raw).to_bytes(8, "little"))
            h.update(raw)
    return h.hexdigest()
