"""Files that are written over: never under a reader, and never longer than what has arrived."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from protos.storage.file_recycling import LARGE, LENGTH, Spares, discard, growing, length, open_shared

OLD, NEW = b"o" * (LARGE + 9), b"n" * LARGE


def spare(folder: Path) -> Spares:
    """Make a folder with one spare file."""
    spares = Spares(folder / "spare")
    (folder / "old").write_bytes(OLD)
    spares.keep(folder / "old")
    return spares


def test_a_large_file_is_kept_and_given_out_once_and_small_ones_are_deleted(tmp_path: Path) -> None:
    spares, into = spare(tmp_path), tmp_path / "into"
    assert not (tmp_path / "old").exists()
    assert not spares.take(into, LARGE - 1)
    assert spares.take(into, LARGE)
    assert (into.stat().st_size, into.stat().st_mode & 0o777) == (len(OLD), 0o600)
    assert not spares.take(tmp_path / "second", LARGE)
    (tmp_path / "small").write_bytes(b"s")
    for name in ("small", "absent"):
        spares.keep(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["into", "spare"]


def test_room_is_bounded_and_given_back(tmp_path: Path) -> None:
    spares = Spares(tmp_path / "spare", most=2 * LARGE)
    for name in "abc":
        (tmp_path / name).write_bytes(NEW)
        spares.keep(tmp_path / name)
    assert len(list((tmp_path / "spare").iterdir())) == 2
    assert sum(f.exists() for f in (tmp_path / name for name in "abc")) == 0
    spares.clear()
    assert not list(tmp_path.iterdir())


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    spares = Spares(tmp_path / "spare")
    (tmp_path / "old").write_bytes(OLD)
    with open_shared(tmp_path / "old") as reader:
        spares.keep(tmp_path / "old")
        assert not spares.take(tmp_path / "into", LARGE)
        assert reader.read() == OLD
        assert not (tmp_path / "old").exists()
    with pytest.raises(FileNotFoundError):
        open_shared(tmp_path / "old")


def test_a_file_that_grows_in_a_spare_one_counts_what_has_arrived_however_the_writing_ends(tmp_path: Path) -> None:
    file, spares = tmp_path / "file", spare(tmp_path)
    with suppress(RuntimeError), growing(file, spares, LARGE) as growth:
        growth.write(b"abc")
        assert (length(file), file.stat().st_size) == (3, len(OLD))
        # A process that is killed here leaves both files as they are.
        killed = tmp_path / "killed"
        os.link(file, killed)
        (tmp_path / f"killed{LENGTH}").write_bytes((tmp_path / f"file{LENGTH}").read_bytes())
        raise RuntimeError
    assert file.read_bytes() == b"abc"
    os.truncate(killed, len(OLD))
    assert length(killed) == 3
    with growing(killed, spares, LARGE) as growth:
        assert growth.have == 3
        growth.write(b"d")
        growth.sync()
    assert killed.read_bytes() == b"abcd"
    discard(killed)
    assert length(killed) == 0
    assert not list(tmp_path.glob(f"*{LENGTH}"))


def test_a_note_without_its_file_counts_nothing(tmp_path: Path) -> None:
    file, spares = tmp_path / "file", Spares(tmp_path / "spare")
    (tmp_path / f"file{LENGTH}").write_bytes((7).to_bytes(8, "little"))
    assert length(file) == 0
    with growing(file, spares, 10) as growth:
        assert growth.have == 0
        growth.write(b"ab")
        assert length(file) == 2
    assert file.read_bytes() == b"ab"
