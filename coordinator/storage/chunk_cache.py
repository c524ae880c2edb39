"""Objects that every silo of a cohort fetches, read and packed into messages once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from protos.wire.chunks import PackedChunk, read_chunks

MOST = 256 << 20
"""Bytes of packed objects that are kept at most; a larger object is read for each silo."""


@dataclass(slots=True)
class _Object:
    """The messages of an object so far, and where the next ones come from."""

    size: int
    source: Iterator[PackedChunk]
    readers: int
    end: int = 0
    messages: list[PackedChunk | None] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, place: int) -> PackedChunk | None:
        """Return a message, made when it is first asked for and dropped when the last reader has it; None at the end.

        Raises LookupError for a message that was dropped.
        """
        with self.lock:
            if place == len(self.messages) and (chunk := next(self.source, None)) is not None:
                self.messages.append(chunk)
                self.given.append(0)
                self.end = chunk.end
            if place == len(self.messages):
                if not place or self.end < self.size:  # reading it failed before
                    raise FileNotFoundError("an object that could not be read to its end")
                return None
            if (message := self.messages[place]) is None:
                raise LookupError(place)
            self.given[place] += 1
            if self.given[place] >= self.readers:
                self.messages[place] = None
            return message

    def kept(self) -> int:
        with self.lock:
            return sum(len(message.message) for message in self.messages if message is not None)


class Packed:
    """Messages of whole objects, made when they are first sent. Calls may come from several threads.

    Guarantees: the messages are those of `read_chunks`; only of objects that several will fetch some are kept, each
    until so many have it, and of no more than `most` bytes of objects.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._readers: dict[str, int] = {}
        self._kept: dict[str, _Object] = {}

    def expect(self, digest: str, readers: int) -> None:
        """Be told that so many will fetch an object, about now. What one of them fetches again is read again."""
        with self._lock:
            self._readers[digest] = readers

    def chunks(self, file: Path, digest: str, offset: int = 0, expected: bool = True) -> Iterator[PackedChunk]:
        """Give an object's messages from `offset` on. expected: to one of those that were expected.

        Raises FileNotFoundError when the object is not there, or no longer.
        """
        found = None if offset or not expected else self._object(file, digest)
        place = 0
        try:
            while found is not None and (message := found.at(place)) is not None:
                yield message
                place, offset = place + 1, message.end
        except LookupError:  # more came than were expected
            found = None
        except OSError:
            self.forget(digest)
            raise
        if found is None:
            yield from read_chunks(file, digest, offset)

    def clear(self) -> None:
        """Keep nothing, and expect nobody."""
        with self._lock:
            self._readers.clear()
            self._kept.clear()

    def forget(self, digest: str) -> None:
        """Keep an object no longer."""
        with self._lock:
            self._readers.pop(digest, None)
            self._kept.pop(digest, None)

    def kept(self) -> int:
        """Count the bytes of messages that are kept."""
        with self._lock:
            return sum(found.kept() for found in self._kept.values())

    def _object(self, file: Path, digest: str) -> _Object | None:
        size = file.stat().st_size
        with self._lock:
            if size > self._most or self._readers.get(digest, 0) < 2:
                return None
            if digest not in self._kept:
                while sum(found.size for found in self._kept.values()) + size > self._most:
                    del self._kept[next(iter(self._kept))]  # that which was kept longest
                self._kept[digest] = _Object(size, read_chunks(file, digest, 0), self._readers[digest])
            return self._kept[digest]
