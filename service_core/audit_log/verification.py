"""Whether an audit log is what was written: each line, its end, and what other sides hold of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fl_core.errors import ConfigError, StateError
from service_core.audit_log.heads import SignedHead
from service_core.audit_log.lines import MAX_LINE, LogLine, line_hash
from service_core.audit_log.log import CHAIN, OWN, RESTORED, AuditLog, RestoredAt, last_number
from service_core.storage.chain import BrokenChainError, ChainHead


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found sound. agreed: how many signed heads   notes: what the log says of itself, such as repairs."""

    lines: int
    first: int
    last: int
    hash: str
    agreed: int
    notes: tuple[str, ...] = ()


def heads_in(file: Path, of: str, authority_pem: bytes) -> list[SignedHead]:
    """Read from the other side's lines (`log show --what head --json`, or its log's files) the heads of `of`.

    Raises ConfigError (E-CFG-02) on a file without any, RefusedError (E-ID-14) on one that `of` never signed.
    """
    heads = []
    try:
        with file.open("rb") as lines:
            while raw := lines.readline(MAX_LINE):
                try:
                    head = LogLine.decode(raw).entry.head
                except ValueError:
                    continue
                if head is not None and head.of == of:
                    head.require_signed(authority_pem)
                    heads.append(head)
    except OSError as error:
        raise ConfigError("E-CFG-02", f"--against: expected a file of lines, found {file}: {error}") from None
    if not heads:
        raise ConfigError(
            "E-CFG-02",
            f"--against: expected lines of the other side that hold ends of the log of {of}, found none in {file}: "
            "make it there with `log show --what head --json`",
        )
    return heads


def verify(
    log: AuditLog, heads: Iterable[SignedHead] = (), archived: bool = False, restored: Collection[int] = ()
) -> Verified:
    """Check a log from its first line to its last, as it is at one moment.

    heads: what others hold of it   archived: its oldest files were moved away by 0.1.0, so begin where it begins
    restored: lines at which the operator put the log back, who knows that what others hold from there on is lost.
    Raises StateError (E-STATE-80) that names the first line that was edited, is missing or stands elsewhere; that the
    end is gone; or that the log is another one than the others have seen.
    """
    signed = sorted({(head.number, head.hash, RestoredAt(head.restored, head.restored_hash)) for head in heads})
    hashes = dict.fromkeys((number for number, *_ in signed), "")
    marks, notes = list[RestoredAt](), list[str]()
    with log.reading() as db:
        row = db.execute("SELECT seq, prev_hash FROM event ORDER BY seq LIMIT 1").fetchone()
        begin = ChainHead(row[0] - 1, row[1]) if archived and row else CHAIN.start
        last, newest = begin, last_number(db)
        try:
            for (number, text), last in CHAIN.follow(db, begin):
                if number in hashes:
                    hashes[number] = last.hash
                if (entry := LogLine.decode(text).entry).who == OWN:
                    notes.append(f"line {number}: {entry.what}: {entry.about}")
                    if entry.what == RESTORED:
                        marks.append(RestoredAt(*last))
        except BrokenChainError as broken:
            _raise_broken(broken)
    if newest > last.seq:
        _fail(
            f"expected the log to reach line {newest}, which was written, found its end at line {last.seq}: line "
            f"{last.seq + 1} and what followed were cut off"
        )
    agreed, lost = _check_heads(hashes, marks, signed, (begin.seq + 1, last.seq), restored)
    first = begin.seq + 1 if last.seq > begin.seq else 0
    return Verified(last.seq - begin.seq, first, last.seq, last.hash, agreed, tuple(notes + lost))


def _raise_broken(broken: BrokenChainError) -> NoReturn:
    """Name the line: of two neighbours that do not fit, the second where it is not whole by itself, else the first."""
    expected, (number, text, previous, hash) = broken.after.seq + 1, broken.row
    if number != expected:
        _fail(f"expected line {expected}, found line {number} there: line {expected} is missing")
    try:
        line = LogLine.decode(text)
    except ValueError:
        _fail(f"expected line {number}, found text that is none: line {number} was edited")
    if line.number != number:
        _fail(f"expected line {number}, found the text of line {line.number} there: it stands out of its place")
    whole = (line.before, line_hash(text)) == (previous, hash)
    edited = number - 1 if whole else number
    _fail(f"expected line {number} to follow from the line before it, found another text: line {edited} was edited")


def _check_heads(
    hashes: Mapping[int, str],
    marks: Sequence[RestoredAt],
    signed: Sequence[tuple[int, str, RestoredAt]],
    span: tuple[int, int],
    acknowledged: Collection[int],
) -> tuple[int, list[str]]:
    """Hold ends that others have against the lines; return how many agree, and what was lost with a restored home.

    hashes: of the lines that others name   marks: where it was restored   span: numbers of the first and last line.
    """
    agreed, count, lost = 0, 0, dict[int, int]()
    first, number = span
    for expected, hash, restored in signed:
        if expected < first:
            count += 1
            continue
        before = [mark for mark in marks if mark.number <= expected]
        if before and restored != before[-1]:
            _require_acknowledged(before[-1].number, expected, acknowledged)
            lost[before[-1].number] = max(expected, lost.get(before[-1].number, 0))
            continue
        if expected > number:
            _fail(
                f"expected the log to reach line {expected}, whose hash this side has signed for another, found its "
                f"end at line {number}: line {number + 1} and what followed were cut off, or the log was replaced"
            )
        if hashes[expected] != hash:
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
