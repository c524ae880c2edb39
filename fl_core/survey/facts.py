"""Each record's shares in the cells of questions. This module sends nothing.

It reads the header of a file and, for intensities, the pixels as used in training, with the file's own window: a run's
window could make bins arbitrarily narrow. DICOM tags are those of `dicom.described`, which contain nothing about a
patient. Unreadable values count as not stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import described, open_image
from fl_core.datasets.examples import ArrayExamples, TensorExamples
from fl_core.datasets.image_loader import cores
from fl_core.datasets.sources.table import TableExamples
from fl_core.errors import ConfigError
from fl_core.tensors import Tensor, torch
from fl_core.types.columns import Column
from fl_core.types.survey import AGE_COLUMNS, MAKES, SEX_COLUMNS, SurveyQuestion
from fl_core.types.targets import is_multi_label
from fl_core.types.values import Examples, Progress

STEP = 2.0**-10
"""Unit of shares: they are whole multiples of it, so that their sums are exact."""
_ROWS = 256
_GREYS = 256


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """One record. None: not stated.

    label: below 0 if its class is unknown   side: pixels   spacing: um   missing: values of a row
    grey: (256,) pixels.
    """

    label: int
    test: bool
    side: float | None = None
    spacing: float | None = None
    bits: int | None = None
    make: str | None = None
    missing: int | None = None
    age: float | None = None
    sex: str | None = None
    grey: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class SurveyedRecords:
    """Records of both splits, divided by the questions.

    patient: (n,) the patient of each record; a record is its own patient if the data name no groups, not `named`
    shares: of each question (n, cells) in float64, whole multiples of `STEP`.
    """

    patient: Tensor
    shares: tuple[Tensor, ...]
    named: bool = True

    @property
    def patients(self) -> int:
        return int(self.patient.max()) + 1 if len(self.patient) else 0

    def of_patients(self, shares: Tensor) -> Tensor:
        """Add up shares of records (n, cells) by patient (patients, cells)."""
        return shares.new_zeros(self.patients, shares.shape[1]).index_add_(0, self.patient, shares)


def surveyed(
    questions: Sequence[SurveyQuestion],
    train: Examples,
    test: Examples,
    n_classes: int,
    progress: Progress | None = None,
) -> SurveyedRecords:
    """Read, from all records, only the properties that the questions need."""
    splits, names = (train, test), {question.name for question in questions}
    patient = _patients(splits)
    total, facts = len(patient), list[RecordFacts]()
    for examples, is_test in zip(splits, (False, True), strict=True):
        for one in _facts(examples, is_test, names):
            facts.append(one)
            if progress is not None and (len(facts) % _ROWS == 0 or len(facts) == total):
                progress(len(facts), total)
    images = torch.bincount(patient)[patient].tolist() if total else []
    shares = (_shares(question, facts, images, n_classes) for question in questions)
    return SurveyedRecords(patient, tuple(shares), names_patients(train, test))


def names_patients(*splits: Examples) -> bool:
    """Tell whether the data name patients; if not, each record counts as a patient."""
    return all(examples.groups is not None for examples in splits)


def patient_names(splits: Sequence[Examples]) -> list[str]:
    """Return each record's patient, of one split after the other: its group, otherwise the record itself."""
    patients = list[str]()
    for k, examples in enumerate(splits):
        groups = examples.groups
        patients += (
            [f"record {k} {i}" for i in range(len(examples))] if groups is None else [f"group {g}" for g in groups]
        )
    return patients


def _patients(splits: Sequence[Examples]) -> Tensor:
    place: dict[str, int] = {}
    return torch.tensor([place.setdefault(name, len(place)) for name in patient_names(splits)], dtype=torch.long)


def _facts(examples: Examples, test: bool, names: set[str]) -> Iterable[RecordFacts]:
    labels = examples.labels
    if is_multi_label(labels):
        if "classes" in names:
            raise ConfigError(
                "E-CFG-08",
                "the question 'classes' needs records with one class, and these are multi-label data: leave it out",
            )
        labels = torch.full((len(labels),), -1)
    bare = [RecordFacts(label, test) for label in labels.tolist()]
    if not names - {"classes", "images", "patients"}:
        return bare
    paths: tuple[Path, ...] | None = getattr(examples, "paths", None)
    if paths is not None:
        return _of_files(paths, bare, names)
    if isinstance(examples, TableExamples):
        return _of_rows(examples, bare)
    if isinstance(examples, TensorExamples | ArrayExamples):
        return _of_tensors(examples, bare, "intensity" in names)
    return bare


def _of_files(paths: Sequence[Path], bare: Sequence[RecordFacts], names: set[str]) -> Iterable[RecordFacts]:
    with ThreadPoolExecutor(cores()) as pool:
        yield from pool.map(partial(_of_file, "intensity" in names), paths, bare)


def _of_file(greys: bool, path: Path, bare: RecordFacts) -> RecordFacts:
    try:
        header = described(path)
        grey = None
        if greys:
            grey = np.array(open_image(path).convert("L").histogram(), dtype=np.float64)
    except UnreadableError:
        return bare
    make = None if header.make is None else make_of(header.make)
    spacing = None if header.spacing is None else 1000.0 * header.spacing
    return replace(bare, side=min(header.size), spacing=spacing, bits=header.bits, make=make, grey=grey)


def make_of(stated: str) -> str | None:
    """Return the entry of `MAKES` for a manufacturer's name; None for an empty name."""
    text = stated.strip().lower()
    words = {"ge": ("ge ", "ge-", "general electric"), "canon": ("canon", "toshiba"), "fujifilm": ("fuji",)}
    for make in MAKES[:-1]:
        forms = words.get(make.lower(), (make.lower(),))
        if any(f"{text} ".startswith(word) or (word == "general electric" and word in text) for word in forms):
            return make
    return MAKES[-1] if text else None


def _of_tensors(
    examples: TensorExamples | ArrayExamples, bare: Sequence[RecordFacts], greys: bool
) -> Iterable[RecordFacts]:
    """Describe in-memory images; for other tensors, or values outside [0, 1], some properties are not stated."""
    for index in torch.split(torch.arange(len(bare)), _ROWS):
        stored = examples.stored(index)
        if stored.dim() != 4 or stored.shape[1] not in (1, 3):
            yield from (bare[i] for i in index.tolist())
            continue
        wide = stored.double() / (255.0 if stored.dtype == torch.uint8 else 1.0)
        for i, x in zip(index.tolist(), wide, strict=True):
            grey = None
            if greys and bool(((x >= 0) & (x <= 1)).all()):
                values = (255.0 * x.mean(0)).round().long().flatten()
                grey = torch.bincount(values, minlength=_GREYS).double().numpy()
            yield replace(bare[i], side=min(x.shape[1:]), bits=8, grey=grey)


def _of_rows(examples: TableExamples, bare: Sequence[RecordFacts]) -> Iterable[RecordFacts]:
    x, columns = examples.x.double().numpy(), examples.columns
    starts = np.cumsum([0, *(column.width for column in columns)])
    cells = {c.name.lower(): (c, x[:, s : s + c.width]) for c, s in zip(columns, starts[:-1], strict=True)}
    gone = [v[:, -1] == 1 for c, v in cells.values() if c.missing == "indicator"]
    missing = np.sum(gone, axis=0) if gone else np.zeros(len(x), dtype=np.int64)
    ages = _column(cells, AGE_COLUMNS, _age)
    sexes = _column(cells, SEX_COLUMNS, _sex)
    for i, one in enumerate(bare):
        yield replace(one, missing=int(missing[i]), age=ages and ages(i), sex=sexes and sexes(i))


Cells = dict[str, tuple[Column, NDArray[np.float64]]]
Stated = TypeVar("Stated")


def _column(
    cells: Cells, names: Sequence[str], read: Callable[[Column, NDArray[np.float64]], Stated | None]
) -> Callable[[int], Stated | None] | None:
    cell = next((cells[name] for name in names if name in cells), None)
    if cell is None:
        return None
    column, values = cell
    return lambda i: None if column.missing == "indicator" and values[i, -1] == 1 else read(column, values[i])


def _age(column: Column, value: NDArray[np.float64]) -> float | None:
    if not column.numeric or column.min is None or column.max is None:
        return None
    low, high = column.min, column.max
    return round(low + (high - low) / 2 * (1 + float(value[0])), 3)  # x is float32: 39.9999 years are 40


def _sex(column: Column, value: NDArray[np.float64]) -> str | None:
    if not column.categories:
        return None
    word = column.categories[int(np.argmax(value[: len(column.categories)]))].lower()
    return {"f": "female", "female": "female", "m": "male", "male": "male"}.get(word, "another")


# ---- cells -----------------------------------------------------------------------------------------------------------


def _shares(question: SurveyQuestion, facts: Sequence[RecordFacts], images: Sequence[int], n_classes: int) -> Tensor:
    shares = torch.zeros(len(facts), question.count(n_classes), dtype=torch.float64)
    if question.name == "intensity":
        return _intensities(question, facts, shares)
    names = question.cells(())
    for i, (fact, n_images) in enumerate(zip(facts, images, strict=True)):
        if question.name == "classes" and fact.label < 0:  # a coarse label is in no cell
            continue
        shares[i, _cell(question, names, fact, n_images)] = 1.0
    return shares


def _cell(question: SurveyQuestion, names: Sequence[str], fact: RecordFacts, images: int) -> int:
    """Return the cell of a record; the last one if the question has no other for it."""
    match question.name:
        case "classes":
            return fact.label
        case "images":
            return int(fact.test)
        case "patients":
            return _step(images, (1, 2, 4, 8, 16))
        case "bits":
            return len(names) - 1 if fact.bits is None else min(_step(fact.bits, (8, 10, 12, 16)), len(names) - 1)
        case "missing":
            return len(names) - 1 if fact.missing is None else _step(fact.missing, (0, 1, 2, 5))
        case "makes" | "sex":
            stated = fact.make if question.name == "makes" else fact.sex
            return len(names) - 1 if stated is None else names.index(stated)
    value = {"sizes": fact.side, "spacing": fact.spacing, "ages": fact.age}[question.name]
    edges = question.edges()
    if value is None or not math.isfinite(value) or value < edges[0]:
        return len(names) - 1
    return min(int((value - edges[0]) // question.width), len(edges) - 1)


def _step(value: int, last: Sequence[int]) -> int:
    """Return the first position whose last value is not below a value."""
    return next((k for k, most in enumerate(last) if value <= most), len(last))


def _intensities(question: SurveyQuestion, facts: Sequence[RecordFacts], counts: Tensor) -> Tensor:
    for i, fact in enumerate(facts):
        if fact.grey is None or not fact.grey.sum() > 0:
            counts[i, -1] = 1.0
            continue
        shares = fact.grey.reshape(-1, question.width).sum(1) / fact.grey.sum()
        counts[i, : len(shares)] = torch.from_numpy(np.floor(shares / STEP) * STEP)
    return counts
