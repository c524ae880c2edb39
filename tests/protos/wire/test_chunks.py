"""A file is cut into chunks and put together again; what does not fit is refused."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from fl_core.errors import ProtocolError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.chunks import CHUNK_BYTES, append_chunk, read_chunks


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5])
@pytest.mark.parametrize("offset", [0, 1, CHUNK_BYTES])
def test_a_file_is_cut_into_messages(tmp_path: Path, size: int, offset: int) -> None:
    data, at = os.urandom(size), offset
    (tmp_path / "object").write_bytes(data)
    for found in read_chunks(tmp_path / "object", "name", offset):
        piece = data[at : at + CHUNK_BYTES]
        assert found == pb.Chunk(object="name" if at == offset else "", offset=at, data=piece)
        at += len(piece)
    assert at == max(size, offset)


# Written by the version that made these messages by hand: a silo of it and a coordinator of this one speak the same.
EARLIER = {
    0: b"\n\x05n\xc3\xa4me\x1a\x06abcdef",
    3: b"\n\x05n\xc3\xa4me\x10\x03\x1a\x03def",
    6: b"\n\x05n\xc3\xa4me\x10\x06",
}


@pytest.mark.parametrize("offset", EARLIER)
def test_the_bytes_of_a_message_are_those_of_the_version_before(tmp_path: Path, offset: int) -> None:
    (tmp_path / "object").write_bytes(b"abcdef")
    (chunk,) = read_chunks(tmp_path / "object", "näme", offset)
    assert chunk.SerializeToString() == EARLIER[offset]
    into = io.BytesIO()
    assert append_chunk(pb.Chunk.FromString(EARLIER[offset]), into, offset) == 6
    assert into.getvalue() == b"abcdef"[offset:]


def test_a_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "object"
    file.write_bytes(bytes(2 * CHUNK_BYTES))
    chunks = read_chunks(file, "name", 0)
    next(chunks)
    os.truncate(file, CHUNK_BYTES + 7)
    with pytest.raises(OSError, match=f"expected {CHUNK_BYTES} more bytes"):
        next(chunks)


def test_a_repeated_chunk_is_ignored_and_the_new_bytes_of_one_that_overlaps_are_appended() -> None:
    into = io.BytesIO()
    assert append_chunk(pb.Chunk(data=b"abcdef"), into, 0) == 6
    assert append_chunk(pb.Chunk(data=b"abcdef"), into, 6) == 6
    assert append_chunk(pb.Chunk(offset=2, data=b"cd"), into, 6) == 6
    assert append_chunk(pb.Chunk(offset=4, data=b"efgh"), into, 6) == 8
    assert into.getvalue() == b"abcdefgh"


@pytest.mark.parametrize(
    ("chunk", "code"),
    [
        (pb.Chunk(offset=7, data=b"h"), "E-WIRE-04"),
        (pb.Chunk(offset=2**64 - 1, data=b"h"), "E-WIRE-06"),
        (pb.Chunk(offset=6, data=bytes(CHUNK_BYTES + 1)), "E-WIRE-06"),
        (pb.Chunk(offset=6, data=bytes(CHUNK_BYTES * 2)), "E-WIRE-06"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(chunk: pb.Chunk, code: str) -> None:
    into = io.BytesIO()
    with pytest.raises(ProtocolError, match=code):
        append_chunk(chunk, into, 6, most=CHUNK_BYTES + 100)
    assert into.getvalue() == b""
