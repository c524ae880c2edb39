"""Data sets that fit in memory as they are published: images as bytes, sequences and points as floats.

Every silo of a simulation looks at one shared array through the positions that the partition gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from fl_core.datasets.augmentation import Augmentation
from fl_core.datasets.checks import CheckReport, problem
from fl_core.datasets.examples import SPLITS, ArrayExamples, SiloDataset, fingerprint
from fl_core.datasets.partition.by_class import Indices, Labels
from fl_core.datasets.partition.federations import Partitioner, SiloIndices
from fl_core.errors import DataError
from fl_core.tensors import Tensor, torch
from fl_core.types.records import Schema


@dataclass(frozen=True, slots=True)
class SplitArrays:
    """One split as published. x: (N, *shape) uint8 images or float32; y: (N,) positions in the classes.

    users: (N,) the user of each example, by number; None if unknown
    """

    x: Tensor
    y: Labels
    users: Labels | None = None


@dataclass(frozen=True, slots=True)
class FullDataset:
    """A data set in memory. how, mean, std: see `ArrayExamples`."""

    name: str
    classes: tuple[str, ...]
    train: SplitArrays
    test: SplitArrays
    how: Augmentation
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def partition(self, federation: Partitioner) -> list[SiloIndices]:
        users = None
        if self.train.users is not None and self.test.users is not None:
            users = self.train.users, self.test.users
        return federation.partition(self.train.y, self.test.y, len(self.classes), users)


Reader = Callable[[str, Path | None], FullDataset]


@lru_cache(maxsize=1)
def _read(reader: Reader, name: str, root: Path | None) -> FullDataset:
    """Read once for all silos of a simulation; only the newest stays in memory."""
    return reader(name, root)


@lru_cache(maxsize=2)
def _partition(reader: Reader, name: str, root: Path | None, federation: Partitioner) -> list[SiloIndices]:
    return _read(reader, name, root).partition(federation)


def cached(reader: Reader, name: str, root: Path | None) -> FullDataset:
    return _read(reader, name, root)


def clear_cache() -> None:
    """Clear the caches, so that data are read and divided again."""
    _read.cache_clear()
    _partition.cache_clear()


@dataclass(frozen=True, slots=True)
class ArrayShare:
    """One silo's positions in a data set. space: the label space; origin: the canonical reference."""

    source: FullDataset
    indices: SiloIndices
    space: tuple[str, ...]
    origin: str

    @classmethod
    def of(
        cls,
        reader: Reader,
        name: str,
        root: Path | None,
        federation: Partitioner,
        silo: int,
        classes: Sequence[str] | None,
    ) -> ArrayShare:
        """Partition a data set and take one silo's share; classes: the label space, the data set's own by default."""
        whole, indices = _read(reader, name, root), _partition(reader, name, root, federation)[silo]
        return cls(whole, indices, tuple(classes or whole.classes), f"{name}/{federation.text}/{silo}")

    def dataset(self) -> SiloDataset:
        """Make the examples.

        Raises DataError (E-DATA-05) when a class of this silo is outside the label space, E-DATA-08 when a split is
        empty.
        """
        report = self.report()
        report.require_sound()
        whole, public = self.source, None
        if len(self.indices.held_out):
            public = self._examples(whole.test, np.arange(len(whole.test.y)))
        train, test = (self._examples(half, index) for half, index in self._halves())
        schema = Schema(tuple(whole.train.x.shape[1:]), self.space)
        return SiloDataset(schema, train, test, self.origin, report.fingerprint, public)

    def _halves(self) -> tuple[tuple[SplitArrays, Indices], tuple[SplitArrays, Indices]]:
        """Return the arrays and positions of train and test; a hold-out is test, but is stored in the train array."""
        if len(self.indices.held_out):
            return (self.source.train, self.indices.train), (self.source.train, self.indices.held_out)
        return (self.source.train, self.indices.train), (self.source.test, self.indices.test)

    def _examples(self, half: SplitArrays, index: Indices) -> ArrayExamples:
        place = np.array([self.space.index(c) if c in self.space else -1 for c in self.source.classes], dtype=np.int64)
        y = torch.from_numpy(place[half.y[index]])
        return ArrayExamples(half.x, torch.from_numpy(index), y, self.source.how, self.source.mean, self.source.std)

    def report(self) -> CheckReport:
        n = len(self.source.classes)
        counts = [np.bincount(half.y[index], minlength=n) for half, index in self._halves()]
        both = counts[0] + counts[1]
        unknown = [c for k, c in enumerate(self.source.classes) if both[k] and c not in self.space]
        by_name = [dict(zip(self.source.classes, count.tolist(), strict=True)) for count in counts]
        problems = problem(
            "E-DATA-05",
            f"examples of classes outside the label space ({', '.join(self.space)})",
            [f"{c!r}: {sum(count[c] for count in by_name)}" for c in unknown],
            "Start a run with these `classes`",
            sum(count[c] for count in by_name for c in unknown),
        )
        empty = [split.value for split, count in zip(SPLITS, counts, strict=True) if not count.sum()]
        problems += problem(
            "E-DATA-08", "splits without any example", empty, "Divide among fewer silos, or by another rule"
        )
        rows = [half.x[torch.from_numpy(index)].numpy().tobytes() for half, index in self._halves()]
        names = [[self.source.classes[c] for c in half.y[index]] for half, index in self._halves()]
        return CheckReport(
            self.origin,
            self.space,
            {s: tuple(count.get(c, 0) for c in self.space) for s, count in zip(SPLITS, by_name, strict=True)},
            problems,
            fingerprint=fingerprint(*rows, *names),
        )


def no_data_root(name: str, searched: Sequence[Path], layout: str, publisher: str) -> DataError:
    """Create the error (E-DATA-02) with the searched folders and the publisher's address."""
    places = " or ".join(map(str, searched))
    return DataError(
        "E-DATA-02",
        f"{name}: expected {layout} in {places}, found none: get the data from the publisher ({publisher}), whose "
        "terms of use apply, and extract them there",
    )
