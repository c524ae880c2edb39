"""Appending to an audit log: safe between threads, processes and power cuts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from service_core.audit_log.lines import Entry, Line, line_hash
from service_core.storage import private_files
from service_core.storage.digests import write_all

FOLDER = "audit"
FILE_BYTES = 16 << 20
RESTORED = "restored"
_RESTORED = "restored.json"
OWN = "this log"
"""Who speaks in lines about the log itself."""


class RestoredAt(NamedTuple):
    """The newest line that says that the log was put back from a backup: number and hash; 0 where it never was."""

    number: int = 0
    hash: str = ""


class Position(NamedTuple):
    """A line's place: its file's number, where it begins and ends there, its number and its hash."""

    file: int = 1
    start: int = 0
    end: int = 0
    number: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True)
class LogFolder:
    """The files of a log, by name."""

    path: Path

    def file(self, number: int) -> Path:
        return self.path / f"{number:06d}.jsonl"

    def numbers(self) -> list[int]:
        return sorted(int(p.stem) for p in self.path.glob("*.jsonl") if p.stem.isdecimal() and len(p.stem) < 10)

    @property
    def anchor_file(self) -> Path:
        return self.path / "anchor.json"

    def anchor(self) -> Position | None:
        """Return the newest line that was on the disk for certain; None where the file is missing or damaged."""
        try:
            raw = json.loads(self.anchor_file.read_text(encoding="ascii"))
            found = Position(raw["file"], raw["start"], raw["end"], raw["number"], raw["hash"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        sound = all(type(v) is int and v >= 0 for v in found[:4]) and isinstance(found.hash, str)
        return found if sound else None

    def restored(self) -> RestoredAt:
        try:
            raw = json.loads((self.path / _RESTORED).read_text(encoding="ascii"))
            found = RestoredAt(raw["number"], raw["hash"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return RestoredAt()
        return found if type(found.number) is int and _is_hash(found.hash) else RestoredAt()

    @contextmanager
    def locked(self, mode: int = fcntl.LOCK_EX) -> Iterator[None]:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, mode)
            yield
        finally:
            os.close(descriptor)


class AuditLog:
    """An append-only, hash-chained log in a folder, usable from every thread and beside other processes.

    Guarantees: a line is in the file when `append` returns, so a crash of the process loses none; it survives a power
    cut once `sync` has returned. What a cut leaves of a line is moved aside, and a line says so.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time, file_bytes: int = FILE_BYTES) -> None:
        self.folder = LogFolder(private_files.private_folder(folder))
        self._clock = clock
        self._file_bytes = file_bytes
        self._mutex = RLock()
        self._at = Position()
        self._anchored = Position()
        self._least = 0
        self._file: FileIO | None = None
        self._file_number = 0
        with self._mutex, self.folder.locked():
            self._open()

    def append(self, *entries: Entry) -> None:
        """Write one line for each entry; raises OSError, with nothing written, when the disk takes none."""
        with self._mutex, self.folder.locked():
            self._catch_up()
            for entry in entries:
                self._write(entry)

    def mark_restored(self, about: str) -> int:
        """Write that the log was put back, on the disk on return; return the line's number."""
        with self._mutex:
            with self.folder.locked():
                self._catch_up()
                self._write(Entry(OWN, RESTORED, about, outcome="noticed"))
                mark = {"number": self._at.number, "hash": self._at.hash}
            self.sync()
            private_files.write_private(self.folder.path / _RESTORED, json.dumps(mark).encode())
        return self._at.number

    def head(self) -> tuple[int, str]:
        """Return number and hash of the newest line; 0 and nothing before the first."""
        with self._mutex, self.folder.locked():
            self._catch_up()
            return self._at.number, self._at.hash

    def sync(self) -> None:
        """Bring all lines to the disk, and anchor the newest; while it waits for the disk, others may append."""
        with self._mutex:
            at = self._at
            if at == self._anchored or self._file is None:
                return
            descriptor = os.dup(self._file.fileno())
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside = self._anchor_aside(at)
        with self._mutex, self.folder.locked():
            known = self.folder.anchor()
            if known is None or known.number < at.number:
                aside.replace(self.folder.anchor_file)
            else:
                aside.unlink()
            self._anchored = max(at, self._anchored, key=lambda p: p.number)

    def close(self) -> None:
        with self._mutex:
            self.sync()
            if self._file is not None:
                self._file.close()
                self._file = None

    # ---- inside, with both locks held --------------------------------------------------------------------------

    def _open(self) -> None:
        """Find the end of the log, from the anchor on; say it where the anchored line is not where it was."""
        anchor, numbers = self.folder.anchor(), self.folder.numbers()
        if anchor is not None and self._holds(anchor):
            self._at = self._anchored = anchor
            self._catch_up()
            return
        if anchor is None and not numbers:
            self._anchor_aside(self._at).replace(
                self.folder.anchor_file
            )  # a crash before the first `sync` is no damage
            self._use(1)
            return
        self._at = Position(file=numbers[-1] if numbers else 1)
        self._least = anchor.number if anchor is not None else 0  # the gap in the numbers stays, for all who look later
        self._catch_up()
        expected = f"line {anchor.number} with hash {anchor.hash}" if anchor is not None else "the log's anchor"
        self._write(Entry(OWN, "damaged", f"expected {expected}, found it changed or gone", outcome="noticed"))

    def _anchor_aside(self, at: Position) -> Path:
        aside = self.folder.path / f".anchor.{os.getpid()}.{id(self)}"
        with aside.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(at._asdict()).encode())
            file.flush()
            os.fsync(file.fileno())
        return aside

    def _holds(self, anchor: Position) -> bool:
        if anchor == Position():
            return True
        try:
            with self.folder.file(anchor.file).open("rb") as file:
                file.seek(anchor.start)
                raw = file.read(anchor.end - anchor.start)
        except (OSError, ValueError):
            return False
        return raw.endswith(b"\n") and line_hash(raw) == anchor.hash

    def _catch_up(self) -> None:
        """Read what other processes appended, and move aside what a power cut left of a line."""
        newest = max(self.folder.numbers(), default=self._at.file)
        while True:
            path = self.folder.file(self._at.file)
            size = path.stat().st_size if path.exists() else 0
            if size > self._at.end:
                self._read_from(path)
            if self._at.file >= newest:
                break
            self._at = self._at._replace(file=self._at.file + 1, start=0, end=0)
        self._use(self._at.file)

    def _read_from(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._at.end)
            for raw in file:
                if not raw.endswith(b"\n") or b"\0" in raw:
                    self._repair(path, raw + file.read())
                    return
                end = self._at.end + len(raw)
                try:
                    number, hash = Line.decode(raw).number, line_hash(raw)
                except ValueError:  # somebody's edit: it stays for `verify` to find
                    number, hash = self._at.number, self._at.hash
                self._at = Position(self._at.file, self._at.end, end, number, hash)

    def _repair(self, path: Path, torn: bytes) -> None:
        """Move aside what a power cut left of the last lines, and say so in the next."""
        aside = self.folder.path / f"torn-{self._at.number + 1}-{hashlib.sha256(torn).hexdigest()[:8]}"
        private_files.write_private(aside, torn)
        os.truncate(path, self._at.end)
        self._use(self._at.file)
        about = f"{len(torn)} bytes of a line that was never finished; they are kept in {aside.name}"
        self._write(Entry(OWN, "repaired", about, outcome="noticed"))

    def _write(self, entry: Entry) -> None:
        number = max(self._at.number, self._least) + 1
        raw = Line(number, self._clock(), self._at.hash, entry).encode()
        if self._at.end and self._at.end + len(raw) > self._file_bytes:
            assert self._file is not None
            os.fsync(self._file.fileno())
            self._at = self._at._replace(file=self._at.file + 1, start=0, end=0)
        self._use(self._at.file)
        assert self._file is not None
        try:
            write_all(self._file, raw)
        except OSError:
            os.ftruncate(self._file.fileno(), self._at.end)
            raise
        end = self._at.end + len(raw)
        self._at = Position(self._at.file, self._at.end, end, number, line_hash(raw))

    def _use(self, number: int) -> None:
        """Have this file open; a new one is private, and its name is on the disk."""
        if self._file is not None and self._file_number == number:
            return
        if self._file is not None:
            self._file.close()
        path = self.folder.file(number)
        new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file, self._file_number = FileIO(descriptor, "a"), number
        if new:
            private_files.sync_folder(self.folder.path)


def _is_hash(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")


def copy_log(home: Path, target: Path) -> None:
    """Copy the log of a home into another folder, as it is at one moment: whole lines, and an end that is there."""
    folder = LogFolder(home / FOLDER)
    if not folder.path.is_dir():
        return
    with folder.locked(fcntl.LOCK_SH):  # nobody appends: a millisecond
        kept = [path for path in folder.path.iterdir() if path.suffix == ".json" or path.name.startswith("torn-")]
        contents = {path.name: path.read_bytes() for path in kept if path.is_file()}
        sizes = {folder.file(number): folder.file(number).stat().st_size for number in folder.numbers()}
    place = private_files.private_folder(target / FOLDER)
    for path, size in sizes.items():
        private_files.write_private(place / path.name, _beginning(path, size))
    for name, content in contents.items():
        private_files.write_private(place / name, content)


def mark_restored(home: Path, at: float) -> int:
    """Write a line that the log was put back, and return its number. at: of the backup, in seconds since 1970.

    From there on each end of the log that is signed names that line, so that a side that holds a later one notices.
    """
    when = datetime.fromtimestamp(at, UTC)
    with closing(AuditLog(home / FOLDER)) as log:
        return log.mark_restored(f"from a backup of {when:%Y-%m-%d %H:%M:%S} UTC: what was written since then is lost")


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)
