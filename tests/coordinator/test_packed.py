"""What every silo fetches is read once, and is what would have been read for each."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.packed import Packed, PackedChunk
from protos.chunks import CHUNK_BYTES, Chunk, read_chunks

SIZE = 3 * CHUNK_BYTES + 17


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "object"
    path.write_bytes(os.urandom(SIZE))
    return path


def _plain(file: Path, offset: int = 0) -> list[PackedChunk]:
    return [PackedChunk.of(chunk) for chunk in read_chunks(file, "name", offset)]


@pytest.mark.parametrize("offset", [0, 5, CHUNK_BYTES, SIZE])
def test_the_messages_are_those_of_read_chunks(file: Path, offset: int) -> None:
    packed = Packed()
    for _ in range(2):
        assert list(packed.chunks(file, "name", offset)) == _plain(file, offset)
    assert packed.kept() == (0 if offset else SIZE)


def test_an_empty_object_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    packed = Packed()
    for _ in range(2):
        assert list(packed.chunks(tmp_path / "empty", "name")) == _plain(tmp_path / "empty")


def test_a_whole_object_is_read_once_for_transfers_that_run_side_by_side(file: Path) -> None:
    packed, expected = Packed(), _plain(file)
    first, second = packed.chunks(file, "name"), packed.chunks(file, "name")
    assert next(first) == next(second) == expected[0]
    file.unlink()  # it stays open, and is looked at no more
    assert [*first] == [*second] == expected[1:]


def test_many_threads_get_the_same(file: Path) -> None:
    packed, expected = Packed(), _plain(file)
    found: list[list[PackedChunk]] = []
    threads = [threading.Thread(target=lambda: found.append([*packed.chunks(file, "name")])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 8


def test_no_more_is_kept_than_allowed_and_the_oldest_goes_first(tmp_path: Path) -> None:
    packed = Packed(most=2 * CHUNK_BYTES)
    for name, size in (("a", CHUNK_BYTES), ("b", CHUNK_BYTES), ("c", CHUNK_BYTES), ("large", 2 * CHUNK_BYTES + 1)):
        file = tmp_path / name
        file.write_bytes(os.urandom(size))
        assert [*packed.chunks(file, name)] == [PackedChunk.of(c) for c in read_chunks(file, name, 0)]
        assert packed.kept() <= 2 * CHUNK_BYTES
    (tmp_path / "a").write_bytes(b"another")
    assert b"another" in next(packed.chunks(tmp_path / "a", "a")).message  # the first was not kept


def test_what_is_forgotten_or_not_shared_is_read_anew(file: Path) -> None:
    packed = Packed()
    assert [*packed.chunks(file, "name", shared=False)] == _plain(file)
    assert packed.kept() == 0
    for drop in (partial(packed.forget, "name"), packed.clear):
        assert [*packed.chunks(file, "name")] == _plain(file)
        drop()
        file.write_bytes(os.urandom(SIZE))
    assert [*packed.chunks(file, "name")] == _plain(file)


def test_a_transfer_whose_object_cannot_be_read_fails_and_so_does_the_one_beside_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, name: str, offset: int) -> Iterator[Chunk]:
        yield next(read_chunks(path, name, offset))
        raise OSError(5, "input/output error")

    monkeypatch.setattr("coordinator.packed.read_chunks", broken)
    packed = Packed()
    first, second = packed.chunks(file, "name"), packed.chunks(file, "name")
    assert next(first) == next(second)
    with pytest.raises(OSError, match="input/output"):
        next(first)
    with pytest.raises(FileNotFoundError):
        next(second)
    monkeypatch.undo()
    assert [*packed.chunks(file, "name")] == _plain(file)  # another try begins anew
