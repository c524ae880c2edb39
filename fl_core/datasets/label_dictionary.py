"""`labels.toml`, which lies with a hospital's data: from its own names and codes to the classes of runs.

[labels]
naevus = "nevus"                      # another name, of as many as there are
"D22" = "nevus"                       # a code; one with a dot needs its quotes
"benign" = ["nevus", "keratosis"]     # a coarse label: one of these, the record does not say which
"scar" = []                           # none of them: not used

A name without a line is a class of its own name. The table stays at the hospital; its digest may leave.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from fl_core.errors import DataError
from fl_core.suggest import did_you_mean
from fl_core.text import composed, read_text
from fl_core.types.enums import Split
from fl_core.types.targets import MAX_COARSE, one_of

FILE = "labels.toml"
TABLE = "labels"
_MAX_BYTES = 4 << 20
_KEY = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)\s*=""")
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class LabelEntry:
    """The meaning of a name: one class, a set of classes, or none; and its line in the file."""

    classes: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class LabelDictionary:
    """A hospital's table. faults: of single lines, which are left out."""

    entries: Mapping[str, LabelEntry] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Return the BLAKE3 of the entries, in hex, independent of order and comments; empty without entries."""
        if not self.entries:
            return ""
        classes_by_name = {name: sorted(entry.classes) for name, entry in self.entries.items()}
        return blake3(json.dumps(classes_by_name, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def is_coarse(self, classes: Collection[str] | None = None) -> bool:
        """Tell whether it has a coarse label of a run's classes, or of any if None; whatever the records are."""
        sets = [set(entry.classes) for entry in self.entries.values() if len(entry.classes) > 1]
        return any(classes is None or coarse <= set(classes) for coarse in sets)


NO_DICTIONARY = LabelDictionary()


def read_dictionary(folder: Path) -> LabelDictionary:
    """Read the table in a folder; an empty one if there is none.

    Raises DataError (E-DATA-07) on a file that is no TOML of this form; lines without a meaning are its `faults`.
    """
    file = folder / FILE
    try:
        text = composed(read_text(file, _MAX_BYTES))
        raw = tomllib.loads(f"{text}\n")  # otherwise a fault in the last line is reported "at end of document"
    except FileNotFoundError:
        return NO_DICTIONARY
    except (OSError, ValueError, RecursionError) as error:
        raise DataError("E-DATA-07", f"expected TOML in UTF-8 in {file}, found: {error}. Correct it") from error
    table = raw.get(TABLE)
    if not isinstance(table, Mapping) or set(raw) != {TABLE}:
        others = ", ".join(sorted(set(raw) - {TABLE})) or "nothing"
        raise DataError(
            "E-DATA-07", f"expected one table [{TABLE}] in {file}, found {others[:200]} next to it or inside it"
        )
    lines = _lines(text)
    entries, faults = dict[str, LabelEntry](), list[tuple[int, str]]()
    for name, value in table.items():
        line = lines.get(name, 0)
        if fault := _fault(name, value):
            faults.append((line, f"line {line or '?'}: {name[:40]!r}: {fault}"))
        else:
            entries[name] = LabelEntry((value,) if isinstance(value, str) else tuple(value), line)
    return LabelDictionary(entries=entries, faults=tuple(text for _, text in sorted(faults)))


def to_fill_in(counts: Mapping[str, int], classes: Sequence[str]) -> str:
    """Write a table with an empty line for each name that is no class of a run, the most frequent first.

    counts: records of each of a hospital's own names. Until every line is filled in, checks name those that are not.
    """
    names = sorted((name for name in counts if name not in classes), key=lambda name: (-counts[name], name))
    hints = {name: f"; {hint}" if (hint := did_you_mean(name, classes)) else "" for name in names}
    return "\n".join(
        [
            f"# Left: names here. Right: a class of the run ({', '.join(classes)}),",
            '# several of them (["a", "b"]: one of these, unknown which), or [] to leave such records out.',
            f"[{TABLE}]",
            *(f'{json.dumps(name, ensure_ascii=False)} = ""  # {counts[name]} records{hints[name]}' for name in names),
            "",
        ]
    )


def _fault(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        inner = next(iter(value), "")
        return f'a code with a dot, which needs quotes: "{name}.{inner}" = ...'
    if isinstance(value, str):
        return "" if value.strip() == value and value else "no name of a class"
    if not isinstance(value, list) or not all(isinstance(c, str) and c and c.strip() == c for c in value):
        return "neither a class nor a list of classes"
    if len(set(value)) != len(value) or len(value) == 1:
        return "a list of one class or of a class twice: write one class without brackets"
    return ""


def _lines(text: str) -> dict[str, int]:
    """Return the first line of each key of the table."""
    first_lines, inside = dict[str, int](), False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("["):
            inside = line.split("#")[0].strip().strip("[]").strip() == TABLE or (inside and "=" not in line)
        match = _KEY.match(line)
        if inside and match:
            first_lines.setdefault(next(iter(tomllib.loads(f"{match[1]} = 0"))), number)
        elif inside and (dotted := re.match(r"\s*([A-Za-z0-9_-]+)\s*\.", line)):
            first_lines.setdefault(dotted[1], number)
    return first_lines


class Translator:
    """Translates the labels of one source, and counts the results."""

    def __init__(self, dictionary: LabelDictionary = NO_DICTIONARY) -> None:
        self.dictionary = dictionary
        self.coarse: dict[str, tuple[str, ...]] = {}
        """Text of a coarse label -> the classes that it may be."""
        self.counted = "records"
        self._renamed, self._unused = Counter[str](), Counter[str]()
        self._trained, self._tested = Counter[str](), Counter[str]()
        self._met: set[str] = set()

    def __call__(self, label: str, split: Split | None = None) -> str | None:
        """Return a label's class, or the text of a coarse one; None for a record that is left out.

        Test records with a coarse label are left out; split: None if it is not chosen yet.
        """
        entry = self.dictionary.entries.get(label)
        if entry is None:
            return label
        self._met.add(label)
        if not entry.classes:
            self._unused[label] += 1
            return None
        if len(entry.classes) == 1:
            self._renamed[label] += 1
            return entry.classes[0]
        text = _text(entry.classes)
        self.coarse[text] = tuple(sorted(entry.classes))
        if split is Split.TEST:
            self._tested[label] += 1
            return None
        self._trained[label] += 1
        return text

    def space(self, labels: Collection[str]) -> list[str]:
        """Return the classes of a hospital's own labels, in alphabetical order."""
        entries = {label: self.dictionary.entries.get(label) for label in labels}
        return sorted({c for label, entry in entries.items() for c in ((label,) if entry is None else entry.classes)})

    def fits(self, label: str, classes: Collection[str]) -> bool:
        """Tell whether a translated label is a class of a run, or coarse with only such classes."""
        return label in classes or (label in self.coarse and set(self.coarse[label]) <= set(classes))

    def target(self, label: str, classes: Sequence[str]) -> int:
        """Encode a fitting translated label; raises DataError (E-DATA-05) on a class beyond the limit of a set."""
        if label in classes:
            return classes.index(label)
        places = [classes.index(c) for c in self.coarse[label]]
        if max(places) >= MAX_COARSE:
            raise DataError(
                "E-DATA-05",
                f"the coarse label {label[:80]!r} may only use the first {MAX_COARSE} classes of the run, and "
                f"{classes[max(places)]!r} comes after them: ask the lead for another order, or remove the label "
                f"from {FILE}",
            )
        return one_of(places)

    def notes(self) -> tuple[str, ...]:
        """Describe the effects of the table, with its lines."""
        entries = self.dictionary.entries
        if not entries:
            return ()
        unmet = [name for name in entries if name not in self._met]
        notes = [f"{FILE} (digest {self.dictionary.digest}) has {len(entries)} names"]
        if self._renamed:
            notes.append("renamed by it: " + self._listed(self._renamed, lambda e: f" = {e.classes[0]}"))
        if self._unused:
            notes.append("excluded by it: " + self._listed(self._unused))
        if self._trained:
            listed = self._listed(self._trained, lambda e: f" = {_text(e.classes)}")
            notes.append(f"coarse labels, trained as one of several classes: {listed}")
        if self._tested:
            notes.append("test records of coarse labels, which no evaluation counts: " + self._listed(self._tested))
        if unmet:
            notes.append("names in it that no record has: " + self._listed(Counter(dict.fromkeys(unmet, 0))))
        return tuple(notes)

    def where(self, label: str, classes: Sequence[str]) -> str:
        """Describe the lines behind a translated label, and a likely intention; empty if it is the record's own."""
        lines = [e.line for n, e in self.dictionary.entries.items() if n in self._met and _text(e.classes) == label]
        if not lines:
            return ""
        wrong = next((c for c in self.coarse.get(label, (label,)) if c not in classes), label)
        hint = did_you_mean(wrong, classes)
        return f" ({FILE} line {', '.join(map(str, sorted(lines)[:5]))}{f'; {hint}' if hint else ''})"

    def _listed(self, counts: Mapping[str, int], what: Callable[[LabelEntry], str] = lambda _: "") -> str:
        parts = []
        for name, count in sorted(counts.items())[:_SHOWN]:
            entry = self.dictionary.entries[name]
            records = f": {count} {self.counted if count > 1 else self.counted[:-1]}" if count else ""
            parts.append(f"{name[:40]!r}{what(entry)} (line {entry.line}{records})")
        return ", ".join(parts) + (f", and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else "")


def _text(classes: Sequence[str]) -> str:
    return " or ".join(sorted(classes))
