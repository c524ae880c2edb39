"""Objects in chunks of 1 MiB, each with a CRC-32C: the unit of sending, checking and resuming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from fl_core.errors import ProtocolError
from protos.consilium.v1 import federation_pb2 as pb

CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 << 20
"""Both sides refuse larger messages: a bound against denial of service, far above a chunk."""


def read_chunks(path: Path, name: str, offset: int) -> Iterator[pb.Chunk]:
    """Read a file from `offset` on; the first chunk carries `name`, and a finished object gives one empty chunk."""
    with path.open("rb") as f:
        f.seek(offset)
        first = True
        while (data := f.read(CHUNK_BYTES)) or first:
            yield pb.Chunk(object=name if first else "", offset=offset, data=data, crc32c=google_crc32c.value(data))
            offset += len(data)
            first = False


def append_chunk(chunk: pb.Chunk, into: BinaryIO, have: int) -> int:
    """Append a chunk to an object of which `have` bytes are here, and return the new length.

    | chunk covers           | result                                          |
    |------------------------|-------------------------------------------------|
    | have ...               | appended                                        |
    | only bytes before have | ignored: a duplicate                            |
    | bytes across have      | the new bytes appended                          |
    | bytes after a gap      | ProtocolError E-WIRE-03, naming the offset due  |
    | damaged bytes          | ProtocolError E-WIRE-08, nothing written        |
    """
    if len(chunk.data) > CHUNK_BYTES:
        raise ProtocolError("E-WIRE-09", f"expected chunks of at most {CHUNK_BYTES} bytes, found {len(chunk.data)}")
    if google_crc32c.value(chunk.data) != chunk.crc32c:
        raise ProtocolError("E-WIRE-08", f"the chunk at {chunk.offset} was damaged on its way: open and send it again")
    if chunk.offset > have:
        raise ProtocolError("E-WIRE-03", f"expected the chunk at {have}, found the one at {chunk.offset}")
    if fresh := chunk.data[have - chunk.offset :]:
        into.write(fresh)
    return have + len(fresh)
