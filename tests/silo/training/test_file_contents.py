"""Digests of files that are read again only where their status has changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from silo.training import data_source
from silo.training.data_source import UNREAD, FileContents
from tests.support import until


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{k}.bmp" for k in range(3)]
    for k, path in enumerate(made):
        path.write_bytes(bytes([k]) * 1000)
        os.utime(path, ns=(10**18, 10**18))
    return made


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count what is read, and take every file for settled."""
    names, plain = list[str](), data_source.file_digest
    monkeypatch.setattr(data_source, "file_digest", lambda path: names.append(path.name) or plain(path))
    monkeypatch.setattr(data_source, "_SETTLED_NS", -(10**18))
    return names


def changed(path: Path, content: bytes) -> None:
    """Write a file anew, its size and date as before, at another moment of the system's clock."""
    date, before = path.stat().st_mtime_ns, path.stat().st_ctime_ns

    def write() -> bool:
        path.write_bytes(content)
        os.utime(path, ns=(date, date))
        return path.stat().st_ctime_ns != before

    until(write, "the clock to move")


def test_a_file_whose_status_stays_is_read_once(files: list[Path], read: list[str]) -> None:
    contents = FileContents()
    assert contents.digests(files) == contents.digests(files) == FileContents().digests(files[:])
    assert read == ["0.bmp", "1.bmp", "2.bmp"] * 2


def test_a_change_that_keeps_size_and_date_is_noticed_and_one_file_read(files: list[Path], read: list[str]) -> None:
    contents = FileContents()
    before = contents.digests(files)
    changed(files[1], b"x" * 1000)
    assert contents.digests(files) != before
    assert read[3:] == ["1.bmp"]
    changed(files[1], bytes([1]) * 1000)
    assert contents.digests(files) == before


def test_a_copy_that_keeps_size_and_date_is_noticed(files: list[Path], read: list[str], tmp_path: Path) -> None:
    """As `cp -p` writes over a file, and `rsync -t` beside it and then renames."""
    contents = FileContents()
    before = contents.digests(files)
    other = tmp_path / "other"
    other.write_bytes(b"y" * 1000)
    os.utime(other, ns=(10**18, 10**18))
    other.rename(files[0])
    after = contents.digests(files)
    assert after != before
    again = tmp_path / "again"
    again.write_bytes(b"z" * 1000)
    os.utime(again, ns=(10**18, 10**18))
    status = files[2].stat().st_ctime_ns
    until(lambda: shutil.copy2(again, files[2]) and files[2].stat().st_ctime_ns != status)
    assert contents.digests(files) not in (before, after)


def test_two_files_that_change_places_are_noticed(files: list[Path], read: list[str], tmp_path: Path) -> None:
    contents = FileContents()
    before = contents.digests(files)
    files[0].rename(tmp_path / "aside")
    files[1].rename(files[0])
    (tmp_path / "aside").rename(files[1])
    assert contents.digests(files) != before


def test_a_file_that_is_touched_is_read_again_and_the_same(files: list[Path], read: list[str]) -> None:
    contents = FileContents()
    before = contents.digests(files)
    files[2].touch()
    assert contents.digests(files) == before
    assert read[3:] == ["2.bmp"]


def test_a_file_that_was_changed_a_moment_before_it_was_read_is_read_again(
    files: list[Path], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    plain = data_source.file_digest
    monkeypatch.setattr(data_source, "file_digest", lambda path: read.append(path.name) or plain(path))
    contents = FileContents()
    contents.digests(files)
    contents.digests(files)
    assert len(read) == 6
    monkeypatch.setattr(data_source.time, "time_ns", lambda: files[0].stat().st_ctime_ns + 10**10)
    contents.digests(files)
    contents.digests(files)
    assert len(read) == 9


def test_a_file_that_cannot_be_read_holds_nothing_until_it_is_back(files: list[Path], read: list[str]) -> None:
    contents = FileContents()
    before, content = contents.digests(files), files[0].read_bytes()
    files[0].unlink()
    assert contents.digests(files) == [UNREAD, *before[1:]]
    files[0].write_bytes(content)
    assert contents.digests(files) == before
