"""Looking at a source before any training: what is there, and everything that is wrong with it, in one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from fl_core.datasets.examples import SPLITS, SiloDataset, fingerprint
from fl_core.datasets.image_files import ImageExamples, ImageTransform, UnreadableError, open_image
from fl_core.datasets.partition.federations import Partitioner, SiloIndices
from fl_core.errors import DataError
from fl_core.types.enums import Split
from fl_core.types.records import Schema

SHOWN = 5


@dataclass(frozen=True, slots=True)
class CheckProblem:
    """One kind of fault: its error code, what was expected and found, how often, the first few names, what to do."""

    code: str
    what: str
    count: int
    first: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        names = ", ".join(self.first) + (", ..." if self.count > len(self.first) else "")
        return f"{self.code}: {self.what}: {self.count}{f' ({names})' if names else ''}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found in a source; `problems` is empty when a run may use it.

    counts: examples per split and class, in the order of `classes`
    sizes:  (width, height) -> images, of a deep check alone
    groups: number of privacy units (lesions, patients), None where the source names none
    notes:  facts that hinder nothing
    """

    origin: str
    classes: tuple[str, ...]
    counts: Mapping[Split, tuple[int, ...]]
    problems: tuple[CheckProblem, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    groups: int | None = None
    fingerprint: str = ""

    def require_sound(self) -> None:
        """Raise one DataError with all problems, under the code of the first."""
        if self.problems:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            raise DataError(self.problems[0].code, f"{self.origin} cannot be used as it is:{lines}")


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a source. name: unique within the source, independent of where the source lies."""

    path: Path
    name: str
    label: str
    split: Split
    group: str | None = None


@dataclass(frozen=True, slots=True)
class SourceIndex:
    """All that a source says of itself, before any pixel is read; items of unknown classes are left in.

    public: the official test images, where a silo's own test images were held out of its training images
    """

    origin: str
    classes: tuple[str, ...]
    items: tuple[Item, ...]
    problems: tuple[CheckProblem, ...] = ()
    notes: tuple[str, ...] = ()
    public: tuple[Item, ...] = ()

    def report(self) -> CheckReport:
        """Count, and find what every kind of source can have wrong: unknown classes, empty splits, split groups."""
        tally = Counter((item.split, item.label) for item in self.items)
        counts = {split: tuple(tally[split, c] for c in self.classes) for split in SPLITS}
        groups = {item.group for item in self.items} - {None}
        return CheckReport(
            self.origin,
            self.classes,
            counts,
            (*self.problems, *self._unknown(), *self._empty(counts), *self._ungrouped()),
            self.notes,
            groups=len(groups) or None,
            fingerprint=self._fingerprint(),
        )

    def deep_report(self, threads: int = 2) -> CheckReport:
        report = self.report()
        sizes: Counter[tuple[int, int]] = Counter()
        broken = []
        with ThreadPoolExecutor(threads) as pool:
            for item, result in zip(self.items, pool.map(_measure, [i.path for i in self.items]), strict=True):
                if isinstance(result, str):
                    broken.append(f"{item.name}: {result}")
                else:
                    sizes[result] += 1
        unreadable = problem("E-DATA-04", "images that cannot be read", broken, "Restore these files or leave them out")
        return replace(report, problems=(*report.problems, *unreadable), sizes=dict(sizes))

    def dataset(self, transform: ImageTransform) -> SiloDataset:
        """Make the examples; raises DataError when the report has a problem."""
        report = self.report()
        report.require_sound()
        size = transform.size
        train, test = (
            self._examples([item for item in self.items if item.split is split], transform) for split in SPLITS
        )
        public = self._examples(self.public, transform) if self.public else None
        return SiloDataset(Schema((3, size, size), self.classes), train, test, self.origin, report.fingerprint, public)

    def for_silo(self, federation: Partitioner, silo: int, origin: str) -> SourceIndex:
        """Keep one silo's share, by label; everything, for the report, when there is a problem."""
        if self.report().problems:
            return replace(self, origin=origin)
        return self.subset(self.shares(federation)[silo], origin)

    def shares(self, federation: Partitioner) -> list[SiloIndices]:
        labels = [
            np.array([self.classes.index(i.label) for i in self.items if i.split is split], dtype=np.int64)
            for split in SPLITS
        ]
        return federation.partition(labels[0], labels[1], len(self.classes))

    def subset(self, share: SiloIndices, origin: str) -> SourceIndex:
        """Keep one share of `shares`; where it holds out training images as its own test, the test split is public."""
        train, test = ([item for item in self.items if item.split is split] for split in SPLITS)
        kept = [train[i] for i in share.train] + [test[i] for i in share.test]
        kept += [replace(train[i], split=Split.TEST) for i in share.held_out]
        public = tuple(test) if len(share.held_out) else ()
        return replace(self, origin=origin, items=tuple(kept), public=public)

    def _examples(self, items: Sequence[Item], transform: ImageTransform) -> ImageExamples:
        labels = torch.tensor([self.classes.index(item.label) for item in items], dtype=torch.int64)
        groups = tuple(item.group for item in items if item.group is not None)
        return ImageExamples([i.path for i in items], labels, transform, groups if len(groups) == len(items) else None)

    def _fingerprint(self) -> str:
        """Hash names, sizes in bytes, labels, groups and splits; not the pixels, which would take minutes."""
        rows = sorted(
            (i.name, i.label, i.split.value, i.group or "", i.path.stat().st_size if i.path.is_file() else -1)
            for i in self.items
        )
        return fingerprint(*rows)

    def _unknown(self) -> tuple[CheckProblem, ...]:
        unknown = Counter(item.label for item in self.items if item.label not in self.classes)
        return problem(
            "E-DATA-05",
            f"images of classes outside the label space ({', '.join(self.classes)})",
            [f"{label!r}: {count}" for label, count in sorted(unknown.items())],
            "Remove or rename these classes, or start a run whose `classes` name them",
            sum(unknown.values()),
        )

    def _empty(self, counts: Mapping[Split, tuple[int, ...]]) -> tuple[CheckProblem, ...]:
        empty = [split.value for split in SPLITS if not sum(counts[split])]
        return problem("E-DATA-08", "splits without any usable image", empty, "Give both splits images")

    def _ungrouped(self) -> tuple[CheckProblem, ...]:
        """Refuse groups for some images only: the privacy unit of the others would be unknown."""
        ungrouped = [item.name for item in self.items if item.group is None]
        if len(ungrouped) == len(self.items):
            return ()
        return problem("E-DATA-07", "images without a group among images that have one", ungrouped, "Name every group")


def problem(
    code: str, what: str, names: Sequence[str], remedy: str, count: int | None = None
) -> tuple[CheckProblem, ...]:
    """Make a problem of these names, or nothing when there are none; count: when a name stands for several."""
    return (
        (CheckProblem(code, what, len(names) if count is None else count, tuple(names[:SHOWN]), remedy),)
        if names
        else ()
    )


def groups_in_both_splits(items: Sequence[Item]) -> list[str]:
    train = {item.group for item in items if item.split is Split.TRAIN}
    test = {item.group for item in items if item.split is Split.TEST}
    return sorted(group for group in train & test if group is not None)


def _measure(path: Path) -> tuple[int, int] | str:
    try:
        return open_image(path).size
    except UnreadableError as error:
        return str(error)
