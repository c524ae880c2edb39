"""Files that arrive in pieces: what was written counts, however the writing ends."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import pytest

from fl_core.errors import UnavailableError
from service_core.storage.digests import digest
from service_core.storage.object_store import open_partial, partial_size


def test_a_file_goes_on_where_its_writing_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert partial_size(file) == 0
    with suppress(RuntimeError), open_partial(file) as writer:
        writer.write(b"abc")
        assert partial_size(file) == writer.size == 3  # unbuffered: a process that is killed here leaves it so
        raise RuntimeError
    with open_partial(file) as writer:
        assert writer.size == 3
        writer.write(memoryview(b"de"))
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"abcde", 0o600)


def test_only_a_file_that_was_written_in_one_go_has_been_hashed(tmp_path: Path) -> None:
    with open_partial(tmp_path / "file") as writer:
        writer.write(b"ab")
        writer.write(b"c")
        assert writer.digest() == digest(b"abc")
    with open_partial(tmp_path / "file") as writer:
        writer.write(b"d")
        assert writer.digest() is None


def test_a_full_disk_is_said_as_such_and_what_arrived_before_it_counts(tmp_path: Path) -> None:
    with (
        open_partial(Path("/dev/full")) as writer,
        pytest.raises(UnavailableError, match=r"E-STATE-63.*is full.*free some"),
    ):
        writer.write(b"abc")
    assert writer.size == 0


@pytest.mark.fault("a disk", "reaches a limit on file sizes", "E-STATE-63 names the folder; the write is tried again")
def test_a_limit_on_the_size_of_files_is_said_as_what_a_disk_does_not_take(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_partial(tmp_path / "file") as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2, hard))
        try:
            with pytest.raises(UnavailableError, match=r"E-STATE-63.*File too large"):
                writer.write(b"abc")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
