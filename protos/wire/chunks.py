"""Objects in chunks of 2 MiB: the unit of sending and resuming. TLS and the object's name check them (ADR 0017).

`Chunk` is the message `consilium.v1.Chunk` of federation.proto. The protobuf library copies a field of bytes when it is
set, when it is written and each time it is read; these are nearly all bytes of a round, so this one message is written
and read here, with one copy and with none. https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import NamedTuple, Protocol

from fl_core.errors import ProtocolError
from protos.storage.file_recycling import open_shared

CHUNK_BYTES = 2 << 20
"""Bytes in a chunk: fewer cost more processor time per byte, more no longer fit a processor's cache."""
AHEAD_BYTES = 1 << 20
"""Bytes that a stream may send ahead of being read, whose estimate by gRPC grows to many MiB."""
MAX_MESSAGE_BYTES = 4 << 20
"""Both sides refuse larger messages: a bound against denial of service, far above a chunk."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT = 10
_OBJECT, _OFFSET, _DATA = 1, 2, 3
_TYPES = {_OBJECT: _LENGTH, _OFFSET: _VARINT, _DATA: _LENGTH}


class Chunk(NamedTuple):
    """A piece of an object, as it was read. object: its name, in the first chunk of a stream."""

    object: str = ""
    offset: int = 0
    data: bytes | memoryview = b""

    @classmethod
    def unpack(cls, message: bytes) -> Chunk:
        """Read the message; `data` is a view of it. Unknown fields are skipped, of a repeated one the last counts.

        Raises ValueError on what is no such message, as the protobuf library does.
        """
        view, at = memoryview(message), 0
        found: dict[int, int | memoryview] = {}
        while at < len(view):
            tag, at = _read_varint(view, at)
            number, kind = tag >> 3, tag & 7
            value, at = _read_value(view, at, kind)
            if _TYPES.get(number) == kind:
                found[number] = value
            elif not number:
                raise ValueError("a field of number 0")
        return cls(
            str(found.get(_OBJECT, b""), "utf-8"),  # type: ignore[arg-type]  # by `_TYPES` a view
            found.get(_OFFSET, 0),  # type: ignore[arg-type]  # by `_TYPES` a number
            found.get(_DATA, b""),  # type: ignore[arg-type]
        )


class PackedChunk(NamedTuple):
    """A chunk as it travels. offset, end: where its bytes begin in the object, and the first one after it."""

    message: bytes
    offset: int
    end: int

    def pack(self) -> bytes:
        """Return the message."""
        return self.message


def head(name: str, offset: int, size: int) -> bytes:
    """Write a message up to its data, of `size` bytes, byte for byte as the protobuf library does."""
    found = bytearray()
    if name:
        encoded = name.encode()
        found += _key(_OBJECT) + _varint(len(encoded)) + encoded
    if offset:
        found += _key(_OFFSET) + _varint(offset)
    if size:
        found += _key(_DATA) + _varint(size)
    return bytes(found)


def _key(number: int) -> bytes:
    return bytes([number << 3 | _TYPES[number]])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for i in range(min(_MOST_VARINT, len(view) - at)):
        byte = view[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value & (1 << 64) - 1, at + i + 1
    raise ValueError("a number without an end")


def _read_value(view: memoryview, at: int, kind: int) -> tuple[int | memoryview, int]:
    if kind == _VARINT:
        return _read_varint(view, at)
    if kind == _LENGTH:
        size, at = _read_varint(view, at)
    elif kind in (_FIXED32, _FIXED64):
        size = 4 if kind == _FIXED32 else 8
    else:
        raise ValueError(f"a field of the unknown type {kind}")
    if at + size > len(view):
        raise ValueError("a field that is longer than its message")
    raw = view[at : at + size]
    return (raw if kind == _LENGTH else int.from_bytes(raw, "little")), at + size


class Sink(Protocol):
    """Where chunks are appended to: a file, or one that is hashed on the way. `write` takes all of the bytes."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append."""
        ...


def read_chunks(path: Path, name: str, offset: int) -> Iterator[PackedChunk]:
    """Read a file from `offset` on; the first chunk carries `name`, and a finished object gives one empty chunk.

    Raises FileNotFoundError when the file is not there, or no longer; OSError when it cannot be read to its end.
    """
    with open_shared(path) as f:
        f.seek(offset)
        end = os.fstat(f.fileno()).st_size
        while True:
            size = max(0, min(CHUNK_BYTES, end - offset))
            yield PackedChunk(_read(f, head(name, offset, size), size), offset, offset + size)
            name, offset = "", offset + size
            if offset >= end:
                return


def _read(file: BufferedReader, start: bytes, size: int) -> bytes:
    """Read a message's data into its place: BytesIO gives its own buffer away, so that nothing is copied.

    bytes of joined parts would be made beside the parts: half of the time of this is new memory and copies then.
    """
    made = BytesIO()
    made.write(start)
    if size:
        made.seek(len(start) + size - 1)
        made.write(b"\0")
        with made.getbuffer() as room:
            if file.readinto(room[len(start) :]) != size:
                raise OSError(f"expected {size} more bytes in {file.name!r}, found its end")
    return made.getvalue()


def append_chunk(chunk: Chunk, into: Sink, have: int, most: int | None = None) -> int:
    """Append a chunk to an object of which `have` bytes are here, and return the new length. most: of the whole object.

    | chunk covers           | result                                          |
    |------------------------|-------------------------------------------------|
    | have ...               | appended                                        |
    | only bytes before have | ignored: a duplicate                            |
    | bytes across have      | the new bytes appended                          |
    | bytes after a gap      | ProtocolError E-WIRE-03, naming the offset due  |
    | bytes beyond `most`    | ProtocolError E-WIRE-11, nothing written        |
    """
    data = chunk.data
    if most is not None and chunk.offset + len(data) > most:
        raise ProtocolError("E-WIRE-11", f"expected the {most} bytes that were announced, found more")
    if len(data) > CHUNK_BYTES:
        raise ProtocolError("E-WIRE-09", f"expected chunks of at most {CHUNK_BYTES} bytes, found {len(data)}")
    if chunk.offset > have:
        raise ProtocolError("E-WIRE-03", f"expected the chunk at {have}, found the one at {chunk.offset}")
    if fresh := data[have - chunk.offset :]:
        into.write(fresh)
    return have + len(fresh)
