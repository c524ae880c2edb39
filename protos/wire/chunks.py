"""Objects in chunks of at most 2 MiB: the unit of sending and resuming. TLS and the object's name check the bytes.

A chunk travels as the message `Chunk` of federation.proto. The protobuf library copies its data twice on each side, so
the usual form of the message is written and read here; every other form is left to the library.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from fl_core.errors import ProtocolError
from protos.consilium.v1 import federation_pb2 as pb

CHUNK_BYTES = 2 << 20
"""Bytes in a chunk: smaller chunks cost more processor time per byte, larger ones gain nothing."""


_LENGTH = 4
"""Bytes of the length of a field in its usual form: messages are far below 256 MiB."""


class Writer(Protocol):
    """Where chunks are appended to: a file, or a `HashingWriter`. `write` takes all of the bytes."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class Chunk(NamedTuple):
    """The fields of `Chunk` in federation.proto. message: its bytes, of which `data` is a part or a copy."""

    object: str
    offset: int
    data: bytes | memoryview
    message: bytes

    @classmethod
    def of(cls, object: str, offset: int, data: bytes) -> Chunk:
        """Make a chunk; its message has the bytes that the library would write."""
        head = pb.Chunk(object=object, offset=offset).SerializeToString()
        return cls(object, offset, data, head + b"\x1a" + _varint(len(data)) + data if data else head)

    @classmethod
    def decode(cls, message: bytes) -> Chunk:
        """Read a message; raises google.protobuf.message.DecodeError where the library does.

        Guarantees: the fields are those that the library reads. `data` is not copied where each field is there at most
        once, in the order of their numbers.
        """
        view, at, name, offset = memoryview(message), 0, "", 0
        try:
            if message.startswith(b"\n"):
                size, begin = _read_varint(message, 1, _LENGTH)
                at = begin + size
                name = str(view[begin:at], "utf-8")
            if message.startswith(b"\x10", at):
                offset, at = _read_varint(message, at + 1)
            size, begin = _read_varint(message, at + 1, _LENGTH) if message.startswith(b"\x1a", at) else (0, at)
            if begin + size == len(message):
                return cls(name, offset, view[begin:], message)
        except (IndexError, UnicodeDecodeError):
            pass
        read = pb.Chunk.FromString(message)
        return cls(read.object, read.offset, read.data, message)


def encode(chunk: Chunk) -> bytes:
    return chunk.message


def _read_varint(message: bytes, at: int, most: int = 9) -> tuple[int, int]:
    """Return a number and where it ends; raises IndexError where it does not end, or takes more than `most` bytes."""
    number = 0
    for shift in range(0, 7 * most, 7):
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise IndexError


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def read_chunks(path: Path, name: str, offset: int) -> Generator[Chunk, None, None]:
    """Read a file from `offset` on; the first chunk carries `name`, and a finished object gives one empty chunk.

    Raises FileNotFoundError when the file is not there, or no longer; OSError when it cannot be read to its end.
    """
    with path.open("rb") as file:
        file.seek(offset)
        end = os.fstat(file.fileno()).st_size
        while True:
            size = max(0, min(CHUNK_BYTES, end - offset))
            yield Chunk.of(name, offset, _read_exactly(file, size))
            name, offset = "", offset + size
            if offset >= end:
                return


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise OSError(f"{file.name} ends before the expected {size} bytes")
    return data


def append_chunk(chunk: Chunk | pb.Chunk, into: Writer, have: int, most: int | None = None) -> int:
    """Append a chunk to an object of which `have` bytes are here, and return the new length. most: of the whole object.

    | chunk covers           | result                                          |
    |------------------------|-------------------------------------------------|
    | have ...               | appended                                        |
    | only bytes before have | ignored: a duplicate                            |
    | bytes across have      | the new bytes appended                          |
    | bytes after a gap      | ProtocolError E-WIRE-04, naming the offset due  |
    | bytes beyond `most`    | ProtocolError E-WIRE-06, nothing written        |
    """
    data = chunk.data
    if most is not None and chunk.offset + len(data) > most:
        raise ProtocolError("E-WIRE-06", f"more than the announced {most} bytes came")
    if len(data) > CHUNK_BYTES:
        raise ProtocolError("E-WIRE-06", f"expected chunks of at most {CHUNK_BYTES} bytes, found {len(data)}")
    if chunk.offset > have:
        raise ProtocolError("E-WIRE-04", f"expected the chunk at {have}, found the one at {chunk.offset}")
    if fresh := data[have - chunk.offset :]:
        into.write(fresh)
    return have + len(fresh)
