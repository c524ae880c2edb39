"""Verifies an audit log: every line, its end, and the heads that other sides hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fl_core.errors import ConfigError, StateError
from service_core.audit_log.heads import SignedHead
from service_core.audit_log.lines import MAX_LINE, LogLine, line_hash
from service_core.audit_log.log import CHAIN, OWN, RESTORED, AuditLog, last_number
from service_core.storage.chain import BrokenChainError, ChainHead


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """Result for a sound log. agreed: number of signed heads that match   notes: lines about the log itself."""

    lines: int
    first: int
    last: int
    hash: str
    agreed: int
    notes: tuple[str, ...] = ()


def heads_in(file: Path, of: str, authority_pem: bytes) -> list[SignedHead]:
    """Read the heads of `of` from the other side's lines (output of `log show --what head --json`).

    Raises ConfigError (E-CFG-02) on a file without heads, RefusedError (E-ID-14) on one that `of` did not sign.
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
        raise ConfigError("E-CFG-02", f"--against: cannot read {file}: {error}") from None
    if not heads:
        raise ConfigError(
            "E-CFG-02",
            f"--against: {file} has no lines of the other side with heads of the log of {of}: make the file on the "
            "other side with `log show --what head --json`",
        )
    return heads


def verify(
    log: AuditLog, heads: Iterable[SignedHead] = (), archived: bool = False, restored: Collection[int] = ()
) -> VerificationResult:
    """Verify a log from its first line to its last, in one read transaction.

    heads: of this log, held by others   archived: begin at the first line left; older files of 0.1.0 were moved away
    restored: restore lines that the operator confirms, so lost lines after them are accepted.
    Raises StateError (E-STATE-80): names the first line that was edited, removed or moved, or says that the end was cut
    off or the log replaced.
    """
    signed = sorted({(head.number, head.hash, ChainHead(head.restored, head.restored_hash)) for head in heads})
    hashes = dict.fromkeys((number for number, *_ in signed), "")
    marks, notes = list[ChainHead](), list[str]()
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
                        marks.append(last)
        except BrokenChainError as broken:
            _raise_broken(broken)
    if newest > last.seq:
        _fail(
            f"line {newest} was written, but the log ends at line {last.seq}: the lines from {last.seq + 1} on were "
            "cut off"
        )
    agreed, lost = _check_heads(hashes, marks, signed, (begin.seq + 1, last.seq), restored)
    first = begin.seq + 1 if last.seq > begin.seq else 0
    return VerificationResult(last.seq - begin.seq, first, last.seq, last.hash, agreed, tuple(notes + lost))


def _raise_broken(broken: BrokenChainError) -> NoReturn:
    """Name the edited line: the second of two neighbours if it is damaged by itself, else the first."""
    expected, (number, text, previous, hash) = broken.after.seq + 1, broken.row
    if number != expected:
        _fail(f"line {number} follows in place of line {expected}: line {expected} is missing")
    try:
        line = LogLine.decode(text)
    except ValueError:
        _fail(f"line {number} does not have the text that was written: line {number} was edited")
    if line.number != number:
        _fail(f"line {number} has the text of line {line.number}: it was moved")
    whole = (line.before, line_hash(text)) == (previous, hash)
    edited = number - 1 if whole else number
    _fail(f"line {number} does not follow from the line before it: line {edited} was edited")


def _check_heads(
    hashes: Mapping[int, str],
    marks: Sequence[ChainHead],
    signed: Sequence[tuple[int, str, ChainHead]],
    span: tuple[int, int],
    acknowledged: Collection[int],
) -> tuple[int, list[str]]:
    """Compare heads that others hold with the lines; return how many agree, and notes on lines lost by restores.

    hashes: of the lines that heads name   marks: the restores   span: numbers of the first and last line
    """
    agreed, count, lost = 0, 0, dict[int, int]()
    first, number = span
    for expected, hash, restored in signed:
        if expected < first:
            count += 1
            continue
        before = [mark for mark in marks if mark.seq <= expected]
        if before and restored != before[-1]:
            _require_acknowledged(before[-1].seq, expected, acknowledged)
            lost[before[-1].seq] = max(expected, lost.get(before[-1].seq, 0))
            continue
        if expected > number:
            _fail(
                f"this side signed the hash of line {expected} for another side, but the log ends at line {number}: "
                f"the lines from {number + 1} on were cut off, or the log was replaced"
            )
        if hashes[expected] != hash:
            since = f"lines {agreed + 1} to {expected} were" if agreed else "the whole log up to this line was"
            _fail(
                f"line {expected} has another hash than the one that this side signed for another side: {since} "
                "replaced by another chain"
            )
        agreed, count = expected, count + 1
    return count, [f"lines {begin} to {end} were lost when the home was restored" for begin, end in lost.items()]


def _require_acknowledged(restored: int, expected: int, acknowledged: Collection[int]) -> None:
    if restored not in acknowledged:
        _fail(
            f"line {expected} has another hash than the one that this side signed for another side, because the "
            f"home was restored: line {restored} records it, and the earlier lines {restored} to {expected} are "
            f"gone. If you restored it yourself: log verify --against FILE --restored {restored}"
        )


def _fail(what: str) -> NoReturn:
    raise StateError("E-STATE-80", what)
