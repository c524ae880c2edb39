"""Cache of the features that a frozen body computes from the hospital's examples, kept across runs. Imports no torch.

A file has rows of float32 (m, d), a footer of JSON, its length, and a keyed BLAKE3 of everything before it, under a
secret of this home. Its name follows from the data and the body (`FeatureKey`), so another body, other preprocessing or
other data need another file. A file that was edited, truncated, copied from elsewhere or renamed is never used: it is
deleted and computed again.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from fl_core.errors import RefusedError
from service_core.storage import disk, private_files

log = logging.getLogger(__name__)
Rows = NDArray[np.float32]
DEFAULT_GIB = 4.0
"""Default size of the cache: 800,000 examples of 1,280 features."""
_MAC, _LENGTH, _MAX_FOOTER = 32, 8, 64 << 20
_BLOCK, _MAX_OPEN = 1 << 20, 16
_SECRET, _SUFFIX, _PART = "secret", ".rows", ".part"


@dataclass(frozen=True, slots=True)
class FeatureKey:
    """Everything that determines the features of a split.

    origin: reference of the data   data: their version   request: the run's classes, image size and window
    split: of the data   maker: JSON of the body, its software and the kind of device.
    """

    origin: str
    data: str
    request: str
    split: str
    maker: str

    @property
    def name(self) -> str:
        return blake3(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:40]


class Block(NamedTuple):
    """Rows of features, and the positions of their examples."""

    positions: list[int]
    rows: Rows


class KeptFeatures(NamedTuple):
    """Features (m, d) of n examples, read from the file on access.

    left_out: positions of the n - m examples without features.
    """

    rows: Rows
    left_out: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file as `silo doctor` shows it. sound: whether its name and keyed digest are right."""

    path: Path
    size: int
    examples: int
    left_out: int
    sound: bool


class _Footer(NamedTuple):
    key: FeatureKey
    n: int
    width: int
    left_out: tuple[int, ...]


class _Status(NamedTuple):
    """The file system's status of an open file. Any write changes it, since programs cannot set ctime."""

    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, fd: int) -> _Status:
        status = os.fstat(fd)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class FeatureCache:
    """Files of features in a folder of the home that only its owner may enter, limited in total size.

    Guarantees: files have mode 0600; memory does not grow with the number of examples; a file is complete or absent,
    also after a crash; the least recently used files make room for new ones.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._open: dict[str, tuple[int, _Status, KeptFeatures]] = {}

    def get(self, key: FeatureKey, n: int, make: Callable[[], Iterator[Block]]) -> KeptFeatures:
        """Return the features of n examples, from the file or else from `make`, which yields them in order.

        Before computing, deletes files of other versions of the same data. Raises RefusedError (E-RUN-38) if there is
        no room, UnavailableError (E-STATE-63) if the disk cannot be written, and errors of `make`; then no file is
        kept.
        """
        private_files.private_folder(self.folder)
        kept = self._kept_open(key) or self._from_file(key, n)
        if kept is not None:
            return kept
        self._delete(lambda of: (of.origin, of.request) == (key.origin, key.request) and of.data != key.data)
        made = self._write(key, n, make())
        with disk.disk_errors(self.folder):
            made.replace(self._path(key))
        private_files.sync_path(self.folder)
        kept = self._from_file(key, n)
        assert kept is not None
        return kept

    def require_room(self, examples: float, width: int) -> None:
        """Raise RefusedError (E-RUN-38) if features of so many examples can never fit."""
        if examples * width * 4 > self.max_bytes:
            raise _too_large()

    def forget(self, but: str = "") -> None:
        """Delete all files. but: reference of data whose files stay. Features in use stay readable."""
        self.close()
        if self.folder.is_dir():
            self._delete(lambda kept: kept.origin != but)

    def close(self) -> None:
        for fd, _, _ in self._open.values():
            os.close(fd)
        self._open.clear()

    def files(self) -> list[KeptFile]:
        """List the files, each checked against its digest."""
        kept_files, secret = list[KeptFile](), self._read_secret()
        for path in self._paths():
            with suppress(FileNotFoundError), path.open("rb") as file:
                fd = file.fileno()
                size, footer = os.fstat(fd).st_size, _footer(fd)
                if footer is None:
                    kept_files.append(KeptFile(path, size, 0, 0, False))
                    continue
                sound = footer.key.name == path.stem and secret is not None and _is_sound(fd, secret)
                kept_files.append(KeptFile(path, size, footer.n, len(footer.left_out), sound))
        return kept_files

    # ---- files -----------------------------------------------------------------------------------------------------

    def _path(self, key: FeatureKey) -> Path:
        return self.folder / f"{key.name}{_SUFFIX}"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{_SUFFIX}")) if self.folder.is_dir() else []

    def _secret(self) -> bytes:
        secret = self._read_secret()
        if secret is None:
            secret = secrets.token_bytes(32)
            private_files.write_private(self.folder / _SECRET, secret)
        return secret

    def _read_secret(self) -> bytes | None:
        with suppress(OSError):
            secret = (self.folder / _SECRET).read_bytes()
            return secret if len(secret) == 32 else None
        return None

    def _kept_open(self, key: FeatureKey) -> KeptFeatures | None:
        """Return features that were verified before, unless the file was written to since."""
        if key.name not in self._open:
            return None
        fd, status, kept = self._open[key.name]
        if _Status.of(fd) == status:
            return kept
        os.close(fd)
        del self._open[key.name]
        return None

    def _from_file(self, key: FeatureKey, n: int) -> KeptFeatures | None:
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        with suppress(OSError):
            os.utime(fd)  # marks it as recently used
        status, footer = _Status.of(fd), _footer(fd)
        if footer is None or (footer.key, footer.n) != (key, n) or not _is_sound(fd, self._secret()):
            log.warning("%s is damaged: computing these features again", path)
            os.close(fd)
            path.unlink(missing_ok=True)
            return None
        rows = np.zeros((n - len(footer.left_out), footer.width), dtype=np.float32)
        if rows.size:
            with os.fdopen(fd, "rb", closefd=False) as file:  # pages are read on access
                rows = np.memmap(file, dtype="<f4", mode="c", shape=rows.shape)
        kept = KeptFeatures(rows, footer.left_out)
        if len(self._open) >= _MAX_OPEN:
            os.close(self._open.pop(next(iter(self._open)))[0])
        self._open[key.name] = fd, status, kept
        return kept

    def _write(self, key: FeatureKey, n: int, blocks: Iterator[Block]) -> Path:
        for left in self.folder.glob(f"*{_PART}"):  # left by a crash
            left.unlink()
        part, hasher = self._path(key).with_suffix(_PART), blake3(key=self._secret())
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:

                def write(data: bytes) -> None:
                    with disk.disk_errors(part):
                        file.write(data)
                    hasher.update(data)

                width, following, left_out = 0, 0, list[int]()
                for block in blocks:
                    if not width:
                        width = block.rows.shape[1]
                        self._make_room(key, n * width * 4)
                    write(block.rows.astype("<f4").tobytes())
                    for position in block.positions:
                        left_out += range(following, position)
                        following = position + 1
                left_out += range(following, n)
                footer = {"key": asdict(key), "n": n, "width": width, "left_out": left_out}
                text = json.dumps(footer).encode()
                write(text + len(text).to_bytes(_LENGTH, "little"))
                with disk.disk_errors(part):
                    file.write(hasher.digest())
                    file.flush()
                    os.fsync(fd)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return part

    def _make_room(self, key: FeatureKey, size: int) -> None:
        """Delete the least recently used files, but not the other split of the same data made by the same body."""
        others = {path: path.stat() for path in self._paths()}
        left = self.max_bytes - size - sum(status.st_size for status in others.values())
        for path, status in sorted(others.items(), key=lambda item: item[1].st_mtime_ns):
            if left >= 0:
                break
            footer = _read_footer(path)
            if footer is not None and (footer.key.data, footer.key.maker) == (key.data, key.maker):
                continue
            path.unlink(missing_ok=True)
            left += status.st_size
        if left < 0:
            raise _too_large()
        if size > disk.available(self.folder):
            raise RefusedError(
                "E-RUN-38", "the disk has no room for the features of this hospital's examples: free some"
            )

    def _delete(self, unwanted: Callable[[FeatureKey], bool]) -> None:
        for path in self._paths():
            footer = _read_footer(path)
            if footer is None or unwanted(footer.key):
                path.unlink(missing_ok=True)


def _too_large() -> RefusedError:
    return RefusedError(
        "E-RUN-38",
        "the features of this hospital's examples do not fit into its feature cache: serve with a larger "
        "--feature-cache, or choose a body with fewer features",
    )


def _read_footer(path: Path) -> _Footer | None:
    try:
        with path.open("rb") as file:
            return _footer(file.fileno())
    except OSError:
        return None


def _footer(fd: int) -> _Footer | None:
    """Read a file's footer; None if it is malformed. Do not trust it before `_is_sound`."""
    size = os.fstat(fd).st_size
    at = size - _MAC - _LENGTH
    if at < 0:
        return None
    length = int.from_bytes(os.pread(fd, _LENGTH, at), "little")
    if not 0 < length <= min(at, _MAX_FOOTER):
        return None
    try:
        raw = json.loads(os.pread(fd, length, at - length))
        footer = _Footer(FeatureKey(**raw["key"]), raw["n"], raw["width"], tuple(raw["left_out"]))
        whole = (footer.n - len(footer.left_out)) * footer.width * 4 == at - length
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return footer if whole else None


def _is_sound(fd: int, secret: bytes) -> bool:
    hasher, at, end = blake3(key=secret), 0, os.fstat(fd).st_size - _MAC
    while at < end and (block := os.pread(fd, min(_BLOCK, end - at), at)):
        hasher.update(block)
        at += len(block)
    return at == end and secrets.compare_digest(hasher.digest(), os.pread(fd, _MAC, end))
