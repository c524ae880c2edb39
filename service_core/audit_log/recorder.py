"""The audit log of a running service: syncs every second and counts repeated entries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from fl_core.errors import FederationError
from service_core.audit_log.heads import SignedHead
from service_core.audit_log.lines import ALLOWED, LogEntry
from service_core.audit_log.log import OWN, AuditLog
from service_core.storage.private_files import Credentials

log = logging.getLogger(__name__)
SYNC_S = 1.0
"""Seconds between two syncs; a power cut loses at most the lines of this time."""
WINDOW_S = 60.0
_REMEMBERED = 4096
_Key = tuple[str, ...]


@dataclass(slots=True)
class _Repeated:
    since: float
    entry: LogEntry
    times: int = 0
    bytes: int = 0


HEAD_LINE_S = 3600.0
"""Minimum seconds between two head lines (2 kB each) of one side."""


def _head_line(head: SignedHead) -> LogEntry:
    return LogEntry(head.of, "head", f"its log ends at line {head.number}", head=head)


class Recorder:
    """Records the calls and events of a service. identity: of the service. Thread-safe; `record` never raises.

    Guarantees: the first of equal entries is written at once; further ones within a minute are counted into one more
    line. So a million refusals cost one line a minute for each call. If the disk is full, the service continues and
    logs an error, and the next line tells how many are missing.
    """

    def __init__(self, audit_log: AuditLog, identity: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.identity = identity
        self._log = audit_log
        self._clock = clock
        self._lock = threading.RLock()
        self._repeated: dict[_Key, _Repeated] = {}
        self._head_lines: dict[str, tuple[float, SignedHead]] = {}
        self._unwritten: dict[str, SignedHead] = {}
        self._lost = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)

    def start(self) -> None:
        """Start the thread that syncs."""
        self.record(LogEntry(self.identity, "service started"))
        self._thread.start()

    def record(self, entry: LogEntry) -> None:
        key = _key(entry)
        with self._lock:
            repeated = self._repeated.get(key)
            now = self._clock()
            if repeated is not None and now - repeated.since < WINDOW_S:
                repeated.times += 1
                repeated.bytes += entry.bytes
                return
            self._end_window(key)
            while len(self._repeated) >= _REMEMBERED:
                self._end_window(next(iter(self._repeated)))
            self._write(entry)
            self._repeated[key] = _Repeated(now, entry)

    def signed_head(self, credentials: Credentials) -> SignedHead | None:
        """Return the signed head of this log; None if the log is empty or cannot be read."""
        try:
            head, restored = self._log.head(), self._log.restored()
        except FederationError as error:
            log.error("the audit log cannot be read: %s", error)
            return None
        return SignedHead.sign(self.identity, *head, credentials, *restored) if head.seq else None

    def keep(self, head: SignedHead) -> str | None:
        """Keep the other side's newest head, once an hour as a line; return a message if its log went back.

        A head covers all lines before it, so the newest one suffices; if the log went back, both heads are written.
        """
        try:
            before = self._log.keep(head)
        except FederationError as error:
            log.error("the head of the audit log of %s cannot be stored: %s", head.of, error)
            before = None
        with self._lock:
            self._unwritten[head.of] = head
            if before is None:
                self._write_heads(HEAD_LINE_S, [head.of])
                return None
            if self._head_lines.get(head.of, (0.0, None))[1] != before:
                self._write(_head_line(before))
            self._write_heads(0.0, [head.of])
            text = f"its log ended at line {before.number}, and now ends differently at line {head.number}"
            if 0 < head.restored <= before.number:
                text += f"; its home was restored at line {head.restored}, and it lost the lines from that one on"
            self._write(LogEntry(head.of, "log went back", text, outcome="noticed"))
            return (
                f"the audit log of {head.of} was restored or changed, or its message is late: {text}. Ask that side "
                "whether it restored a backup. This side keeps both heads"
            )

    def flush(self) -> None:
        """Write the counts of finished windows, and sync."""
        with self._lock:
            now = self._clock()
            for key, repeated in [(k, r) for k, r in self._repeated.items() if now - r.since >= WINDOW_S]:
                self._end_window(key)
                if repeated.times:  # it may continue: count the next minute too
                    self._repeated[key] = _Repeated(now, repeated.entry)
            self._write_heads(HEAD_LINE_S, list(self._unwritten))
        self._sync()

    def _write_heads(self, age: float, sides: Iterable[str]) -> None:
        """Write the newest heads of sides as lines, if their last head line is at least `age` seconds old."""
        now = self._clock()
        for of in sides:
            last = self._head_lines.get(of)
            if of in self._unwritten and (last is None or now - last[0] >= age):
                head = self._unwritten.pop(of)
                self._write(_head_line(head))
                self._head_lines[of] = now, head

    def close(self) -> None:
        """Write the counts and the stop of the service."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            for key in list(self._repeated):
                self._end_window(key)
            self._write_heads(0.0, list(self._unwritten))
            self._write(LogEntry(self.identity, "service stopped"))
        self._sync()
        with suppress(FederationError):  # already logged
            self._log.close()

    def _run(self) -> None:
        while not self._stop.wait(SYNC_S):
            self.flush()

    def _end_window(self, key: _Key) -> None:
        repeated = self._repeated.pop(key, None)
        if repeated is not None and repeated.times:
            self._write(replace(repeated.entry, times=repeated.times, bytes=repeated.bytes))

    def _write(self, entry: LogEntry) -> None:
        try:
            if self._lost:
                self._log.append(LogEntry(OWN, "lost", f"{self._lost} lines could not be written", outcome="noticed"))
                self._lost = 0
            self._log.append(entry)
        except FederationError as error:
            if not self._lost:
                log.error("%s: the audit log cannot be written, the service continues: %s", error.code, error.message)
            self._lost += 1

    def _sync(self) -> None:
        try:
            self._log.sync()
        except FederationError as error:
            log.error("%s: the audit log cannot be synced: %s", error.code, error.message)


def _key(entry: LogEntry) -> _Key:
    """Return the fields by which entries are equal; without a refused call's object, which the caller chooses."""
    about = entry.about if entry.outcome == ALLOWED else ""
    return entry.who or entry.address, entry.serial, entry.what, entry.outcome, entry.code, about
