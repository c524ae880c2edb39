"""Checks of a source before training: its contents and all its faults, in one report."""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fl_core.datasets.decoding.dicom import Window, is_dicom
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import content, described, open_image
from fl_core.datasets.examples import SPLITS, ListedRecord, SiloDataset, fingerprint_of
from fl_core.datasets.image_files import ImageExamples, ImageTransform
from fl_core.datasets.image_loader import ImageLoader, cores
from fl_core.datasets.label_dictionary import FILE, TABLE, Translator
from fl_core.datasets.partition.federations import Partitioner, SiloIndices
from fl_core.datasets.sources.label_columns import LabelColumns
from fl_core.errors import ConfigError, DataError
from fl_core.tensors import torch
from fl_core.types.enums import Split
from fl_core.types.records import Schema
from fl_core.types.targets import UNKNOWN, class_counts

SHOWN, IN_A_LINE = 50, 5
ONE_IN = 100
"""One record in this many may be broken, or one if there are fewer records; it is left out. More are refused."""
MAX_KINDS = 20


@dataclass(frozen=True, slots=True)
class CheckProblem:
    """One kind of fault: its error code, what was expected and found, how often, the first names, the remedy.

    first: at most SHOWN names, of which the text has IN_A_LINE   records: each name is a listed record that cannot be
    read, so that a few of them are left out of a run   names: their number, if a name may stand for several.
    """

    code: str
    what: str
    count: int
    first: tuple[str, ...]
    remedy: str
    records: bool = False
    names: int = 0

    def __str__(self) -> str:
        names = ", ".join(self.first[:IN_A_LINE]) + (", ..." if len(self.first) > IN_A_LINE else "")
        return f"{self.code}: {self.what}: {self.count}{f' ({names})' if names else ''}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The contents and faults of a source; a run may use it if `problems` is empty.

    Attributes:
        counts: examples per split and class, in the order of `classes`; of several labels, those found
        records: the listed ones
        sizes: (width, height) -> images, only of a deep check
        groups: number of privacy units (lesions, patients), None if the source names none
        notes: remarks that are no faults
        unread: files that are no examples, by extension
    """

    origin: str
    classes: tuple[str, ...]
    counts: Mapping[Split, tuple[int, ...]]
    problems: tuple[CheckProblem, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    groups: int | None = None
    fingerprint: str = ""
    unread: Mapping[str, int] = field(default_factory=dict)
    records: int = 0

    def require_sound(self) -> None:
        """Raise one DataError with all problems, under the code of the first."""
        if self.problems:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            raise DataError(self.problems[0].code, f"{self.origin} cannot be used as it is:{lines}")

    def require_usable(self) -> None:
        """Raise as `require_sound`, unless the only problems are a few records that runs leave out."""
        broken = sum(problem.count for problem in self.problems if problem.records)
        if any(not p.records for p in self.problems) or broken > allowed_broken(self.records):
            self.require_sound()


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a source.

    name: unique within the source, independent of the source's path   size: in bytes, if the listing had it
    answers: of an image that may have several labels, for each of the source's `label_names`; `label` spells them out
    """

    path: Path
    name: str
    label: str
    split: Split
    group: str | None = None
    size: int | None = None
    answers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceIndex:
    """A source's own description, before any pixel is read; items of unknown classes are included.

    public: the official test images, if a silo's own test images were held out of its training images
    labels: translates the hospital's own labels   label_names: of images that may have several labels, those looked for
    """

    origin: str
    classes: tuple[str, ...]
    items: tuple[Item, ...]
    problems: tuple[CheckProblem, ...] = ()
    notes: tuple[str, ...] = ()
    public: tuple[Item, ...] = ()
    unread: Mapping[str, int] = field(default_factory=dict)
    labels: Translator = field(default_factory=Translator)
    label_names: tuple[str, ...] = ()

    def report(self) -> CheckReport:
        """Count the examples, and find faults of every kind of source: unknown classes, empty splits, split groups."""
        counts = self._counts()
        groups = {item.group for item in self.items} - {None}
        return CheckReport(
            self.origin,
            self.classes,
            counts,
            (*self.problems, *dictionary_problems(self.labels), *self._unknown(), *self._empty(), *self._ungrouped()),
            (*self.notes, *self.labels.notes(), *self._notes(counts)),
            groups=len(groups) or None,
            fingerprint=fingerprint_of(self._records()),
            unread=self.unread,
            records=len(self.items),
        )

    def _counts(self) -> dict[Split, tuple[int, ...]]:
        if self.label_names:
            halves = {split: self._targets([i for i in self.items if i.split is split]) for split in SPLITS}
            return {split: tuple(class_counts(y, len(self.classes)).tolist()) for split, y in halves.items()}
        tally = Counter((item.split, item.label) for item in self.items)
        return {split: tuple(tally[split, c] for c in self.classes) for split in SPLITS}

    def _targets(self, items: Sequence[Item]) -> torch.Tensor:
        """Encode items; raises as `Translator.target`."""
        if self.label_names:
            return self._columns(items).targets(self.classes)
        return torch.tensor([self.labels.target(item.label, self.classes) for item in items], dtype=torch.int64)

    def _columns(self, items: Sequence[Item]) -> LabelColumns:
        rows = torch.tensor([item.answers for item in items], dtype=torch.int64)
        return LabelColumns(self.label_names, rows.reshape(len(items), len(self.label_names)))

    def deep_report(self, window: Window | None = None) -> CheckReport:
        """Also check every image: whether it can be read completely, its size, and duplicates of its pixels."""
        report = self.report()
        with ThreadPoolExecutor(cores()) as pool:
            results = list(pool.map(lambda item: _measure(item.path, window), self.items))
        pairs = list(zip(self.items, results, strict=True))
        broken = [f"{i.name}: {m}" for i, m in pairs if isinstance(m, str) and i.path.exists()]
        sound = [(i, m) for i, m in pairs if isinstance(m, _Measured)]
        dark = [item.name for item, measured in sound if measured.dark]
        oblong = [item.name for item, measured in sound if not measured.square]
        unreadable = problem("E-DATA-04", "images that cannot be read", broken, "Restore these files or leave them out")
        twins, notes = _twins(sound)
        if dark:
            notes = (
                *notes,
                f"almost black images, which use at most a sixteenth of their value range: {_listed(dark)}",
            )
        if oblong:
            notes = (*notes, f"images with non-square pixels, which are read as if they were square: {_listed(oblong)}")
        return replace(
            report,
            problems=(*report.problems, *unreadable, *twins),
            notes=(*report.notes, *notes),
            sizes=dict(Counter(measured.size for _, measured in sound)),
        )

    def dataset(self, transform: ImageTransform, loader: ImageLoader | None = None) -> SiloDataset:
        """Create the examples, also with a few unreadable files; raises DataError on any other problem."""
        report = self.report()
        report.require_usable()
        size = transform.size
        train, test = (
            self._examples([item for item in self.items if item.split is split], transform, loader) for split in SPLITS
        )
        public = self._examples(self.public, transform, loader) if self.public else None
        schema = Schema((3, size, size), self.classes, multi_label=bool(self.label_names))
        dictionary = self.labels.dictionary
        records = tuple(r for split in SPLITS for r in self._records() if r.split == split.value)
        return SiloDataset(schema, train, test, self.origin, report.fingerprint, public, dictionary, records)

    def has_problems(self) -> bool:
        """Tell whether `report` would list more than unreadable records, without opening a file."""
        faults = self.labels.dictionary.faults
        other = any(not p.records for p in self.problems)
        return bool(other or faults or self._unknown() or self._empty() or self._ungrouped())

    def shares(self, federation: Partitioner) -> list[SiloIndices]:
        """Divide the items; raises ConfigError (E-CFG-23) by class if they have several or coarse labels."""
        if self.label_names:
            require_even(federation)
            train, test = (sum(i.split is split for i in self.items) for split in SPLITS)
            return federation.partition(np.zeros(train, np.int64), np.zeros(test, np.int64), len(self.classes))
        require_one_class(self.labels)
        labels = [
            np.array([self.classes.index(i.label) for i in self.items if i.split is split], dtype=np.int64)
            for split in SPLITS
        ]
        return federation.partition(labels[0], labels[1], len(self.classes))

    def subset(self, share: SiloIndices, origin: str) -> SourceIndex:
        """Keep one share of `shares`; if it holds out training images as its own test, the test split is public."""
        train, test = ([item for item in self.items if item.split is split] for split in SPLITS)
        kept = [train[i] for i in share.train] + [test[i] for i in share.test]
        kept += [replace(train[i], split=Split.TEST) for i in share.held_out]
        public = tuple(test) if len(share.held_out) else ()
        problems = tuple(p for p in self.problems if not p.records)  # reading the records shows whose they are
        return replace(self, origin=origin, items=tuple(kept), problems=problems, public=public)

    def _examples(self, items: Sequence[Item], transform: ImageTransform, loader: ImageLoader | None) -> ImageExamples:
        groups = tuple(item.group for item in items if item.group is not None)
        whole = groups if len(groups) == len(items) else None
        return ImageExamples([i.path for i in items], self._targets(items), transform, whole, loader=loader)

    def _records(self) -> tuple[ListedRecord, ...]:
        return tuple(
            ListedRecord(i.name, i.label, i.split.value, i.group or "", _bytes(i.path) if i.size is None else i.size)
            for i in self.items
        )

    def _notes(self, counts: Mapping[Split, tuple[int, ...]]) -> tuple[str, ...]:
        if self.label_names:
            return self._columns(self.items).notes(self.classes)
        return (*self._without_images(counts), *self._suspicious_names())

    def _without_images(self, counts: Mapping[Split, tuple[int, ...]]) -> tuple[str, ...]:
        train, test = ({c for c, n in zip(self.classes, counts[s], strict=True) if not n} for s in SPLITS)
        none, untested = sorted(train & test), sorted(test - train)
        notes = (
            (f"classes without an image: {_listed(none)}; this is correct if the hospital has no cases of them",)
            if none
            else ()
        )
        return (*notes, *((f"classes without a test image: {_listed(untested)}",) if untested else ()))

    def _unknown(self) -> tuple[CheckProblem, ...]:
        unknown = Counter(self.label_names or (item.label for item in self.items))
        return unknown_labels(unknown, self.labels, self.classes, "columns" if self.label_names else "images")

    def _suspicious_names(self) -> tuple[str, ...]:
        """Name classes that look like several labels at once, or like a missing one."""
        joined = [c for c in self.classes if len(parts := re.split(r"\s*[|;]\s*", c)) > 1 and all(parts)]
        missing = [c for c in self.classes if c.lower() in ("nan", "null", "n/a", "<na>")]
        several = "here each image has one label; a manifest can list several (separator, docs/data.md)"
        return (
            *([f"classes that look like several labels: {_listed(joined)}: {several}"] if joined else ()),
            *([f"classes that look like a missing label: {_listed(missing)}"] if missing else ()),
        )

    def _empty(self) -> tuple[CheckProblem, ...]:
        if self.label_names:
            halves = {split: self._targets([i for i in self.items if i.split is split]) for split in SPLITS}
            present = {split for split, y in halves.items() if bool((y != UNKNOWN).any())}
        else:
            present = {item.split for item in self.items if self.labels.fits(item.label, self.classes)}
        empty = [split.value for split in SPLITS if split not in present]
        return problem("E-DATA-08", "splits without any usable image", empty, "Give both splits images")

    def _ungrouped(self) -> tuple[CheckProblem, ...]:
        """Refuse groups for only some images: the privacy unit of the others would be unknown."""
        ungrouped = [item.name for item in self.items if item.group is None]
        if len(ungrouped) == len(self.items):
            return ()
        return problem(
            "E-DATA-07", "images without a group, although other images have one", ungrouped, "Name every group"
        )


def allowed_broken(n: int) -> int:
    """Return the number of n records that may be broken and are then left out."""
    return max(1, n // ONE_IN)


def problem(
    code: str, what: str, names: Sequence[str], remedy: str, count: int | None = None, records: bool = False
) -> tuple[CheckProblem, ...]:
    """Create a problem for these names, or nothing if there are none; count: if a name stands for several."""
    number = len(names) if count is None else count
    return (CheckProblem(code, what, number, tuple(names[:SHOWN]), remedy, records, len(names)),) if names else ()


def unknown_labels(
    counts: Mapping[str, int], labels: Translator, classes: Sequence[str], what: str
) -> tuple[CheckProblem, ...]:
    """Find translated labels outside a label space, with the lines of the dictionary that gave them."""
    unknown = {label: n for label, n in counts.items() if not labels.fits(label, classes)}
    return problem(
        "E-DATA-05",
        f"{what} of classes outside the label space ({', '.join(classes)})",
        [f"{label[:40]!r}: {n}{labels.where(label, classes)}" for label, n in sorted(unknown.items())],
        f"Map them or leave them out in {FILE}, rename them, or start a run with these `classes`",
        sum(unknown.values()),
    )


def dictionary_problems(labels: Translator) -> tuple[CheckProblem, ...]:
    remedy = f'Write NAME = "class", NAME = ["class", "class"] or NAME = [] under [{TABLE}]'
    return problem("E-DATA-07", f"lines of {FILE} that have no effect", labels.dictionary.faults, remedy)


def require_even(federation: Partitioner) -> None:
    """Raise ConfigError (E-CFG-23) if records of several labels would have to be divided by class."""
    if not federation.text.startswith("iid-"):
        raise ConfigError(
            "E-CFG-23",
            f"expected federation=iid-N for records of several labels, found {federation.text}, which divides by "
            "class: change it",
        )


def require_one_class(labels: Translator) -> None:
    """Raise ConfigError (E-CFG-23) if records with coarse labels would have to be divided by class."""
    if labels.coarse:
        raise ConfigError(
            "E-CFG-23",
            "records need one class each to be divided among simulated hospitals, found the coarse label "
            f"{next(iter(labels.coarse))!r}: remove it from {FILE}, or use the data undivided",
        )


def groups_in_both_splits(items: Sequence[Item]) -> list[str]:
    train = {item.group for item in items if item.split is Split.TRAIN}
    test = {item.group for item in items if item.split is Split.TEST}
    return sorted(group for group in train & test if group is not None)


class _Measured(NamedTuple):
    """One image: its pixels' digest, and (width, height).

    dark: nearly black in the range of its values   square: its pixels are
    """

    key: str
    size: tuple[int, int]
    dark: bool = False
    square: bool = True


def _measure(path: Path, window: Window | None) -> _Measured | str:
    try:
        pixels = content(path)
        if pixels.depth <= 8 and not is_dicom(path):
            return _Measured(pixels.key, pixels.size)
        low, high = open_image(path, window).convert("L").getextrema()
        square = described(path).square
    except UnreadableError as error:
        return str(error)
    return _Measured(pixels.key, pixels.size, bool(high - low <= 16), square)  # type: ignore[operator]


def _twins(measured_items: Sequence[tuple[Item, _Measured]]) -> tuple[tuple[CheckProblem, ...], tuple[str, ...]]:
    """Find images with the same pixels: problems if they are in both splits or several classes, otherwise a note."""
    by_key: dict[str, list[Item]] = {}
    for item, measured in measured_items:
        by_key.setdefault(measured.key, []).append(item)
    same = [items for items in by_key.values() if len(items) > 1]
    leaked = [items for items in same if len({i.split for i in items}) > 1]
    disputed = [items for items in same if len({i.label for i in items}) > 1]
    harmless = [items for items in same if items not in leaked and items not in disputed]
    problems = (
        *problem(
            "E-DATA-07",
            "images with the same pixels in train and test",
            [_equal(items) for items in leaked],
            "Keep them in one split: otherwise the test measures memorisation",
        ),
        *problem(
            "E-DATA-07",
            "images with the same pixels in several classes",
            [_equal(items) for items in disputed],
            "Keep each in one class",
        ),
    )
    return problems, (f"images stored more than once: {_listed([_equal(i) for i in harmless])}",) if harmless else ()


def _equal(items: Sequence[Item]) -> str:
    names = [item.name for item in items[:3]] + (["..."] if len(items) > 3 else [])
    return " = ".join(names)


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names[:IN_A_LINE])}{', ...' if len(names) > IN_A_LINE else ''})"


def by_extension(paths: Iterable[Path]) -> dict[str, int]:
    """Count files by extension, the most frequent first; many kinds are summed up."""
    counts = Counter(path.suffix.lower()[:12] or "without extension" for path in paths).most_common()
    kept, others = dict(counts[:MAX_KINDS]), sum(n for _, n in counts[MAX_KINDS:])
    return kept | ({"others": others} if others else {})


def _bytes(path: Path) -> int:
    """Return a file's size, -1 if it is missing."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
