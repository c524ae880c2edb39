"""Objects on disk: whole under their digest, or not there; hashed again as soon as somebody may have touched them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fl_core.errors import ProtocolError, StateError, UnavailableError
from service_core.storage.digests import digest
from service_core.storage.object_store import ObjectStore, open_partial

DATA = bytes(range(256)) * 40
DIGEST = digest(DATA)


@pytest.fixture(params=[False, True], ids=["flat", "sharded"])
def objects(tmp_path: Path, request: pytest.FixtureRequest) -> ObjectStore:
    return ObjectStore(tmp_path / "objects", sharded=request.param)


def save(file: Path) -> tuple[str, int]:
    file.touch(mode=0o600)
    file.write_bytes(DATA)
    return DIGEST, len(DATA)


def fetched(objects: ObjectStore, cut: int = 0) -> str:
    """Download an object, in two streams when it is cut."""
    partial = objects.partial(DIGEST)
    for begin, end in ((0, cut), (cut, len(DATA))) if cut else ((0, len(DATA)),):
        with open_partial(partial) as file:
            file.write(DATA[begin:end])
    objects.commit(partial, DIGEST, file.digest(), sync=False)
    return DIGEST


def files(objects: ObjectStore) -> list[str]:
    return [path.name for path in objects.folder.rglob("*") if path.is_file()]


def test_an_object_is_under_its_digest_and_twice_is_once(objects: ObjectStore) -> None:
    assert objects.put(b"abc") == digest(b"abc") == objects.put(b"abc")
    assert objects.path(digest(b"abc")).read_bytes() == b"abc"
    assert files(objects) == [digest(b"abc")]


@pytest.mark.parametrize("sync", [False, True])
def test_an_object_is_written_private(objects: ObjectStore, sync: bool) -> None:
    assert objects.put_file(save, sync=sync) == (DIGEST, len(DATA))
    assert objects.verified(DIGEST).stat().st_mode & 0o777 == 0o600
    assert files(objects) == [DIGEST]


@pytest.mark.parametrize("damaged", [False, True])
def test_storing_the_same_content_again_heals_a_damaged_object_and_leaves_a_good_one(
    objects: ObjectStore, damaged: bool
) -> None:
    objects.put_file(save)
    before = objects.path(DIGEST).stat().st_ino
    if damaged:
        objects.path(DIGEST).write_bytes(b"something else")
    assert objects.put_file(save, sync=False) == (DIGEST, len(DATA))
    assert objects.verified(DIGEST).read_bytes() == DATA
    assert files(objects) == [DIGEST]
    assert damaged or objects.path(DIGEST).stat().st_ino == before  # the one that is on the disk already


def test_a_write_that_fails_leaves_nothing(objects: ObjectStore) -> None:
    def full(file: Path) -> tuple[str, int]:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UnavailableError, match=r"E-STATE-63.*is full"):
        objects.put_file(full)
    assert files(objects) == []


def test_an_object_has_its_name_only_when_it_is_on_the_disk(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(objects.has(DIGEST))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    partial = objects.partial(DIGEST)
    partial.write_bytes(DATA)
    objects.commit(partial, DIGEST)
    assert synced[0] is False
    assert synced[-1] is True  # its name


@pytest.mark.parametrize("cut", [0, 1, 5000])
def test_a_download_becomes_an_object(objects: ObjectStore, cut: int) -> None:
    fetched(objects, cut)
    assert objects.holds(DIGEST)
    assert objects.path(DIGEST).read_bytes() == DATA
    assert files(objects) == [DIGEST]


@pytest.mark.parametrize("here", [False, True])
def test_a_download_with_another_digest_is_deleted_and_hurts_no_good_object(objects: ObjectStore, here: bool) -> None:
    if here:
        objects.put(DATA)
    partial = objects.partial(DIGEST)
    with open_partial(partial) as file:
        file.write(DATA[:-1])
    with pytest.raises(ProtocolError, match="E-WIRE-04"):
        objects.commit(partial, DIGEST, file.digest())
    assert not partial.exists()
    assert objects.holds(DIGEST) is here


@pytest.mark.parametrize("again", [False, True])
def test_what_a_power_cut_left_of_a_download_is_not_trusted(objects: ObjectStore, again: bool) -> None:
    fetched(objects)
    objects.path(DIGEST).write_bytes(bytes(len(DATA)))
    after = ObjectStore(objects.folder, objects.path(DIGEST).parent != objects.folder) if again else objects
    with pytest.raises(StateError, match="E-STATE-63"):
        after.verified(DIGEST)
    assert not after.holds(DIGEST)
    assert not after.has(DIGEST)
    with pytest.raises(StateError, match="missing"):
        after.verified(DIGEST)
    fetched(after)
    assert after.holds(DIGEST)


@pytest.mark.parametrize("name", ["../silo.db", "../../etc/passwd", "", "A" * 64, "g" * 64, "a" * 63])
def test_an_object_is_named_by_a_digest_alone(objects: ObjectStore, name: str) -> None:
    for ask in (objects.path, objects.has, objects.partial, objects.remove, objects.holds):
        with pytest.raises(ProtocolError, match="E-WIRE-06"):
            ask(name)


def test_a_missing_object_is_named(objects: ObjectStore) -> None:
    with pytest.raises(StateError, match="E-STATE-22"):
        objects.path("0" * 64)


def test_a_sweep_keeps_what_is_named_and_removes_half_written_files(objects: ObjectStore) -> None:
    kept, gone = objects.put(b"kept"), objects.put(b"gone")
    objects.partial("e" * 64).write_bytes(b"half")
    objects.partial(kept).write_bytes(b"begun")
    (objects.folder / ".0123.part").write_bytes(b"ha")  # of a process that was killed
    assert objects.sweep({kept}) == 4 + 4 + 2
    assert not objects.has(gone)
    assert sorted(files(objects)) == sorted([kept, objects.partial(kept).name])


def test_what_is_removed_is_gone_and_whoever_reads_it_reads_on(objects: ObjectStore) -> None:
    objects.put(DATA)
    with objects.path(DIGEST).open("rb") as reader:
        for _ in range(2):
            objects.remove(DIGEST)
            assert not objects.has(DIGEST)
        assert reader.read() == DATA
