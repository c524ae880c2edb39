"""Decoding many image files with all cores, and a bounded cache of the results."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fl_core.datasets.decoding.dicom import Window
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import open_image
from fl_core.errors import ConfigError

log = logging.getLogger(__name__)

CACHE_BYTES = 4 << 30
"""Default size of the cache: 28,000 squares of 224 pixels."""
RESERVE_BYTES = 2 << 30
"""Disk space that the cache leaves free."""
_BYTES, _FOLDER = "CONSILIUM_IMAGE_CACHE_BYTES", "CONSILIUM_IMAGE_CACHE_FOLDER"
_LOOK_EVERY = 64 << 20

Pixels = NDArray[np.uint8]


class SquareKey(NamedTuple):
    """One state of one file, and the square made from it. changed_ns: ctime, which programs cannot set."""

    path: str
    bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> SquareKey | None:
        """Stat a file without reading it; None if that fails."""
        try:
            status = path.stat()
        except (OSError, ValueError):
            return None
        return cls(str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


class ImageFormat(NamedTuple):
    """The format of a square: its side in pixels, and the window of DICOM's grey values."""

    side: int
    window: Window | None = None


class _CacheFile:
    """The squares of one format, in a file without a name."""

    def __init__(self, folder: Path | None) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives as long as the loader
        self.place: dict[SquareKey, int] = {}
        self.size = 0


class ImageLoader:
    """Decodes files to squares with one thread per core, and caches the squares in a temporary file. Thread-safe.

    folder: of that file, by default the system's for temporary files   cache_bytes: size limit, 0: no cache
    threads: 0 for as many as this process has cores
    Guarantees: the file has no name and mode 0600, so no other user opens it, and it disappears when the process ends
    in any way; neither cache nor threads change a bit of a result; a changed file is decoded again; a full disk ends
    only the caching. Pillow decodes without Python's lock, so threads help.
    """

    def __init__(self, folder: Path | None = None, cache_bytes: int = CACHE_BYTES, threads: int = 0) -> None:
        self.folder, self.cache_bytes, self.threads = folder, cache_bytes, threads or cores()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        self._lock = Lock()
        self._shelves: OrderedDict[ImageFormat, _CacheFile] = OrderedDict()
        self._unchecked = _LOOK_EVERY
        self._stopped = cache_bytes <= 0

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the settings."""
        return ImageLoader, (self.folder, self.cache_bytes, self.threads)

    @property
    def kept_bytes(self) -> int:
        return sum(shelf.size for shelf in self._shelves.values())

    def forget(self) -> None:
        """Clear the cache."""
        with self._lock:
            for shelf in self._shelves.values():
                shelf.file.close()
            self._shelves.clear()

    def squares(self, wanted: Sequence[tuple[Path, SquareKey | None]], form: ImageFormat) -> Pixels:
        """Return (B, side, side, 3), in the order of `wanted`; raises UnreadableError with its path."""
        out = np.empty((len(wanted), form.side, form.side, 3), dtype=np.uint8)
        missing = [k for k, (_, key) in enumerate(wanted) if not self._look_up(key, form, out[k])]
        first: dict[tuple[Path, SquareKey | None], int] = {}
        for k in missing:
            first.setdefault(wanted[k], k)

        def read(k: int) -> None:
            path, key = wanted[k]
            try:
                out[k] = square(path, form)
            except UnreadableError as error:
                error.path = path
                raise
            self._keep(key, form, out[k])

        for future in [self._pool.submit(read, k) for k in first.values()]:
            future.result()
        for k in missing:
            if first[wanted[k]] != k:
                out[k] = out[first[wanted[k]]]
        return out

    def _look_up(self, key: SquareKey | None, form: ImageFormat, out: Pixels) -> bool:
        if key is None or (self._stopped and not self._shelves):
            return False
        with self._lock:
            shelf = self._shelves.get(form)
            place = None if shelf is None else shelf.place.get(key)
            if shelf is None or place is None:
                return False
            self._shelves.move_to_end(form)
            raw = os.pread(shelf.file.fileno(), out.nbytes, place)
        if len(raw) != out.nbytes:
            return False
        out[...] = np.frombuffer(raw, np.uint8).reshape(out.shape)
        return True

    def _keep(self, key: SquareKey | None, form: ImageFormat, pixels: Pixels) -> None:
        if key is None or self._stopped:
            return
        with self._lock:
            if self._stopped or not self._make_room(pixels.nbytes, form):
                return
            try:
                shelf = self._shelves.get(form) or _CacheFile(self.folder)
                self._shelves[form] = shelf
                if key in shelf.place or os.pwrite(shelf.file.fileno(), pixels.tobytes(), shelf.size) < pixels.nbytes:
                    return
            except OSError as error:
                self._stopped = True
                log.warning("decoded images are no longer cached: %s", error.strerror)
                return
            shelf.place[key] = shelf.size
            shelf.size += pixels.nbytes

    def _make_room(self, size: int, form: ImageFormat) -> bool:
        """Make room by dropping squares of other formats, the least recently used first; False if there is none."""
        while self.kept_bytes + size > self.cache_bytes:
            oldest = next(iter(self._shelves), form)
            if oldest == form:
                return False
            self._shelves.pop(oldest).file.close()
        self._unchecked += size
        if self._unchecked >= _LOOK_EVERY:
            self._unchecked = 0
            if shutil.disk_usage(self.folder or tempfile.gettempdir()).free < RESERVE_BYTES:
                self._stopped = True
                log.warning("decoded images are no longer cached: less than 2 GiB of disk are free")
                return False
        return True


def square(path: Path, form: ImageFormat) -> Pixels:
    """Decode a file to its central square (side, side, 3), resized; its side is the image's shorter one."""
    return resized(open_image(path, form.window), form.side)


def resized(image: Image.Image, side: int) -> Pixels:
    """Resize the central square of an image in RGB to (side, side, 3)."""
    return np.array(ImageOps.fit(image, (side, side), method=Image.Resampling.BILINEAR))


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def shared_loader() -> ImageLoader:
    """Return the default loader: one for the whole process, so that a simulation decodes once.

    CONSILIUM_IMAGE_CACHE_BYTES (0: off) and CONSILIUM_IMAGE_CACHE_FOLDER set its size and its folder; raises
    ConfigError (E-CFG-02) unless they are a whole number and a folder.
    """
    text, folder = os.environ.get(_BYTES, str(CACHE_BYTES)), os.environ.get(_FOLDER)
    if not text.isdecimal():
        raise ConfigError("E-CFG-02", f"expected a whole number of bytes in {_BYTES}, found {text[:40]!r}: correct it")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError("E-CFG-02", f"expected a folder in {_FOLDER}, found {folder!r}: make it")
    return ImageLoader(None if folder is None else Path(folder), int(text))
