"""The loader's cache: bounded, unnamed, shared, and without any say in what a model sees."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from fl_core.datasets import image_loader
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.image_loader import ImageFormat, ImageLoader, SquareKey, shared_loader, square
from fl_core.errors import ConfigError
from tests.support.data import write_image

FORM = ImageFormat(16)
BYTES = 16 * 16 * 3


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [write_image(tmp_path / "images" / f"{k}.png", 20 * k + 20) for k in range(6)]


def wanted(files: list[Path]) -> list[tuple[Path, SquareKey | None]]:
    return [(file, SquareKey.of(file)) for file in files]


def test_squares_come_in_order_and_the_same_from_cache_and_file(files: list[Path], tmp_path: Path) -> None:
    order = [files[k] for k in (3, 0, 3, 5, 1)]
    expected = np.stack([square(file, FORM) for file in order])
    for loader in (ImageLoader(tmp_path), ImageLoader(cache_bytes=0), ImageLoader(threads=4)):
        for _ in range(2):
            assert np.array_equal(loader.squares(wanted(order), FORM), expected)


def test_the_cache_has_no_name_and_nobody_else_may_open_it(files: list[Path], tmp_path: Path) -> None:
    loader = ImageLoader(tmp_path / "images")
    before = sorted(p.name for p in (tmp_path / "images").iterdir())
    loader.squares(wanted(files), FORM)
    assert sorted(p.name for p in (tmp_path / "images").iterdir()) == before
    (shelf,) = loader._shelves.values()
    found = os.fstat(shelf.file.fileno())
    assert (found.st_mode & 0o777, found.st_nlink) == (0o600, 0)
    assert loader.kept_bytes == found.st_size == len(files) * BYTES


def test_the_bound_holds_and_other_forms_make_room_first(files: list[Path]) -> None:
    loader = ImageLoader(cache_bytes=8 * BYTES, threads=1)
    loader.squares(wanted(files), ImageFormat(8))
    loader.squares(wanted(files), FORM)
    assert loader.kept_bytes <= 8 * BYTES
    loader.squares(wanted(files), ImageFormat(8))
    loader.squares(wanted(files), ImageFormat(32))  # 4 times as large: two fit
    assert loader.kept_bytes <= 8 * BYTES
    loader.forget()
    assert loader.kept_bytes == 0
    assert loader.squares(wanted(files[:1]), FORM).shape == (1, 16, 16, 3)


def test_a_file_that_changed_is_decoded_again(files: list[Path]) -> None:
    loader = ImageLoader()
    first = loader.squares(wanted(files[:1]), FORM)
    times = files[0].stat()
    write_image(files[0], 200)
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))  # dates are put back
    assert not np.array_equal(loader.squares(wanted(files[:1]), FORM), first)


@pytest.mark.fault(
    "a disk", "is full while decoded images are cached", "images are decoded each time; the work continues"
)
@pytest.mark.parametrize("kind", ["no room", "no file", "little left"])
def test_a_full_disk_ends_the_keeping_and_not_the_work(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def full(*words: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    if kind == "no room":
        monkeypatch.setattr(os, "pwrite", full)
    elif kind == "no file":
        monkeypatch.setattr(image_loader.tempfile, "TemporaryFile", full)
    else:
        monkeypatch.setattr(image_loader, "RESERVE_BYTES", 1 << 62)
    loader = ImageLoader(threads=1)
    expected = np.stack([square(file, FORM) for file in files])
    for _ in range(2):
        assert np.array_equal(loader.squares(wanted(files), FORM), expected)
    assert loader.kept_bytes == 0
    assert len([r for r in caplog.records if "no longer cached" in r.message]) == 1


def test_an_unreadable_file_names_itself(files: list[Path]) -> None:
    files[4].write_text("<html>")
    with pytest.raises(UnreadableError) as caught:
        ImageLoader().squares(wanted(files), FORM)
    assert caught.value.path == files[4]


def test_a_loader_goes_to_another_process_as_its_settings(tmp_path: Path) -> None:
    loader = ImageLoader(tmp_path, 123, 3)
    other = pickle.loads(pickle.dumps(loader))
    assert (other.folder, other.cache_bytes, other.threads, other.kept_bytes) == (tmp_path, 123, 3, 0)


def test_the_shared_loader_is_set_by_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSILIUM_IMAGE_CACHE_BYTES", "0")
    monkeypatch.setenv("CONSILIUM_IMAGE_CACHE_FOLDER", str(tmp_path))
    found = shared_loader.__wrapped__()
    assert (found.cache_bytes, found.folder) == (0, tmp_path)
    for name, wrong in (("BYTES", "4GiB"), ("BYTES", "-1"), ("FOLDER", str(tmp_path / "gone"))):
        with monkeypatch.context() as changed:
            changed.setenv(f"CONSILIUM_IMAGE_CACHE_{name}", wrong)
            with pytest.raises(ConfigError, match=f"CONSILIUM_IMAGE_CACHE_{name}"):
                shared_loader.__wrapped__()
