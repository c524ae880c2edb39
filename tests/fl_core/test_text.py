"""Text that people type or export is read one way, whatever editor wrote it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_core.csv_reader import read_lines, read_rows
from fl_core.datasets.label_dictionary import read_dictionary
from fl_core.datasets.table_schema import read_schema
from fl_core.text import composed, decoded, opened, read_text

SCHEMA = 'label = "dx"\nclasses = ["a", "b"]\n[columns.crp]\ntype = "number"\nmin = 0\nmax = 500\n'
MARK = "\ufeff"


def as_list(file: Path) -> object:
    return read_rows(file, ("path", "label"))


def as_dictionary(file: Path) -> object:
    return read_dictionary(file.rename(file.with_name("labels.toml")).parent)


READERS: list[tuple[Callable[[Path], object], str]] = [
    (as_list, "path,label\n1.png,a\n"),
    (read_lines, "one\ntwo\n"),
    (read_schema, SCHEMA),
    (as_dictionary, '[labels]\n"D22" = "nevus"\n'),
]


@pytest.mark.parametrize(("read", "content"), READERS)
def test_a_file_with_a_byte_order_mark_is_read_as_one_without(
    tmp_path: Path, read: Callable[[Path], object], content: str
) -> None:
    found = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / encoding).mkdir()
        (tmp_path / encoding / "file").write_text(content, encoding=encoding)
        found.append(read(tmp_path / encoding / "file"))
    assert found[0] == found[1]


@pytest.mark.parametrize(("read", "content"), READERS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le"])
def test_utf_16_is_refused_by_its_name(
    tmp_path: Path, read: Callable[[Path], object], content: str, encoding: str
) -> None:
    (tmp_path / "file").write_text(content, encoding=encoding)
    with pytest.raises(ValueError, match=r"UTF-16 \(Excel's Unicode text\): save it as UTF-8"):
        read(tmp_path / "file")


def test_text_is_read_whole_or_refused_above_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("\ufeffä\r\nb".encode())
    assert read_text(tmp_path / "file") == decoded("ä\r\nb".encode()) == "ä\nb"
    with opened(tmp_path / "file") as stream:
        assert list(stream) == ["ä\r\n", "b"]  # a CSV reader wants the ends of lines as they are
    with pytest.raises(ValueError, match="more than 3 bytes"):
        read_text(tmp_path / "file", 3)
    (tmp_path / "file").write_bytes(b"\0\0\0")
    assert read_text(tmp_path / "file") == "\0\0\0"  # a damaged file, which its reader refuses


@pytest.mark.parametrize(("read", "content"), READERS)
def test_windows_1252_is_guessed_by_its_name(tmp_path: Path, read: Callable[[Path], object], content: str) -> None:
    """What a German Excel writes into a CSV."""
    (tmp_path / "file").write_bytes(content.replace("\n", "\n# ä\n", 1).encode("cp1252"))
    with pytest.raises(ValueError, match=r"the byte 0xe4, which is not UTF-8 \(Windows-1252\?\): save it as UTF-8"):
        read(tmp_path / "file")


def test_a_name_has_one_form() -> None:
    assert composed(unicodedata.normalize("NFD", "Läsion")) == "Läsion" == composed("Läsion")
