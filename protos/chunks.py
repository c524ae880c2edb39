"""Objects in chunks of 1 MiB, each with a CRC-32C: the unit of sending, checking and resuming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import google_crc32c

from fl_core.errors import ProtocolError
from protos.consilium.v1 import federation_pb2 as pb
from protos.spares import open_shared

CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 << 20
"""Both sides refuse larger messages: a bound against denial of service, far above a chunk."""


class Sink(Protocol):
    """Where chunks are appended to: a file, or one that is hashed on the way. `write` takes all of the bytes."""

    def write(self, data: bytes, /) -> int:
        """Append."""
        ...


def read_chunks(path: Path, name: str, offset: int) -> Iterator[pb.Chunk]:
    """Read a file from `offset` on; the first chunk carries `name`, and a finished object gives one empty chunk."""
    with open_shared(path) as f:
        f.seek(offset)
        first = True
        while (data := f.read(CHUNK_BYTES)) or first:
            yield pb.Chunk(object=name if first else "", offset=offset, data=data, crc32c=google_crc32c.value(data))
            offset += len(data)
            first = False


def append_chunk(chunk: pb.Chunk, into: Sink, have: int, most: int | None = None) -> int:
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
    data = chunk.data  # each reading of the field is a copy
    if most is not None and chunk.offset + len(data) > most:
        raise ProtocolError("E-WIRE-11", f"expected the {most} bytes that were announced, found more")
    if len(data) > CHUNK_BYTES:
        raise ProtocolError("E-WIRE-09", f"expected chunks of at most {CHUNK_BYTES} bytes, found {len(data)}")
    if google_crc32c.value(data) != chunk.crc32c:
        raise ProtocolError("E-WIRE-08", f"the chunk at {chunk.offset} was damaged on its way: open and send it again")
    if chunk.offset > have:
        raise ProtocolError("E-WIRE-03", f"expected the chunk at {have}, found the one at {chunk.offset}")
    if fresh := data[have - chunk.offset :]:
        into.write(fresh)
    return have + len(fresh)
