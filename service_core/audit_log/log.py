"""The file of an audit log: chained rows, appended by threads and processes, and the heads of other sides' logs."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Self

from fl_core.errors import StateError
from service_core.audit_log.heads import SignedHead
from service_core.audit_log.lines import LogEntry, LogLine, line_hash
from service_core.storage import private_files
from service_core.storage.chain import BUSY_S, Chain, ChainHead, Row, sqlite_disk_errors, transaction
from service_core.storage.disk import disk_errors
from service_core.storage.generation import open_untouched
from service_core.storage.migration import migrate, set_journal_mode, statements

FOLDER = "audit"
LOG_FILE = f"{FOLDER}/log.sqlite"
"""Path of the log in a home."""
RESTORED = "restored"
OWN = "this log"
"""`who` of lines about the log itself."""
_READ = 1000
_ANCHOR = "anchor.json"
"""File of version 0.1.0: number and hash of the newest line that was on the disk."""
_SCHEMA = """
CREATE TABLE event (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL) STRICT;
CREATE TABLE kept (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
"""
_APPEND_ONLY = """
CREATE TRIGGER event_noupd BEFORE UPDATE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END;
CREATE TRIGGER event_nodel BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END;
"""


def _hash(previous: str, row: Row) -> str:
    """Return the hash of a line; empty unless the line has its own number and the previous hash."""
    number, text = row
    try:
        line = LogLine.decode(text)
    except ValueError:
        return ""
    return line_hash(text) if (line.number, line.before) == (number, previous) else ""


CHAIN = Chain(("text",), _hash, ChainHead(0, ""))


class AuditLog:
    """An append-only, hash-chained log in a folder, for several threads and processes.

    Guarantees: a line survives a crash of the process once `append` has returned, and a power cut once `sync` has
    returned; a power cut loses only whole lines. The first opening takes over the lines of 0.1.0.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Open or create the log.

        Raises StateError: E-STATE-42 if others can enter its folder, E-STATE-80 on a file that is no audit log.
        """
        with disk_errors(folder):
            self.file = private_files.private_folder(folder) / Path(LOG_FILE).name
        self._clock = clock
        self._lock = RLock()
        self._synced = 0
        self._db: sqlite3.Connection | None = None
        with self._lock, self._errors():
            self._open()

    @classmethod
    def existing(cls, folder: Path) -> Self:
        """Open an existing log; raises StateError (E-STATE-80) if there is none."""
        files = (folder / Path(LOG_FILE).name, folder / _ANCHOR)
        if not any(file.exists() for file in files) and not _files_of_0_1_0(folder):
            raise StateError("E-STATE-80", f"there is no audit log in {folder}")
        return cls(folder)

    def append(self, *entries: LogEntry) -> None:
        """Append a line per entry, or nothing; raises as `transaction`, and E-STATE-80 on a damaged file."""
        with self._writing() as db:
            for entry in entries:
                self._write(db, entry)

    def mark_restored(self, about: str) -> int:
        """Record a restore; return the number of its line, which is on the disk."""
        with self._writing() as db:
            line = self._write(db, LogEntry(OWN, RESTORED, about, outcome="noticed"))
            _keep(db, RESTORED, json.dumps(line))
        self.sync()
        return line.seq

    def keep(self, head: SignedHead) -> SignedHead | None:
        """Keep the head of another side's log; return the previous head if the log now lacks lines of that one."""
        with self._writing() as db:
            before = self._head_of(db, head.of)
            _keep(db, head.of, json.dumps(head.to_json()))
        return before if before is not None and head.lacks(before) else None

    def head_of(self, of: str) -> SignedHead | None:
        """Return the newest head of another side's log; None if there is none or it is damaged."""
        with self.reading() as db:
            return self._head_of(db, of)

    def head(self) -> ChainHead:
        """Return number and hash of the newest line; 0 and empty in an empty log."""
        with self.reading() as db:
            return CHAIN.head(db)

    def restored(self) -> ChainHead:
        """Return number and hash of the newest line that records a restore; 0 and empty if there was none."""
        with self.reading() as db, suppress(ValueError, TypeError):
            return ChainHead(*json.loads(_value(db, RESTORED)))
        return CHAIN.start

    def texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Yield number and text of the lines after number `after`."""
        rows = [(after, "")]
        while rows:
            with self.reading() as db:
                query = "SELECT seq, text FROM event WHERE seq > ? ORDER BY seq LIMIT ?"
                rows = db.execute(query, (rows[-1][0], _READ)).fetchall()
            yield from rows

    def lines(self, after: int = 0) -> Iterator[LogLine]:
        """Yield the lines after number `after`, without invalid ones, which `verify` reports."""
        for _, text in self.texts(after):
            with suppress(ValueError):
                yield LogLine.decode(text)

    def sync(self) -> None:
        """Sync all lines to the disk; other threads may append in the meantime. Raises as `append`."""
        with self._lock:
            changes = 0 if self._db is None else self._db.total_changes
            if changes == self._synced:
                return
        with self._errors():
            with suppress(FileNotFoundError):  # everything is in the main file
                private_files.sync_path(Path(f"{self.file}-wal"))
            with closing(sqlite3.connect(self.file, timeout=BUSY_S)) as db:  # a reader may delay it
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._synced = changes

    def close(self) -> None:
        """Sync and close the file; a later `append` opens it again."""
        self.sync()
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db, self._synced = None, 0

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a read transaction."""
        with self._lock, self._errors():
            db = self._open()
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.execute("ROLLBACK")

    # ---- inside -------------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            db = self._open()
            with transaction(db, self.file):
                yield db

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            if not self.file.exists():
                os.close(os.open(self.file, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            db = sqlite3.connect(self.file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            db.text_factory = lambda raw: raw.decode(errors="replace")  # `verify` reports text that is not UTF-8
            try:
                set_journal_mode(db, "WAL", BUSY_S)
                db.execute("PRAGMA synchronous = NORMAL")  # only `sync` waits for the disk
                synced = db.total_changes
                migrate(db, self._create, (), ("event", "kept"))
            except BaseException:
                db.close()
                raise
            self._db, self._synced = db, synced
        return self._db

    def _create(self, db: sqlite3.Connection) -> None:
        for statement in statements(_SCHEMA):
            db.execute(statement)
        self._take_over(db, self.file.parent)
        for statement in statements(_APPEND_ONLY):
            db.execute(statement)

    def _write(self, db: sqlite3.Connection, entry: LogEntry) -> ChainHead:
        before = CHAIN.head(db)
        number = max(before.seq, last_number(db)) + 1  # if the end was cut off, the gap stays, and `verify` finds it
        return CHAIN.append(db, (LogLine(number, self._clock(), before.hash, entry).encode(),), number)

    def _head_of(self, db: sqlite3.Connection, of: str) -> SignedHead | None:
        try:
            return SignedHead.from_json(json.loads(_value(db, of)))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with disk_errors(self.file), sqlite_disk_errors(self.file):
                yield
        except sqlite3.DatabaseError as error:
            raise StateError(
                "E-STATE-80",
                f"SQLite cannot use the audit log {self.file} ({error}): restore it from a backup, or move it away. "
                "A new log begins with line 1, which the other side notices",
            ) from error

    def _take_over(self, db: sqlite3.Connection, folder: Path) -> None:
        """Copy the lines of 0.1.0 byte for byte; its files stay. `verify` finds edits that were made there."""
        files = _files_of_0_1_0(folder)
        if not files and not (folder / _ANCHOR).exists():
            return
        count = lost = 0
        for raw in (raw for file in files for raw in file.read_bytes().splitlines()):
            try:
                line, text = LogLine.decode(raw), raw.decode()
            except ValueError:
                lost += 1
                continue
            row = (line.number, text, line.before, line_hash(text))
            new = db.execute("INSERT OR IGNORE INTO event VALUES (?,?,?,?)", row).rowcount
            count, lost = count + new, lost + 1 - new
            if (line.entry.who, line.entry.what) == (OWN, RESTORED):
                _keep(db, RESTORED, json.dumps(ChainHead(line.number, line_hash(text))))
        for of, head in _json(folder / "heads.json").items():
            _keep(db, of, json.dumps(head))
        about = f"{count} lines of {len(files)} files of 0.1.0, which may be moved away"
        if lost:
            about += f"; {lost} more lines of them are torn, edited or duplicates"
        anchor = _json(folder / _ANCHOR)
        number, hash = anchor.get("number"), anchor.get("hash")
        if isinstance(number, int) and 0 < number < 2**63 and isinstance(hash, str):
            db.execute(
                "UPDATE event SET hash = ? WHERE seq = ?", (hash, number)
            )  # a different line then breaks the chain
        else:
            number = last_number(db) + 1  # a gap, which `verify` finds: the number of lines is unknown
            about += "; its anchor was removed or damaged, so lines at the end may be missing"
        last = max(last_number(db), number)
        db.execute("DELETE FROM sqlite_sequence WHERE name = 'event'")
        db.execute("INSERT INTO sqlite_sequence VALUES ('event', ?)", (last,))
        self._write(db, LogEntry(OWN, "taken over", about, outcome="noticed"))


def last_number(db: sqlite3.Connection) -> int:
    """Return the number of the newest line ever written, even if it was removed."""
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'event'").fetchone()
    return int(row[0]) if row else 0


def last_lines(home: Path, most: int) -> list[LogLine]:
    """Return the newest valid lines of a home, oldest first. No file is created or changed."""
    newest = list[LogLine]()
    with suppress(OSError, sqlite3.Error), closing(open_untouched(home / LOG_FILE)) as db:
        for (text,) in db.execute("SELECT text FROM event ORDER BY seq DESC LIMIT ?", (most,)):
            with suppress(ValueError):
                newest.insert(0, LogLine.decode(text))
    return newest


def _keep(db: sqlite3.Connection, name: str, value: str) -> None:
    db.execute("INSERT INTO kept VALUES (?,?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", (name, value))


def _value(db: sqlite3.Connection, name: str) -> str:
    row = db.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
    return str(row[0]) if row else ""


def _files_of_0_1_0(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("*.jsonl") if p.stem.isdecimal()), key=lambda p: int(p.stem))


def _json(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def mark_restored(home: Path, at: float) -> int:
    """Record in a home's log that it was restored; return the line's number. at: time of the backup, Unix seconds.

    All later signed heads name this line, so other sides notice if they hold a head of the lost lines.
    """
    when = datetime.fromtimestamp(at, UTC)
    with closing(AuditLog(home / FOLDER)) as log:
        return log.mark_restored(f"from a backup of {when:%Y-%m-%d %H:%M:%S} UTC: what was written since then is lost")
