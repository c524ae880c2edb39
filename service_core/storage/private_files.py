"""Files readable only by their owner, atomic replacement, and folder locks.

A key has mode 0600 from the first byte, is written atomically, and is not used if others can read it.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from fl_core.errors import StateError
from service_core.storage.disk import disk_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
OTHERS = 0o077


class Credentials(NamedTuple):
    """A private key, the certificate that goes with it and the authority that signed it, all PEM.

    Guarantees: the repr, and so logs and tracebacks, hides the key.
    """

    key_pem: bytes
    cert_pem: bytes
    ca_pem: bytes

    def __repr__(self) -> str:
        return "Credentials(<private key hidden>)"


def private_folder(folder: Path) -> Path:
    """Create a folder and its parents, mode 0700; raises StateError (E-STATE-42) if others can enter it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & OTHERS:
        raise StateError(
            "E-STATE-42",
            f"expected the folder of private keys {folder} to be open to its owner alone, found mode "
            f"{stat.S_IMODE(folder.stat().st_mode):04o}; run: chmod 700 {shlex.quote(str(folder))}",
        )
    return folder


def restrict_to_owner(path: Path) -> None:
    """Remove all permissions of other users from a file or folder, if it exists, and log it.

    Raises StateError (E-STATE-42) if this user may not change it.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & OTHERS:
            path.chmod(mode & ~OTHERS)
            log.warning("tightened permissions of %s: mode was %04o, now only the owner has access", path, mode)
    except FileNotFoundError:
        return
    except PermissionError:
        raise StateError(
            "E-STATE-42",
            f"expected {path} to be accessible only to its owner, found mode {mode:04o} and another owner, who must "
            f"run: chmod go= {shlex.quote(str(path))}",
        ) from None


def private_home(folder: Path) -> Path:
    """Create a service's home, and restrict it and the databases in it to the owner."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    restrict_to_owner(folder)
    for pattern in ("*.db", "*.db-*", "*.sqlite", "*.sqlite-*"):
        for path in folder.glob(pattern):
            restrict_to_owner(path)
    return folder


class FolderLock:
    """Exclusive use of a folder until the lock is closed or the process ends.

    The folder itself is locked, so the lock does not depend on a file that could be deleted. A file in it, which holds
    the process id, is locked too: earlier versions and other machines on a network share look at it.
    """

    def __init__(self, folder: Path, name: str, whose: str) -> None:
        """Lock a folder; raises StateError (E-STATE-20) if another process holds it.

        name: of the file; empty: without one   whose: description of the other process, for the message
        """
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file = -1
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if name:
                self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            process = ""
            with suppress(OSError, ValueError):
                process = f" (process {int((folder / name).read_text())})"
            raise StateError(
                "E-STATE-20",
                f"expected {folder} to be free, found {whose} running in it{process}: stop it, or choose another "
                "folder",
            ) from None
        except BaseException:
            self._release()
            raise
        self._note(str(os.getpid()))

    @staticmethod
    def is_held(folder: Path, name: str) -> bool:
        """Return whether a process holds the lock of a folder."""
        for path in (folder, folder / name):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
        return False

    def close(self) -> None:
        """Release the folder; may be called twice."""
        if self._file >= 0:
            self._note("")
        self._release()

    def _release(self) -> None:
        for descriptor in (self._file, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._folder = -1

    def _note(self, process: str) -> None:
        with suppress(OSError):  # a full disk: the process id is only information
            os.truncate(self._file, 0)
            os.pwrite(self._file, process.encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically, mode 0600, in a folder that only its owner can enter.

    Guarantees: others can never read a byte of `data`; after a crash the file has its old or its new content.
    """
    private_folder(path.parent)
    replace_file(path, data, 0o600)


def write_public(path: Path, data: bytes) -> None:
    """Replace a file atomically, mode 0644: for certificates and other files without secrets."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, data, 0o644)


def write_figure(path: Path, figure: Figure) -> None:
    """Write a matplotlib figure as PNG, as `write_public` does."""
    write_public(path, png(figure))


def png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    return picture.getvalue()


def read_private(path: Path, what: str = "private key") -> bytes:
    """Read a private file. what: description of its content, for the message.

    Raises StateError if it is missing (E-STATE-43) or others can read it (E-STATE-42).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StateError("E-STATE-43", f"cannot open the {what} file {path} ({error.strerror})") from None
    with os.fdopen(fd, "rb") as file:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & OTHERS:
            raise StateError(
                "E-STATE-42",
                f"expected {path} to be readable by its owner alone, found mode {mode:04o}: others on this machine "
                f"may have read the {what}. Run: chmod 600 {shlex.quote(str(path))} , and replace it if that matters",
            )
        return file.read()


def remove(path: Path) -> None:
    """Delete a file if it exists, and sync its folder."""
    if path.exists():
        path.unlink()
        sync_path(path.parent)


@contextmanager
def write_files_together(folder: Path, name: str, last: str) -> Iterator[Path]:
    """Yield a temporary folder whose files move into `folder` when the block ends, `last` as the last one.

    Files that an interrupted call of this name left are deleted, and this is logged. Raises UnavailableError
    (E-STATE-63) on a full disk. Guarantees: every file is complete or absent.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{name}.tmp"
        if aside.exists():
            log.warning("removed %s, which an interrupted command left; its files are written again", aside)
            shutil.rmtree(aside)
        aside.mkdir(mode=0o700)
        try:
            yield aside
            for file in sorted(aside.iterdir(), key=lambda file: file.name == last):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                file.replace(folder / file.name)
            sync_path(folder)
        finally:
            shutil.rmtree(aside)


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replace a file atomically and sync it; raises UnavailableError (E-STATE-63) on a full disk."""
    with disk_errors(path):
        _replace(path, data, mode)


def _replace(path: Path, data: bytes, mode: int) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)  # left by a crash; O_EXCL below refuses a link planted meanwhile
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Sync a file, or a folder's names; raises OSError if there is none."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
