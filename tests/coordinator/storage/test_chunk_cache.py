"""What every silo fetches is read once, and is what would have been read for each."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.storage.chunk_cache import Packed
from protos.wire.chunks import CHUNK_BYTES, PackedChunk, read_chunks

SIZE = 3 * CHUNK_BYTES + 17


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "object"
    path.write_bytes(os.urandom(SIZE))
    return path


def _expecting(readers: int) -> Packed:
    packed = Packed()
    packed.expect("name", readers)
    return packed


def _plain(file: Path, offset: int = 0) -> list[PackedChunk]:
    return [*read_chunks(file, "name", offset)]


@pytest.mark.parametrize("offset", [0, 5, CHUNK_BYTES, SIZE])
def test_the_messages_are_those_of_read_chunks(file: Path, offset: int) -> None:
    packed = _expecting(3)
    for _ in range(4):
        assert list(packed.chunks(file, "name", offset)) == _plain(file, offset)


def test_a_message_is_kept_until_all_who_were_expected_have_it(file: Path) -> None:
    packed, sizes = _expecting(3), [len(message.message) for message in _plain(file)]
    for _ in range(2):
        assert [*packed.chunks(file, "name")] == _plain(file)
        assert packed.kept() == sum(sizes)
    last = packed.chunks(file, "name")
    for k in range(len(sizes)):
        next(last)
        assert packed.kept() == sum(sizes[k + 1 :])
    assert [*packed.chunks(file, "name")] == _plain(file)  # one more than expected
    assert packed.kept() == 0


def test_one_more_than_was_expected_is_read_to_from_the_disk(file: Path) -> None:
    packed, expected = _expecting(2), _plain(file)
    slow = packed.chunks(file, "name")
    assert next(slow) == expected[0]
    for _ in range(2):  # the first of these takes what is left of the first message
        assert [*packed.chunks(file, "name")] == expected
    assert [*slow] == expected[1:]
    assert packed.kept() == 0


def test_an_empty_object_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    packed = _expecting(3)
    for _ in range(2):
        assert list(packed.chunks(tmp_path / "empty", "name")) == _plain(tmp_path / "empty")


def test_a_whole_object_is_read_once_for_transfers_that_run_side_by_side(file: Path) -> None:
    packed, expected = _expecting(2), _plain(file)
    first, second = packed.chunks(file, "name"), packed.chunks(file, "name")
    assert next(first) == next(second) == expected[0]
    file.unlink()  # it stays open, and is looked at no more
    assert [*first] == [*second] == expected[1:]


def test_many_threads_get_the_same(file: Path) -> None:
    packed, expected = _expecting(8), _plain(file)
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
        packed.expect(name, 2)
        assert [*packed.chunks(file, name)] == [*read_chunks(file, name, 0)]
        assert packed.kept() <= 2 * (CHUNK_BYTES + 64)  # and their heads
    (tmp_path / "a").write_bytes(b"another")
    assert b"another" in next(packed.chunks(tmp_path / "a", "a")).message  # the first was not kept


def test_what_is_forgotten_or_not_expected_is_read_anew(file: Path) -> None:
    packed = _expecting(1)
    assert [*packed.chunks(file, "name")] == _plain(file)
    packed.expect("name", 2)
    assert [*packed.chunks(file, "name", expected=False)] == _plain(file)
    assert packed.kept() == 0
    for drop in (partial(packed.forget, "name"), packed.clear):
        packed.expect("name", 2)
        assert [*packed.chunks(file, "name")] == _plain(file)
        drop()
        file.write_bytes(os.urandom(SIZE))
    assert [*packed.chunks(file, "name")] == _plain(file)


def test_a_transfer_whose_object_cannot_be_read_fails_and_so_does_the_one_beside_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, name: str, offset: int) -> Iterator[PackedChunk]:
        yield next(read_chunks(path, name, offset))
        raise OSError(5, "input/output error")

    monkeypatch.setattr("coordinator.storage.chunk_cache.read_chunks", broken)
    packed = _expecting(2)
    first, second = packed.chunks(file, "name"), packed.chunks(file, "name")
    assert next(first) == next(second)
    with pytest.raises(OSError, match="input/output"):
        next(first)
    with pytest.raises(FileNotFoundError):
        next(second)
    monkeypatch.undo()
    assert [*packed.chunks(file, "name")] == _plain(file)  # another try begins anew
