"""Backup of a whole home while its service runs, and restore into an empty home.

SQLite copies the databases while others write. The service may delete objects that the copy needs, so all objects are
first hard-linked into a folder of the home, which takes milliseconds, then copied from there and checked against their
digests. `backup.json` is written last: a folder without it is not a backup. Both folders are marked while they are
filled (`service_core.storage.unfinished`), and the same command continues or starts again.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fl_core.converter import ConversionError, parse_json, structure
from fl_core.errors import ConfigError, StateError
from service_core.storage import unfinished
from service_core.storage.digests import Hasher, digest, file_digest, write_all
from service_core.storage.disk import disk_errors
from service_core.storage.generation import BUSY_SECONDS, GenerationFile, begin_incarnation, generation_of
from service_core.storage.private_files import replace_file, sync_path
from service_core.storage.unfinished import UnfinishedMarker

FILE = "backup.json"
FORMAT = 1
_TRIES = 20
_MAX_BYTES = 256 << 20
"""Size limit of `backup.json`, enough for two million objects."""
_LATEST = 253_402_300_799.0
"""End of the year 9999: datetime cannot format later times."""
_BLOCK = 1 << 20
_NEVER = (".tmp", ".lock", "-wal", "-shm", "-journal", ".generation")


@dataclass(frozen=True, slots=True)
class HomeLayout:
    """The parts of a home that are backed up. Paths are relative to the home.

    Attributes:
        database: names the objects
        objects: folder of the objects
        databases: other databases
        left_out: files and folders that are recreated, or secrets that are backed up elsewhere
        referenced: returns the digests that a copy of the database names
        place: returns the path of an object in its folder
        strip: deletes rows that no backup may contain from a copy of the database
    """

    side: str
    database: str
    objects: str
    databases: tuple[str, ...]
    left_out: tuple[str, ...]
    referenced: Callable[[Path], Collection[str]]
    place: Callable[[str], str]
    strip: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class BackupContents:
    """Content of `backup.json`. files: BLAKE3 by path   at: Unix time."""

    format: int
    side: str
    software: str
    at: float
    files: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> BackupContents:
        """Read `backup.json` of a folder; raises StateError (E-STATE-25) unless it is a finished backup."""
        if (left := unfinished.marker_of(folder)) is not None:
            raise _unusable(folder, f"one that was interrupted ({left.again})")
        file = folder / FILE
        try:
            if not file.is_file() or (size := file.stat().st_size) > _MAX_BYTES:
                raise _unusable(folder, f"no file {FILE} of at most {_MAX_BYTES} bytes")
            with file.open("rb") as opened:
                contents = structure(cls, parse_json(opened.read(size).decode("utf-8")), FILE)
        except (OSError, ValueError, ConversionError) as error:
            raise _unusable(folder, f"no readable {FILE} ({type(error).__name__})") from error
        if contents.format != FORMAT:
            raise _unusable(folder, f"one of format {contents.format}")
        if not 0 <= contents.at <= _LATEST:
            raise _unusable(folder, f"one with an invalid time ({contents.at:g})")
        return contents


def back_up(home: Path, layout: HomeLayout, target: Path, software: str, at: float) -> BackupContents:
    """Copy a home into a new or empty folder, mode 0700; on the disk on return.

    Raises ConfigError (E-CFG-02) on any other folder; StateError: E-STATE-63 on a damaged or missing object, E-STATE-44
    without a home; UnavailableError (E-STATE-63) on a full disk.
    Guarantees: the backup is the home at one moment between two transactions. After an error the folder is empty again;
    the same command can be repeated after an error or a crash.
    """
    unfinished.require_finished(home)
    if not (home / layout.database).exists():
        raise StateError("E-STATE-44", f"there is no {layout.database} in {home}: name the home with --home")
    command = f"{layout.side} backup"
    _require_empty(target)
    marker = UnfinishedMarker(command, shlex.join([*command.split(), str(target), "--home", str(home)]))
    with disk_errors(target), unfinished.filling(target, marker, lambda: _empty(target)), _scratch(home) as scratch:
        _link_objects(home, layout, target, scratch)
        for name in layout.databases:
            if (home / name).exists():
                _copy_database(home / name, target / name)
        for file in _files(home, layout):
            _copy(file, target / file.relative_to(home))
        for object in scratch.iterdir():
            if _copy(object, target / layout.objects / layout.place(object.name)) != object.name:
                raise StateError(
                    "E-STATE-63",
                    f"the object {object.name[:16]} in {home / layout.objects} is damaged: this backup is not finished",
                )
        files = {str(f.relative_to(target)): file_digest(f) for f in sorted(target.rglob("*")) if f.is_file()}
        del files[unfinished.FILE]
        made = BackupContents(FORMAT, layout.side, software, at, files)
        fields = {name: getattr(made, name) for name in ("format", "side", "software", "at", "files")}
        replace_file(target / FILE, json.dumps(fields, indent=1).encode(), 0o600)
    return made


@contextmanager
def restoring(backup: Path, home: Path, layout: HomeLayout) -> Iterator[BackupContents]:
    """Restore a backup into a new or empty home, with a new incarnation of its database.

    Only this process can use the home inside the block; other processes can once the block ends without an error.

    Raises StateError: E-STATE-25 on a folder that is not a backup of this side or was changed, before anything is
    written; E-STATE-20, E-STATE-26 as `unfinished.filling`; ConfigError (E-CFG-02) if the home is not empty.
    Guarantees: after an interruption the home is refused until the same backup is restored again, which continues.
    """
    contents = BackupContents.read(backup)
    if contents.side != layout.side:
        raise _unusable(backup, f"one of a {contents.side}")
    if layout.database not in contents.files or not all(_is_inside(name) for name in contents.files):
        raise _unusable(backup, "one with unexpected file names")
    for name, expected in contents.files.items():
        if not (backup / name).is_file() or file_digest(backup / name) != expected:
            raise _unusable(backup, f"{name} damaged or missing")
    command = f"{layout.side} restore"
    _require_empty(home)
    again = shlex.join([*command.split(), str(backup), "--home", str(home)])
    with unfinished.filling(home, UnfinishedMarker(command, again, digest((backup / FILE).read_bytes()))):
        with disk_errors(home):
            _copy_missing(backup, home, layout, contents.files)
        yield contents


def _copy_missing(backup: Path, home: Path, layout: HomeLayout, files: dict[str, str]) -> None:
    """Copy missing files into a home; complete files of an interrupted restore stay."""
    for name in (layout.database, *layout.databases):
        for end in ("", "-wal", "-shm", "-journal", ".generation"):
            (home / f"{name}{end}").unlink(missing_ok=True)
    for name, expected in files.items():
        if name != layout.database and not ((home / name).is_file() and file_digest(home / name) == expected):
            _copy_again(backup, name, expected, home / name)
    aside = home / f".{layout.database}.tmp"
    _copy_again(backup, layout.database, files[layout.database], aside)
    with closing(sqlite3.connect(aside, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = DELETE")  # a single file, to be renamed
        now = begin_incarnation(db, 0)
    GenerationFile(home / layout.database).replace(now)
    aside.replace(home / layout.database)
    sync_path(home)


def _copy_again(backup: Path, name: str, expected: str, target: Path) -> None:
    target.unlink(missing_ok=True)
    if _copy(backup / name, target) != expected:
        raise _unusable(backup, f"{name} changed meanwhile")


def _empty(folder: Path) -> None:
    """Delete the contents of a folder, except the marker."""
    for child in folder.iterdir():
        if child.name != unfinished.FILE:
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def _link_objects(home: Path, layout: HomeLayout, target: Path, scratch: Path) -> None:
    """Copy the database, and hard-link the objects that the copy names into `scratch`, a folder of the home."""
    missing = ""
    for _ in range(_TRIES):
        copy = target / layout.database
        for file in target.glob(f"{layout.database}*"):
            file.unlink()
        _copy_database(home / layout.database, copy)
        with closing(sqlite3.connect(copy)) as db:
            generation = generation_of(db)
        if generation is not None:
            GenerationFile(copy).replace(generation)
        layout.strip(copy)
        needed = set(layout.referenced(copy))
        try:
            for digest in needed:
                if not (scratch / digest).exists():
                    missing = digest
                    _link_or_copy(home / layout.objects / layout.place(digest), scratch / digest)
        except FileNotFoundError:
            continue  # deleted when a round was closed: the next copy of the database does not name it
        for file in scratch.iterdir():
            if file.name not in needed:
                file.unlink()
        GenerationFile(copy).path.unlink(missing_ok=True)  # a restore creates a new one
        return
    raise StateError("E-STATE-63", f"the object {missing[:16]} is missing in {home / layout.objects}: restore it first")


def _link_or_copy(file: Path, name: Path) -> None:
    try:
        os.link(file, name)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        _copy(file, name)


@contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """Create a temporary folder in the home; delete those that a crash left."""
    for left in home.glob(".backup-*.tmp"):
        shutil.rmtree(left)
    folder = home / f".backup-{secrets.token_hex(8)}.tmp"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _files(home: Path, layout: HomeLayout) -> Iterator[Path]:
    """Yield the files of a home that are copied as they are."""
    apart = {layout.database, layout.objects, *layout.databases, *layout.left_out}
    for file in sorted(home.rglob("*")):
        path = file.relative_to(home)
        around = {str(path), *map(str, path.parents)}
        passing = any(part.endswith(_NEVER) for part in path.parts)
        if file.is_file() and not file.is_symlink() and not passing and not apart & around:
            yield file


def _copy_database(source: Path, target: Path) -> None:
    _private_folder(target.parent)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
    with (
        closing(sqlite3.connect(source, timeout=BUSY_SECONDS)) as live,
        closing(sqlite3.connect(target)) as copy,
    ):
        live.backup(copy)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> str:
    """Copy a file, mode 0600, and sync it; return the digest of the bytes read."""
    _private_folder(target.parent)
    hasher = Hasher()
    descriptor = os.open(target, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with source.open("rb") as reader, os.fdopen(descriptor, "wb", buffering=0) as writer:
        while block := reader.read(_BLOCK):
            hasher.update(block)
            write_all(writer, block)
        os.fsync(writer.fileno())
    return hasher.hexdigest()


def _private_folder(folder: Path) -> None:
    """Create a folder and its parents, mode 0700."""
    for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def _is_inside(name: str) -> bool:
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _require_empty(folder: Path) -> None:
    """Raise ConfigError (E-CFG-02) unless a folder is new, empty, or marked as unfinished."""
    _private_folder(folder)
    if unfinished.marker_of(folder) is None and not unfinished.is_empty(folder):
        raise ConfigError("E-CFG-02", f"expected a new or empty folder, found files in {folder}: choose another")
    folder.chmod(0o700)


def _unusable(folder: Path, problem: str) -> StateError:
    return StateError("E-STATE-25", f"expected a finished backup in {folder}, found {problem}: take another backup")
