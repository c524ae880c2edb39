"""Objects that every silo of a cohort fetches, read and packed into messages once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from protos.chunks import Chunk, read_chunks

MOST = 256 << 20
"""Bytes of packed objects that are kept at most; a larger object is read for each silo."""


class PackedChunk(NamedTuple):
    """A chunk as it travels. end: offset of the first byte after it."""

    message: bytes
    end: int

    def pack(self) -> bytes:
        """Return the message, which was written before."""
        return self.message

    @classmethod
    def of(cls, chunk: Chunk) -> PackedChunk:
        """Write the message."""
        return cls(chunk.pack(), chunk.offset + len(chunk.data))


@dataclass(slots=True)
class _Object:
    """The messages of an object so far, and where the next ones come from."""

    size: int
    source: Iterator[Chunk]
    messages: list[PackedChunk] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, place: int) -> PackedChunk | None:
        """Return a message, made when it is first asked for; None after the last."""
        with self.lock:
            if place == len(self.messages) and (chunk := next(self.source, None)) is not None:
                self.messages.append(PackedChunk.of(chunk))
            if place < len(self.messages):
                return self.messages[place]
            if not self.messages or self.messages[-1].end < self.size:  # reading it failed before
                raise FileNotFoundError("an object that could not be read to its end")
            return None


class Packed:
    """Messages of whole objects, made when they are first sent. Calls may come from several threads.

    Guarantees: the messages are those of `read_chunks`; no more than `most` bytes of objects are kept.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: dict[str, _Object] = {}

    def chunks(self, file: Path, digest: str, offset: int = 0, shared: bool = True) -> Iterator[PackedChunk]:
        """Give an object's messages from `offset` on. shared: others will ask for them, so keep them, if from 0 on.

        Raises FileNotFoundError when the object is not there, or no longer.
        """
        if offset or not shared or (found := self._object(file, digest)) is None:
            yield from map(PackedChunk.of, read_chunks(file, digest, offset))
            return
        place = 0
        try:
            while (message := found.at(place)) is not None:
                yield message
                place += 1
        except OSError:
            self.forget(digest)
            raise

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._kept.clear()

    def forget(self, digest: str) -> None:
        """Keep an object no longer."""
        with self._lock:
            self._kept.pop(digest, None)

    def kept(self) -> int:
        """Count the bytes of objects that are kept."""
        with self._lock:
            return sum(found.size for found in self._kept.values())

    def _object(self, file: Path, digest: str) -> _Object | None:
        size = file.stat().st_size
        if size > self._most:
            return None
        with self._lock:
            if digest not in self._kept:
                while sum(found.size for found in self._kept.values()) + size > self._most:
                    del self._kept[next(iter(self._kept))]  # that which was kept longest
                self._kept[digest] = _Object(size, read_chunks(file, digest, 0))
            return self._kept[digest]
