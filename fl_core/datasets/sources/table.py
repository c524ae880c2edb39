"""A table of patients or visits, CSV or Parquet, with its declared schema beside it (`table_schema`).

Rows become numbers only by the declared ranges (`Column`): nothing is estimated from the records, so scaling reveals
nothing about them. A cell that the schema does not allow is a fault of its row, reported by line and column.
"""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from fl_core.csv_reader import MAX_BYTES, half_of, lines_of, require_commas
from fl_core.datasets.checks import (
    CheckProblem,
    CheckReport,
    dictionary_problems,
    problem,
    require_even,
    require_one_class,
    unknown_labels,
)
from fl_core.datasets.examples import SPLITS, SiloDataset, TensorExamples, fingerprint
from fl_core.datasets.label_dictionary import FILE as LABELS_FILE
from fl_core.datasets.label_dictionary import NO_DICTIONARY, Translator, read_dictionary
from fl_core.datasets.partition.federations import Partitioner, SiloIndices
from fl_core.datasets.sources.label_columns import TRUTH, LabelColumns, read_label, translated_columns
from fl_core.datasets.table_schema import TableSchema, read_schema, schema_path
from fl_core.errors import DataError
from fl_core.tensors import Tensor, torch
from fl_core.text import composed
from fl_core.types.columns import Column, width
from fl_core.types.enums import Split
from fl_core.types.records import Schema
from fl_core.types.targets import UNKNOWN, class_counts, one_of


class TableExamples(TensorExamples):
    """Rows as numbers. content_names: each row's content, independent of a run's schema or label space.

    columns: of the numbers of a row   other_names: earlier versions' names of these rows, in any storage.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        groups: tuple[str, ...] | None,
        content_names: tuple[str, ...],
        columns: tuple[Column, ...] = (),
        other_names: tuple[str, ...] = (),
    ) -> None:
        super().__init__(x, y, groups)
        self.content_names, self.columns, self.other_names = content_names, columns, other_names


@dataclass(frozen=True, slots=True)
class TableIndex:
    """A table that was read. x: (N, d) float32; labels, splits, groups, names: of each row.

    columns: of several labels at once; `labels` then names them all   other_names: of each row, as `TableExamples`
    earlier: reads the table as 0.1.0 did, if that names a row differently.
    """

    origin: str
    schema: TableSchema
    classes: tuple[str, ...]
    x: Tensor
    labels: tuple[str, ...]
    splits: tuple[Split, ...]
    groups: tuple[str, ...]
    names: tuple[str, ...]
    problems: tuple[CheckProblem, ...] = ()
    notes: tuple[str, ...] = ()
    translator: Translator = field(default_factory=Translator)
    columns: LabelColumns | None = None
    other_names: tuple[tuple[str, ...], ...] = ()
    earlier: Callable[[], TableIndex] | None = None

    def report(self) -> CheckReport:
        y = self._counted()
        halves = dict(zip(SPLITS, self._halves(), strict=True))
        counts = {s: tuple(class_counts(y[half], len(self.classes)).tolist()) for s, half in halves.items()}
        labelled_splits = {s for s, half in halves.items() if len(y[half]) and bool((y[half] != UNKNOWN).any())}
        none = [c for k, c in enumerate(self.classes) if not counts[Split.TRAIN][k] + counts[Split.TEST][k]]
        problems = (
            *self.problems,
            *dictionary_problems(self.translator),
            *unknown_labels(Counter(self.labels), self.translator, self.classes, "columns" if self.columns else "rows"),
            *problem(
                "E-DATA-08",
                "splits without any row",
                [s.value for s in SPLITS if s not in labelled_splits],
                "Give both splits rows",
            ),
        )
        unseen = f"no row has the classes {', '.join(none)}; this is correct if the hospital has no cases of them"
        notes = (*self.notes, *self.translator.notes())
        label_texts: Sequence[str] = self.labels
        if self.columns is None:
            notes += (unseen,) if none else ()
        else:
            notes += self.columns.notes(self.classes)
            label_texts = [f"{self.columns.names}{row}" for row in self.columns.rows.tolist()]
        facts = zip(self.names, label_texts, (s.value for s in self.splits), self.groups or self.names, strict=True)
        digest = fingerprint(self.x.numpy().tobytes(), *facts)
        groups = len(set(self.groups)) or None
        return CheckReport(
            self.origin,
            self.classes,
            counts,
            problems,
            notes,
            groups=groups,
            fingerprint=digest,
        )

    def dataset(self) -> SiloDataset:
        """Create the examples; raises DataError if the report has a problem."""
        report = self.report()
        report.require_sound()
        train, test = map(self._examples, self._halves())
        inputs = self.schema.columns
        schema = Schema((width(inputs),), self.classes, inputs, multi_label=self.schema.multi_label)
        made = SiloDataset(schema, train, test, self.origin, report.fingerprint, dictionary=self.translator.dictionary)
        earlier = self.earlier
        return made if earlier is None else replace(made, earlier=lambda: earlier().dataset())

    def _targets(self) -> Tensor:
        """Encode every row; raises as `Translator.target`."""
        if self.columns is not None:
            return self.columns.targets(self.classes)
        targets_of = {label: self.translator.target(label, self.classes) for label in set(self.labels)}
        return torch.tensor([targets_of[label] for label in self.labels], dtype=torch.int64)

    def _counted(self) -> Tensor:
        """Encode the rows for a report: a label that is no class as `UNKNOWN`, which is no class."""
        if self.columns is not None:
            return self._targets()
        positions = {c: k for k, c in enumerate(self.classes)}
        coarse = one_of((0, 1))  # whichever classes: it is counted for none
        fit = {
            label: positions.get(label, coarse)
            for label in set(self.labels)
            if self.translator.fits(label, self.classes)
        }
        return torch.tensor([fit.get(label, UNKNOWN) for label in self.labels], dtype=torch.int64)

    def has_problems(self) -> bool:
        return bool(self.report().problems)

    def shares(self, federation: Partitioner) -> list[SiloIndices]:
        """Divide the rows; raises ConfigError (E-CFG-23) by class if rows have several or coarse labels."""
        if self.columns is None:
            require_one_class(self.translator)
            y = [
                np.array([self.classes.index(self.labels[k]) for k in half], dtype=np.int64) for half in self._halves()
            ]
        else:
            require_even(federation)
            y = [np.zeros(len(half), dtype=np.int64) for half in self._halves()]
        return federation.partition(y[0], y[1], len(self.classes))

    def subset(self, share: SiloIndices, origin: str) -> TableIndex:
        """Keep one share of `shares`."""
        train, test = self._halves()
        held_out = [train[i] for i in share.held_out]
        kept = [train[i] for i in share.train] + (held_out or [test[i] for i in share.test])
        turned = set(held_out)
        return replace(
            self,
            origin=origin,
            x=self.x[torch.tensor(kept, dtype=torch.int64)],
            labels=self.labels if self.columns else tuple(self.labels[k] for k in kept),
            columns=None if self.columns is None else self.columns.at(kept),
            splits=tuple(Split.TEST if k in turned else self.splits[k] for k in kept),
            groups=tuple(self.groups[k] for k in kept) if self.groups else (),
            names=tuple(self.names[k] for k in kept),
            other_names=tuple(self.other_names[k] for k in kept),
            earlier=None,
        )

    def _halves(self) -> tuple[list[int], list[int]]:
        train, test = ([k for k, s in enumerate(self.splits) if s is split] for split in SPLITS)
        return train, test

    def _examples(self, kept: Sequence[int]) -> TableExamples:
        y = self._targets()[torch.tensor(kept, dtype=torch.int64)]
        groups = tuple(self.groups[k] for k in kept) if self.groups else None
        names = tuple(self.names[k] for k in kept)
        others = tuple(other for k in kept for other in self.other_names[k])
        return TableExamples(
            self.x[torch.tensor(kept, dtype=torch.int64)], y, groups, names, self.schema.columns, others
        )


def scan(file: Path, classes: Sequence[str] | None, earlier: bool = False) -> TableIndex:
    """Read a table by the schema beside it; raises DataError (E-DATA-02, E-DATA-07) on an invalid table.

    earlier: keep and name numbers with all their digits, as 0.1.0 did.

    Without a split column a fifth of the groups, or else of the rows, is held out, chosen by a hash of their content:
    the same on every machine, and equal rows together.
    """
    schema = read_schema(schema_path(file))
    schema_is_labels_file = schema_path(file).name == LABELS_FILE  # a table labels.csv has its schema there
    rows = _Rows(schema, earlier, Translator(NO_DICTIONARY if schema_is_labels_file else read_dictionary(file.parent)))
    header, body = read_cells(file, rows.wanted)
    unread = rows.use(file, header)
    for line, cells in body:
        rows.add(line, cells)
    index = rows.index(file, tuple(classes or rows.space), unread)
    return replace(index, earlier=partial(scan, file, classes, True)) if rows.renamed and not earlier else index


class _Rows:
    """Collects rows while they are read: numbers of the valid ones, faults of the others."""

    def __init__(self, schema: TableSchema, earlier: bool, translator: Translator) -> None:
        self.schema, self.translator = schema, translator
        self._forms = EARLIER_FIRST if earlier else CANONICAL_FIRST
        self.renamed = False
        """Whether 0.1.0 named a row differently."""
        inputs = [column.name for column in schema.columns]
        roles = [n for n in (schema.label, schema.group, schema.split, schema.record) if n and n not in inputs]
        self._columns = translated_columns(schema.labels, translator)
        self.wanted = [*inputs, *dict.fromkeys(roles), *schema.labels]
        self._found: list[list[int]] = []
        self._missing = frozenset(schema.missing)
        self._parsers = [cell_parser(column, self._missing, earlier) for column in schema.columns]
        self._numbers = array("f")
        self._lines = array("q")
        self._facts: list[tuple[str, Split, str, str, tuple[str, ...]]] = []
        self._faults: list[str] = []
        self._faulty = 0
        self._ragged = 0

    def use(self, file: Path, header: Sequence[str]) -> list[str]:
        """Find the columns in a header; return undeclared ones."""
        missing = [name for name in self.wanted if name not in header]
        twice = [name for name in self.wanted if list(header).count(name) > 1]
        if missing or twice:
            require_commas(file, header)
            fault = f"without {', '.join(missing[:10])}" if missing else f"with {', '.join(twice[:10])} twice"
            raise DataError(
                "E-DATA-07",
                f"expected the {len(self.wanted)} columns of {schema_path(file).name} in {file}, found a header {fault}"
                ": export the table again, or correct the schema",
            )
        place = {name: k for k, name in enumerate(header)}
        self._cells = len(header)
        self._inputs = [place[column.name] for column in self.schema.columns]
        self._labels = [
            place[name] for name, to in zip(self.schema.labels, self._columns, strict=True) if to is not None
        ]
        self._place = {role: place.get(getattr(self.schema, role)) for role in ("label", "group", "split", "record")}
        return [name for name in header if name not in self.wanted]

    def add(self, line: int, cells: Cells) -> None:
        if len(cells) != self._cells:
            return self._fault(line, "more or fewer cells than the header has")
        if len(self._facts) >= MAX_ROWS:
            raise DataError("E-DATA-07", f"expected at most {MAX_ROWS} rows, found more: split the table")
        numbers: list[float] = []
        cell_texts: list[tuple[str, NumberTexts]] = []
        for column, parse, k in zip(self.schema.columns, self._parsers, self._inputs, strict=True):
            try:
                parsed, texts = parse(cells[k])
            except ValueError as error:
                return self._fault(line, f"{column.name}: {error}")
            numbers += parsed
            cell_texts.append((column.name, texts))
        label, group, split, record = (self._cell(cells, r) for r in ("label", "group", "split", "record"))
        label = composed(label)
        try:
            answers = [read_label(cells[k], self._missing) for k in self._labels]
        except ValueError as error:
            return self._fault(line, f"a label: {error}")
        if self.schema.label and label in self._missing:
            return self._fault(line, f"{self.schema.label}: no label")
        for role, cell in (("group", group), ("record", record)):
            if getattr(self.schema, role) and cell in self._missing:
                return self._fault(line, f"{getattr(self.schema, role)}: no value, which every row needs")
        if self.schema.record:
            cell_texts = [(self.schema.record, id_texts(record))]
        names = ["\x1f".join(sorted(f"{of}={texts[form]}" for of, texts in cell_texts)) for form in self._forms]
        self.renamed |= names[0] != names[1]
        group = id_texts(group)[self._forms[0]]
        name, *others = (f"content {hashlib.sha256(f'row {n}'.encode()).hexdigest()}" for n in dict.fromkeys(names))
        if self.schema.split and split not in ("train", "test"):
            return self._fault(line, f"{self.schema.split}: neither train nor test")
        half = Split(split) if self.schema.split else half_of(group or names[0])
        if (translated := self.translator(label, half) if self.schema.label else "") is None:
            return None
        self._found.append(answers)
        self._numbers.extend(numbers)
        self._lines.append(line)
        self._facts.append((translated, half, group, name, tuple(others)))
        return None

    def index(self, file: Path, classes: tuple[str, ...], unread: Sequence[str]) -> TableIndex:
        labels, splits, groups, names, others = map(tuple, zip(*self._facts, strict=True)) if self._facts else ((),) * 5
        x = torch.from_numpy(
            np.frombuffer(self._numbers, np.float32).copy() if self._facts else np.zeros(0, np.float32)
        )
        columns, names_of = None, tuple(name for name in self._columns if name is not None)
        if self.schema.multi_label:
            rows = torch.tensor(self._found, dtype=torch.int64).reshape(len(self._found), len(names_of))
            columns, labels = LabelColumns(names_of, rows), names_of
        notes = []
        if unread:
            notes.append(f"unused columns: {len(unread)} ({', '.join(n[:40] for n in unread[:10])})")
        if not self.schema.split:
            notes.append(
                f"no split column: a fifth of the {'groups' if self.schema.group else 'rows'} is held out as test"
            )
        return TableIndex(
            f"table:{file}",
            self.schema,
            classes,
            x.view(len(self._facts), width(self.schema.columns)),
            labels,
            splits,
            groups if self.schema.group else (),
            names,
            (*self._row_problems(file), *self._shared(splits, groups, names)),
            tuple(notes),
            self.translator,
            columns,
            others,
        )

    @property
    def space(self) -> tuple[str, ...]:
        """The table's own classes, or what its columns of labels are translated to, in its order."""
        return tuple(dict.fromkeys(n for n in self._columns if n)) if self.schema.multi_label else self.schema.classes

    def _row_problems(self, file: Path) -> tuple[CheckProblem, ...]:
        remedy = f"Correct these rows or the schema {schema_path(file).name}"
        what = f"rows of {file.name} that its schema does not allow"
        return problem("E-DATA-07", what, self._faults, remedy, self._faulty)

    def _shared(self, splits: Sequence[Split], groups: Sequence[str], names: Sequence[str]) -> tuple[CheckProblem, ...]:
        """Find groups, and equal rows, that are in both splits, and records that are named twice."""
        problems: tuple[CheckProblem, ...] = ()
        for what, of in (("groups", groups if self.schema.group else ()), ("equal rows", names)):
            halves = [{o for o, s in zip(of, splits, strict=bool(of)) if s is split} for split in SPLITS]
            shared = sorted(halves[0] & halves[1])
            remedy = "Keep them in one split: otherwise the test measures memorisation"
            if what == "equal rows":
                remedy += "; or declare `record`, if they are from different patients"
            shown = shared if what == "groups" else self._lines_of(names, set(shared))
            problems += problem("E-DATA-07", f"{what} in both train and test", shown, remedy)
        if self.schema.record:
            twice = {name for name, n in Counter(names).items() if n > 1}
            what = f"values of {self.schema.record!r} that occur in several rows"
            problems += problem("E-DATA-07", what, self._lines_of(names, twice), "Give each row a different value")
        return problems

    def _lines_of(self, names: Sequence[str], wanted: set[str]) -> list[str]:
        lines: dict[str, list[int]] = {}
        for name, line in zip(names, self._lines, strict=True):
            if name in wanted:
                lines.setdefault(name, []).append(line)
        return [f"lines {' = '.join(map(str, of[:5]))}{' = ...' if len(of) > 5 else ''}" for of in lines.values()]

    def _cell(self, cells: Cells, role: str) -> str:
        place = self._place[role]
        return "" if place is None else cells[place]

    def _fault(self, line: int, what: str) -> None:
        self._faulty += 1
        if len(self._faults) < 50:
            self._faults.append(f"line {line}: {what}")


# ---- cells -----------------------------------------------------------------------------------------------------------

MAX_ROWS = 20_000_000
_PARQUET = (".parquet", ".pq")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
Cells = Sequence[str]
NumberTexts = tuple[str, str, str]
"""Texts of a cell in the name of its row: by the rule; by 0.1.0; by 0.1.0 for a float32."""
CANONICAL_FIRST, EARLIER_FIRST = (0, 1, 2), (1, 0, 2)
Parse = Callable[[str], tuple[list[float], NumberTexts]]
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
_WHOLE = re.compile(r"(\d+)\.0+", re.ASCII)


def read_cells(file: Path, wanted: Sequence[str]) -> tuple[list[str], Iterator[tuple[int, Cells]]]:
    """Return a table's header, and its rows in order, with their lines; raises DataError on an invalid table."""
    return _parquet(file, wanted) if file.suffix.lower() in _PARQUET else _csv(file)


def canonical_number(value: float) -> float:
    """Return the shortest decimal number with the same float32 as `value`, however a file stores and spells it.

    It is `value` itself if six digits write it. Numbers beyond the range of float32 are unchanged.
    """
    return (float(str(np.float32(value))) if abs(value) <= _FLOAT32_MAX else value) + 0.0


def number_texts(value: float) -> NumberTexts:
    single = float(np.float32(value)) if abs(value) <= _FLOAT32_MAX else value
    return repr(canonical_number(value)), repr(value + 0.0), repr(single + 0.0)


def id_texts(text: str) -> NumberTexts:
    """Write a patient's or a record's name; a whole number, also exported as 17.0, without the point."""
    whole = match[1] if (match := _WHOLE.fullmatch(text)) else composed(text)
    return whole, text, f"{whole}.0" if whole.isdecimal() else text


def cell_parser(column: Column, missing: frozenset[str], earlier: bool = False) -> Parse:
    """Create the function from a cell to its numbers and its texts; it raises ValueError without the cell.

    earlier: as `scan`.
    """
    empty = [0.0] * (column.width - 1) + [1.0]
    present = [0.0] * (column.missing == "indicator")
    one_hot = {composed(c): [float(c == other) for other in column.categories] + present for c in column.categories}
    low, high = column.min or 0.0, column.max or 0.0
    middle, half = low + (high - low) / 2, (high - low) / 2

    def parse(raw: str) -> tuple[list[float], NumberTexts]:
        cell = composed(raw)
        if cell in missing:
            if column.missing == "refuse":
                raise ValueError("no value")
            return empty, ("",) * 3
        if column.type == "category":
            if cell not in one_hot:
                raise ValueError("none of the declared categories")
            return one_hot[cell], (cell, raw, raw)
        if column.type == "boolean":
            if (truth := TRUTH.get(cell.lower())) is None:
                raise ValueError("neither true nor false")
            return [sign := 1.0 if truth else -1.0, *present], (str(sign),) * 3
        if _DECIMAL_COMMA.fullmatch(cell):
            raise ValueError("a decimal comma: export it with decimal points")
        if not _NUMBER.fullmatch(cell) or not math.isfinite(value := float(cell)):
            raise ValueError("no number")
        if column.type == "integer" and not value.is_integer():
            raise ValueError("no whole number")
        if not low <= value <= high and column.outside == "refuse":
            raise ValueError(f"outside {low:g} to {high:g}")
        number = value if earlier else canonical_number(value)
        place = (min(max(number, low), high) - middle) / half
        return [min(max(place, -1.0), 1.0), *present], number_texts(value)

    return parse


def _csv(file: Path) -> tuple[list[str], Iterator[tuple[int, Cells]]]:
    lines = lines_of(file)
    _, header = next(lines, (0, []))
    return [composed(name) for name in header], lines


def _parquet(file: Path, wanted: Sequence[str]) -> tuple[list[str], Iterator[tuple[int, Cells]]]:
    """Read some columns of a Parquet file, with cells as in a CSV file; a line is a row, from 1."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            "E-DATA-02", "expected pyarrow, which reads Parquet, found none: pip install 'consilium-fl[tables]'"
        ) from error
    try:
        opened = ParquetFile(file)
        rows, names = opened.metadata.num_rows, list(opened.schema_arrow.names)
        size = sum(opened.metadata.row_group(k).total_byte_size for k in range(opened.metadata.num_row_groups))
    except FileNotFoundError as error:
        raise DataError("E-DATA-02", f"expected a Parquet file at {file}, found none: check the path") from error
    except (OSError, ValueError, ArrowException) as error:
        raise DataError("E-DATA-07", f"{file} is not a Parquet file: export it again") from error
    if rows > MAX_ROWS or size > MAX_BYTES:
        raise DataError("E-DATA-07", f"expected at most {MAX_ROWS} rows and {MAX_BYTES} bytes in {file}: divide it")
    stored = {composed(name): name for name in names}
    read = [name for name in wanted if name in stored]

    def body() -> Iterator[tuple[int, Cells]]:
        line = 0
        gap = [""] * (len(names) - len(read))
        try:
            for batch in opened.iter_batches(4096, columns=[stored[name] for name in read]):
                for row in zip(*(batch.column(stored[name]).to_pylist() for name in read), strict=True):
                    line += 1
                    yield line, [*map(_text, row), *gap]
        except (OSError, ValueError, ArrowException) as error:
            raise DataError("E-DATA-07", f"the Parquet file {file} is truncated or damaged: export it again") from error

    return [*read, *(name for name in map(composed, names) if name not in read)], body()


def _text(value: object) -> str:
    """Write a cell of Parquet as in CSV: nothing for null and NaN, whole numbers without a point."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value).strip()
