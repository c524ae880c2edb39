"""Objects in chunks of at most 2 MiB: the unit of sending and resuming. TLS and the object's name check the bytes."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, Protocol

from fl_core.errors import ProtocolError
from protos.consilium.v1 import federation_pb2 as pb

CHUNK_BYTES = 2 << 20
"""Bytes in a chunk: smaller chunks cost more processor time per byte, larger ones gain nothing."""


class Writer(Protocol):
    """Where chunks are appended to: a file, or a `HashingWriter`. `write` takes all of the bytes."""

    def write(self, data: bytes, /) -> int: ...


def read_chunks(path: Path, name: str, offset: int) -> Generator[pb.Chunk, None, None]:
    """Read a file from `offset` on; the first chunk carries `name`, and a finished object gives one empty chunk.

    Raises FileNotFoundError when the file is not there, or no longer; OSError when it cannot be read to its end.
    """
    with path.open("rb") as file:
        file.seek(offset)
        end = os.fstat(file.fileno()).st_size
        while True:
            size = max(0, min(CHUNK_BYTES, end - offset))
            yield pb.Chunk(object=name, offset=offset, data=_read_exactly(file, size))
            name, offset = "", offset + size
            if offset >= end:
                return


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise OSError(f"expected {size} more bytes in {file.name}, found its end")
    return data


def append_chunk(chunk: pb.Chunk, into: Writer, have: int, most: int | None = None) -> int:
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
        raise ProtocolError("E-WIRE-06", f"expected the {most} bytes that were announced, found more")
    if len(data) > CHUNK_BYTES:
        raise ProtocolError("E-WIRE-06", f"expected chunks of at most {CHUNK_BYTES} bytes, found {len(data)}")
    if chunk.offset > have:
        raise ProtocolError("E-WIRE-04", f"expected the chunk at {have}, found the one at {chunk.offset}")
    if fresh := data[have - chunk.offset :]:
        into.write(fresh)
    return have + len(fresh)
