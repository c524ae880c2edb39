"""Files of a silo: hashed once while they are as they were, and again as soon as somebody may have touched them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_core.errors import StateError
from protos.wire import codec
from silo.storage.object_store import Objects

DATA = bytes(range(256)) * 40


def written(file: Path) -> tuple[str, int]:
    file.touch(0o600)
    return codec.digest(DATA), file.write_bytes(DATA)


def fetched(objects: Objects, data: bytes = DATA, cut: int = 0) -> str:
    """Download an object, in two streams when it is cut."""
    digest = codec.digest(data)
    for begin, end in ((0, cut), (cut, len(data))):
        with objects.growing(digest) as file:
            file.write(data[begin:end])
    assert objects.adopt(digest, file.digest.hexdigest())
    return digest


@pytest.mark.parametrize("cut", [0, 1, 5000])
def test_a_download_is_hashed_over_all_of_its_streams(tmp_path: Path, cut: int) -> None:
    objects = Objects(tmp_path / "objects")
    digest = fetched(objects, cut=cut)
    assert objects.holds(digest)
    assert objects.path(digest).read_bytes() == DATA


@pytest.mark.parametrize("damaged", [False, True])
def test_writing_the_same_content_twice_is_harmless(tmp_path: Path, damaged: bool) -> None:
    objects = Objects(tmp_path / "objects")
    digest, size = objects.put_file(written)
    before = objects.path(digest).stat().st_ino
    if damaged:
        objects.path(digest).write_bytes(b"something else")
    assert objects.put_file(written) == (digest, size)
    assert objects.sound(digest).read_bytes() == DATA
    assert [path.name for path in objects.folder.iterdir()] == [digest]
    assert (objects.path(digest).stat().st_ino == before) is not damaged


def test_a_download_with_another_digest_is_deleted(tmp_path: Path) -> None:
    objects, digest = Objects(tmp_path / "objects"), codec.digest(DATA)
    with objects.growing(digest) as file:
        file.write(DATA[:-1])
    assert not objects.adopt(digest, file.digest.hexdigest())
    assert not objects.partial(digest).exists()
    assert not objects.holds(digest)


@pytest.mark.parametrize("again", [False, True])
def test_what_a_power_cut_left_of_a_download_is_not_trusted(tmp_path: Path, again: bool) -> None:
    objects = Objects(tmp_path / "objects")
    digest = fetched(objects)
    objects.path(digest).write_bytes(bytes(len(DATA)))
    after = Objects(tmp_path / "objects") if again else objects
    assert not after.holds(digest)
    assert not after.path(digest).exists()
    fetched(after)
    assert after.holds(digest)


def test_a_whole_download_is_trusted_by_the_next_process_too(tmp_path: Path) -> None:
    digest = fetched(Objects(tmp_path / "objects"))
    assert Objects(tmp_path / "objects").holds(digest)


def test_an_object_is_written_private_under_its_digest(tmp_path: Path) -> None:
    objects = Objects(tmp_path / "objects")
    digest, size = objects.put_file(written)
    assert (digest, size) == (codec.digest(DATA), len(DATA))
    assert objects.sound(digest).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in objects.folder.iterdir()] == [digest]
    objects.path(digest).write_bytes(DATA[::-1])
    with pytest.raises(StateError, match="E-STATE-63"):
        objects.sound(digest)
