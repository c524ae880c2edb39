"""Objects in chunks of 2 MiB, each with a CRC-32C: the unit of sending, checking and resuming.

`Chunk` is the message `consilium.v1.Chunk` of federation.proto. The protobuf library copies a field of bytes when it is
set, when it is written and each time it is read; these are nearly all bytes of a round, so this one message is written
and read here, with one copy and with none. https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np

from fl_core.errors import ProtocolError
from protos.spares import open_shared

CHUNK_BYTES = 2 << 20
"""Bytes in a chunk: fewer cost more processor time per byte, more no longer fit a processor's cache."""
AHEAD_BYTES = 1 << 20
"""Bytes that a stream may send ahead of being read, whose estimate by gRPC grows to many MiB."""
MAX_MESSAGE_BYTES = 4 << 20
"""Both sides refuse larger messages: a bound against denial of service, far above a chunk."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT = 10
_OBJECT, _OFFSET, _DATA, _CRC = 1, 2, 3, 4
_TYPES = {_OBJECT: _LENGTH, _OFFSET: _VARINT, _DATA: _LENGTH, _CRC: _FIXED32}


class Chunk(NamedTuple):
    """A piece of an object. object: its name, in the first chunk of a stream; crc32c: of `data`."""

    object: str = ""
    offset: int = 0
    data: bytes | memoryview = b""
    crc32c: int = 0

    def pack(self) -> bytes:
        """Write the message, byte for byte as the protobuf library does."""
        head = bytearray()
        if self.object:
            name = self.object.encode()
            head += _key(_OBJECT) + _varint(len(name)) + name
        if self.offset:
            head += _key(_OFFSET) + _varint(self.offset)
        if self.data:
            head += _key(_DATA) + _varint(len(self.data))
        tail = _key(_CRC) + self.crc32c.to_bytes(4, "little") if self.crc32c else b""
        return b"".join((head, self.data, tail))

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
            found.get(_CRC, 0),  # type: ignore[arg-type]
        )


def _crc32c(data: bytes | memoryview) -> int:
    """Hash bytes where they lie; the library takes an array over a view, but no view."""
    return int(google_crc32c.value(np.frombuffer(data, np.uint8) if data else b""))


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


def read_chunks(path: Path, name: str, offset: int) -> Iterator[Chunk]:
    """Read a file from `offset` on; the first chunk carries `name`, and a finished object gives one empty chunk."""
    with open_shared(path) as f:
        f.seek(offset)
        first = True
        while (data := f.read(CHUNK_BYTES)) or first:
            yield Chunk(name if first else "", offset, data, google_crc32c.value(data))
            offset += len(data)
            first = False


def append_chunk(chunk: Chunk, into: Sink, have: int, most: int | None = None) -> int:
    """Append a chunk to an object of which `have` bytes are here, and return the new length. most: of the whole object.

    | chunk covers           | result                                          |
    |------------------------|-------------------------------------------------|
    | have ...               | appended                                        |
    | only bytes before have | ignored: a duplicate                            |
    | bytes across have      | the new bytes appended                          |
    | bytes after a gap      | ProtocolError E-WIRE-03, naming the offset due  |
    | damaged bytes          | ProtocolError E-WIRE-08, nothing written        |
    | bytes beyond `most`    | ProtocolError E-WIRE-11, nothing written        |
    """
    data = chunk.data
    if most is not None and chunk.offset + len(data) > most:
        raise ProtocolError("E-WIRE-11", f"expected the {most} bytes that were announced, found more")
    if len(data) > CHUNK_BYTES:
        raise ProtocolError("E-WIRE-09", f"expected chunks of at most {CHUNK_BYTES} bytes, found {len(data)}")
    if _crc32c(data) != chunk.crc32c:
        raise ProtocolError("E-WIRE-08", f"the chunk at {chunk.offset} was damaged on its way: open and send it again")
    if chunk.offset > have:
        raise ProtocolError("E-WIRE-03", f"expected the chunk at {have}, found the one at {chunk.offset}")
    if fresh := data[have - chunk.offset :]:
        into.write(fresh)
    return have + len(fresh)
