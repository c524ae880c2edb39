"""A file is cut into chunks and put together again; what does not fit is refused."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fl_core.errors import ProtocolError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.chunks import CHUNK_BYTES, Chunk, append_chunk, read_chunks


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5])
@pytest.mark.parametrize("offset", [0, 1, CHUNK_BYTES])
def test_a_file_is_cut_into_messages(tmp_path: Path, size: int, offset: int) -> None:
    data, at = os.urandom(size), offset
    (tmp_path / "object").write_bytes(data)
    for found in read_chunks(tmp_path / "object", "name", offset):
        piece = data[at : at + CHUNK_BYTES]
        expected = pb.Chunk(object="name" if at == offset else "", offset=at, data=piece)
        assert found.message == expected.SerializeToString()
        assert (found.object, found.offset, found.data) == (expected.object, at, piece)
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
    assert chunk.message == EARLIER[offset]
    into = io.BytesIO()
    assert append_chunk(Chunk.decode(EARLIER[offset]), into, offset) == 6
    assert into.getvalue() == b"abcdef"[offset:]


def same_fields(message: bytes) -> None:
    """Require that a message is read as the library reads it, or refused where the library refuses it."""
    try:
        expected = pb.Chunk.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            Chunk.decode(message)
        return
    found = Chunk.decode(message)
    assert (found.object, found.offset, bytes(found.data)) == (expected.object, expected.offset, expected.data)
    assert found.message is message


FORMS = {
    "empty": b"",
    "a part of a name": b"\n\x05ab",
    "a name that is no text": b"\n\x01\xff\x1a\x01x",
    "an offset of ten bytes": b"\x10" + b"\xff" * 9 + b"\x01\x1a\x01x",
    "an offset of eleven bytes": b"\x10" + b"\xff" * 10 + b"\x01\x1a\x01x",
    "an offset without an end": b"\x10\xff",
    "an offset that is longer than need be": b"\x10\x85\x80\x00\x1a\x01x",
    "data before the offset": b"\x1a\x01x\x10\x05",
    "data twice": b"\x1a\x01x\x1a\x02yz",
    "a name twice": b"\n\x01a\n\x01b\x1a\x01x",
    "less data than announced": b"\x1a\x05x",
    "data of an endless length": b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x",
    "a length of six bytes": b"\x1a\x81\x80\x80\x80\x80\x00x",
    "a field of a later version": b"\x1a\x01x\x2a\x01y",
    "a checksum of an earlier version": b"\x1a\x01x\x25abcd",
    "a group": b"\x1a\x01x\x2b\x2c",
    "a tag of no field": b"\x00",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_chunk_in_any_form_has_the_fields_that_the_library_reads(form: str) -> None:
    same_fields(FORMS[form])


@given(
    st.text(max_size=9), st.integers(0, 2**64 - 1), st.binary(max_size=300), st.integers(0, 400), st.binary(max_size=9)
)
def test_a_damaged_chunk_has_the_fields_that_the_library_reads(
    name: str, offset: int, data: bytes, at: int, other: bytes
) -> None:
    chunk = Chunk.of(name, offset, data)
    assert chunk.message == pb.Chunk(object=name, offset=offset, data=data).SerializeToString()
    same_fields(chunk.message)
    same_fields(chunk.message[:at] + other + chunk.message[at + len(other) :])
    same_fields(chunk.message[:at] + other + chunk.message[at:])


def test_data_of_a_chunk_are_not_copied() -> None:
    message = pb.Chunk(object="name", offset=5, data=bytes(CHUNK_BYTES)).SerializeToString()
    data = Chunk.decode(message).data
    assert isinstance(data, memoryview)
    assert data.obj is message


def test_a_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "object"
    file.write_bytes(bytes(2 * CHUNK_BYTES))
    chunks = read_chunks(file, "name", 0)
    next(chunks)
    os.truncate(file, CHUNK_BYTES + 7)
    with pytest.raises(OSError, match=f"ends before the expected {CHUNK_BYTES} bytes"):
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
