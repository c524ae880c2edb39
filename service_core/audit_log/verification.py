"""Whether an audit log is what was written: each line, the anchored end, and what other sides hold of it."""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from fl_core.errors import ConfigError, StateError
from service_core.audit_log.heads import SignedHead
from service_core.audit_log.lines import MAX_LINE, Line, line_hash
from service_core.audit_log.log import OWN, RESTORED, LogFolder, Position, RestoredAt


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found sound. agreed: how many signed heads   notes: what the log says of itself, such as repairs."""

    lines: int
    first: int
    last: int
    hash: str
    agreed: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A line where it was found. file: its file's name."""

    file: str
    line: Line
    hash: str

    def __str__(self) -> str:
        return f"line {self.line.number} ({self.file})"


def read_lines(folder: LogFolder) -> Iterator[tuple[str, int, bytes]]:
    """Yield the lines that are there now, whole, with their file's name and position in it from 1.

    What others append meanwhile is left out. Raises StateError (E-STATE-80) where there is no log.
    """
    if not folder.numbers():
        raise StateError("E-STATE-80", f"expected an audit log in {folder.path}, found none")
    with folder.locked(fcntl.LOCK_SH):
        sizes = {folder.file(n): folder.file(n).stat().st_size for n in folder.numbers()}
    for path, size in sizes.items():
        with path.open("rb") as file:
            place = 0
            while (left := size - file.tell()) > 0:
                place += 1
                yield path.name, place, file.readline(min(left, MAX_LINE))


def last_lines(folder: LogFolder, most: int) -> list[Line]:
    """Return the newest lines that can be read, oldest first, of the last file or two; none where there is no log."""
    found: list[Line] = []
    for number in reversed(folder.numbers()[-2:]):
        with folder.file(number).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - most * MAX_LINE)
            file.seek(start)
            raw = file.read(size - start).split(b"\n")[bool(start) :]
        lines = []
        for line in raw:
            with suppress(ValueError):
                lines.append(Line.decode(line))
        found = [*lines[-(most - len(found)) :], *found]
        if len(found) >= most:
            break
    return found


def heads_in(file: Path, of: str, authority_pem: bytes) -> list[SignedHead]:
    """Read from the other side's lines (`log show --what head --json`, or its log's files) the heads of `of`.

    Raises ConfigError (E-CFG-02) on a file without any, RefusedError (E-ID-14) on one that `of` never signed.
    """
    found = []
    try:
        with file.open("rb") as lines:
            while raw := lines.readline(MAX_LINE):
                try:
                    head = Line.decode(raw).entry.head
                except ValueError:
                    continue
                if head is not None and head.of == of:
                    head.require_signed(authority_pem)
                    found.append(head)
    except OSError as error:
        raise ConfigError("E-CFG-02", f"--against: expected a file of lines, found {file}: {error}") from None
    if not found:
        raise ConfigError(
            "E-CFG-02",
            f"--against: expected lines of the other side that hold ends of the log of {of}, found none in {file}: "
            "make it there with `log show --what head --json`",
        )
    return found


def verify(
    folder: LogFolder, heads: Iterable[SignedHead] = (), archived: bool = False, restored: Collection[int] = ()
) -> Verified:
    """Check a log from its first line to its last.

    heads: what others hold of it   archived: its oldest files were moved away, so begin where it begins   restored:
    lines at which the operator put the log back, who knows that what others hold from there on is lost.
    Raises StateError (E-STATE-80) that names the first line that was edited, is missing or stands elsewhere; that the
    end is gone; or that the log is another one than the others have seen.
    """
    anchor = folder.anchor()
    if anchor is None and folder.numbers():
        _fail(f"expected the log's anchor in {folder.anchor_file}, found none: it was removed or damaged")
    signed = sorted(
        {(head.number, head.hash, RestoredAt(head.restored, head.restored_hash)) for head in heads},
    )
    chain = _Chain(archived, anchor or Position(), {number for number, *_ in signed})
    torn = chain.read(folder)
    last = chain.last
    number = last.line.number if last else 0
    _check_anchor(chain, number)
    agreed, lost = _check_heads(chain, signed, number, restored)
    notes = [f"{found}: {found.line.entry.what}: {found.line.entry.about}" for found in chain.said]
    if torn:
        notes.append(f"{torn}: never finished, as after a power cut; it is moved aside when the log is next written")
    first = chain.first.line.number if chain.first else 0
    return Verified(chain.count, first, number, last.hash if last else "", agreed, tuple(notes + lost))


@dataclass(slots=True)
class _Chain:
    """Walks along the lines. wanted: numbers of the lines whose hashes are remembered, in `hashes`."""

    archived: bool
    anchor: Position
    wanted: set[int]
    first: _Found | None = None
    last: _Found | None = None
    count: int = 0
    hashes: dict[int, str] = field(default_factory=dict)
    said: list[_Found] = field(default_factory=list)
    restored: list[RestoredAt] = field(default_factory=list)

    def read(self, folder: LogFolder) -> str:
        """Take all lines; return where the unfinished last one is, empty where there is none."""
        lines = read_lines(folder)
        names = [folder.file(n).name for n in folder.numbers()]
        for name, place, raw in lines:
            if not raw.endswith(b"\n") and name == names[-1] and next(lines, None) is None:
                return f"line {place} of {name}"
            try:
                found = _Found(name, Line.decode(raw), line_hash(raw))
            except ValueError:
                _fail(f"expected line {self._expected()}, found text that is none: line {place} of {name} was edited")
            self._take(found, lines)
        return ""

    def _expected(self) -> int:
        return 1 if self.last is None else self.last.line.number + 1

    def _take(self, found: _Found, rest: Iterator[tuple[str, int, bytes]]) -> None:
        expected = self._expected()
        begins = self.last is None and self.archived
        if not begins:
            if found.line.number != expected:
                self._raise_missing_line(found, expected, rest)
            if found.line.before != ("" if self.last is None else self.last.hash):
                self._raise_edited_line(found, rest)
        self.first = self.first or found
        self.last = found
        self.count += 1
        if found.line.number in self.wanted or found.line.number == self.anchor.number:
            self.hashes[found.line.number] = found.hash
        if found.line.entry.who == OWN:
            self.said.append(found)
            if found.line.entry.what == RESTORED:
                self.restored.append(RestoredAt(found.line.number, found.hash))

    def _raise_missing_line(self, found: _Found, expected: int, rest: Iterator[tuple[str, int, bytes]]) -> NoReturn:
        if found.line.number < expected:
            _fail(f"expected line {expected}, found {found} there: it stands a second time, or out of its place")
        for name, place, raw in rest:
            try:
                later = Line.decode(raw)
            except ValueError:
                continue
            if later.number == expected:
                _fail(
                    f"expected line {expected}, found {found} there: line {expected} stands out of its place, as line "
                    f"{place} of {name}"
                )
        _fail(f"expected line {expected}, found {found} there: line {expected} is missing")

    def _raise_edited_line(self, found: _Found, rest: Iterator[tuple[str, int, bytes]]) -> NoReturn:
        """Say which of two neighbours was edited: this one, unless the next, or the anchor, names its hash."""
        following = next(rest, None)
        try:
            named = self.anchor.hash if following is None else Line.decode(following[2]).before
        except ValueError:
            named = ""
        edited = self.last if self.last is not None and named == found.hash else found
        _fail(f"expected {found} to name the hash of the line before it, found another: {edited} was edited")


def _check_anchor(chain: _Chain, number: int) -> None:
    anchor = chain.anchor
    if anchor.number > number:
        _fail(
            f"expected the log to reach line {anchor.number}, which was written (anchor.json), found its end at line "
            f"{number}: line {number + 1} and what followed were cut off"
        )
    if chain.hashes.get(anchor.number, anchor.hash) != anchor.hash:
        _fail(f"expected line {anchor.number} as it was written (anchor.json), found another: it was edited")


def _check_heads(
    chain: _Chain, signed: Sequence[tuple[int, str, RestoredAt]], number: int, acknowledged: Collection[int]
) -> tuple[int, list[str]]:
    """Hold ends that others have against the lines; return how many agree, and what was lost with a restored home."""
    agreed, count, lost = 0, 0, dict[int, int]()
    for expected, hash, restored in signed:
        if chain.first is not None and expected < chain.first.line.number:
            count += 1
            continue
        before = [mark for mark in chain.restored if mark.number <= expected]
        if before and restored != before[-1]:
            _require_acknowledged(before[-1].number, expected, acknowledged)
            lost[before[-1].number] = max(expected, lost.get(before[-1].number, 0))
            continue
        if expected > number:
            _fail(
                f"expected the log to reach line {expected}, whose hash this side has signed for another, found its "
                f"end at line {number}: line {number + 1} and what followed were cut off, or the log was replaced"
            )
        if chain.hashes[expected] != hash:
            since = f"lines {agreed + 1} to {expected} were" if agreed else "the whole log up to there was"
            _fail(
                f"expected line {expected} with the hash that this side signed for another, found another hash: "
                f"{since} replaced, with a chain of its own"
            )
        agreed, count = expected, count + 1
    return count, [f"lines {begin} to {end} were lost when the home was restored" for begin, end in lost.items()]


def _require_acknowledged(restored: int, expected: int, acknowledged: Collection[int]) -> None:
    if restored not in acknowledged:
        _fail(
            f"expected line {expected} with the hash that this side signed for another, found that the log was put "
            f"back: line {restored} says that the home was restored, and lines {restored} to {expected} from before "
            f"are gone. Where you restored it yourself: log verify --against FILE --restored {restored}"
        )


def _fail(what: str) -> NoReturn:
    raise StateError("E-STATE-80", what)
