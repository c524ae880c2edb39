"""Features that are kept in a home: made once, believed only as they were written, never more than the bound."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fl_core.errors import RefusedError
from silo.storage.feature_cache import Block, FeatureCache, FeatureKey

KEY = FeatureKey("folder:/data", "version 1", "request", "train", "body 1")
N, WIDTH = 300, 8
SIZE = N * WIDTH * 4


class Maker:
    """Makes rows that name their example, and counts how often it was asked."""

    def __init__(self, n: int = N, lost: tuple[int, ...] = (), fail_at: int = -1) -> None:
        self.n, self.lost, self.fail_at, self.asked = n, lost, fail_at, 0

    def __call__(self) -> Iterator[Block]:
        self.asked += 1
        for first in range(0, max(1, self.n), 64):
            if first >= self.fail_at >= 0:
                raise OSError("the power went")
            there = [i for i in range(first, min(first + 64, self.n)) if i not in self.lost]
            yield Block(there, np.array([[i + k / 8 for k in range(WIDTH)] for i in there], "f4").reshape(-1, WIDTH))


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "features", 1 << 20)


def again(cache: FeatureCache) -> FeatureCache:
    """The cache of the next service on this home."""
    cache.close()
    return FeatureCache(cache.folder, cache.max_bytes)


def file_of(cache: FeatureCache, key: FeatureKey = KEY) -> Path:
    return cache.folder / f"{key.name}.rows"


def test_features_are_made_once_and_come_back_with_the_same_bits_also_in_the_next_service(cache: FeatureCache) -> None:
    maker = Maker(lost=(3, 299))
    first = cache.get(KEY, N, maker)
    for other in (cache, again(cache)):
        found = other.get(KEY, N, maker)
        assert found.left_out == (3, 299)
        assert np.array_equal(found.rows, first.rows)
    assert maker.asked == 1
    assert first.rows[:, 0].tolist() == [i for i in range(N) if i not in (3, 299)]


def test_no_example_is_kept_as_none(cache: FeatureCache) -> None:
    for _ in range(2):
        assert cache.get(KEY, 0, Maker(0)).rows.shape == (0, WIDTH)
        cache = again(cache)


def test_files_are_for_their_owner_alone(cache: FeatureCache) -> None:
    cache.get(KEY, N, Maker())
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.folder.iterdir()} == {0o600}


@pytest.mark.parametrize("changed", ["origin", "data", "request", "split", "maker"])
def test_whatever_features_follow_from_is_another_set(cache: FeatureCache, changed: str) -> None:
    cache.get(KEY, N, Maker())
    other = Maker()
    cache.get(replace(KEY, **{changed: "another"}), N, other)
    assert other.asked == 1


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


EDITS = {
    "a row": lambda path: _flip(path, 100),
    "the footer": lambda path: _flip(path, SIZE + 20),
    "its length": lambda path: _flip(path, -40),
    "the digest": lambda path: _flip(path, -1),
    "the end": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "more bytes": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "everything": lambda path: path.write_bytes(b"\xff" * 4096),
    "nothing left": lambda path: path.write_bytes(b""),
    "a list that never ends": lambda path: path.write_bytes(b"[" * 90_000 + (90_000).to_bytes(8, "little") + bytes(32)),
}


@pytest.mark.fault("an attacker with write access to the home", "edits cached features", "they are computed again")
@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("what", EDITS)
def test_an_edited_file_is_never_believed(cache: FeatureCache, what: str, running: bool) -> None:
    wanted = cache.get(KEY, N, Maker()).rows.copy()
    before = file_of(cache).stat()
    EDITS[what](file_of(cache))
    os.utime(file_of(cache), ns=(before.st_atime_ns, before.st_mtime_ns))  # as one who hides it does
    maker, cache = Maker(), cache if running else again(cache)
    assert [file.sound for file in cache.files()] == [False]
    assert np.array_equal(cache.get(KEY, N, maker).rows, wanted)
    assert maker.asked == 1
    assert [file.sound for file in cache.files()] == [True]


@pytest.mark.fault(
    "an attacker with write access to the home", "stores features under another name", "they are computed again"
)
def test_a_file_of_another_key_or_of_another_home_is_never_believed(cache: FeatureCache, tmp_path: Path) -> None:
    other_key, other_home = replace(KEY, split="test"), FeatureCache(tmp_path / "elsewhere", 1 << 20)
    cache.get(other_key, N, Maker())
    other_home.get(KEY, N, Maker())
    for source in (file_of(cache, other_key), file_of(other_home)):
        file_of(cache).write_bytes(source.read_bytes())
        maker, cache = Maker(), again(cache)
        cache.get(KEY, N, maker)
        assert maker.asked == 1
    file_of(cache).unlink()
    file_of(cache).symlink_to(file_of(other_home))
    maker, cache = Maker(), again(cache)
    cache.get(KEY, N, maker)
    assert maker.asked == 1


def test_without_the_secret_nothing_is_believed(cache: FeatureCache) -> None:
    cache.get(KEY, N, Maker())
    (cache.folder / "secret").unlink()
    maker, cache = Maker(), again(cache)
    assert not cache.files()[0].sound
    cache.get(KEY, N, maker)
    assert maker.asked == 1


def test_work_that_is_cut_short_leaves_nothing_and_is_done_again(cache: FeatureCache) -> None:
    with pytest.raises(OSError, match="the power went"):
        cache.get(KEY, N, Maker(fail_at=128))
    assert cache.files() == []
    (cache.folder / "left.part").write_bytes(b"of a kill")
    maker = Maker()
    assert len(cache.get(KEY, N, maker).rows) == N
    assert sorted(p.suffix for p in cache.folder.iterdir()) == ["", ".rows"]


def test_what_was_not_used_for_longest_makes_room_and_the_other_split_stays(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "features", int(3.5 * SIZE))
    keys = [replace(KEY, maker=f"body {k}") for k in range(3)]
    for at, key in enumerate(keys):
        cache.get(key, N, Maker())
        os.utime(file_of(cache, key), (at, at))
    cache = again(cache)
    cache.get(keys[0], N, Maker())  # used now
    cache.get(replace(keys[2], split="test"), N, Maker())
    assert not file_of(cache, keys[1]).exists()
    assert file_of(cache, keys[0]).exists()
    assert file_of(cache, keys[2]).exists()
    assert sum(file.size for file in cache.files()) <= cache.max_bytes


def test_what_does_not_fit_is_refused_without_a_number_and_leaves_nothing(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "features", SIZE - 1)
    with pytest.raises(RefusedError, match=r"E-RUN-38.*--feature-cache") as caught:
        cache.get(KEY, N, Maker())
    assert not any(c.isdigit() for c in caught.value.message)
    assert cache.files() == []
    with pytest.raises(RefusedError, match="E-RUN-38"):
        cache.require_room(N, WIDTH)
    cache.require_room(N - 1, WIDTH)
    both = FeatureCache(tmp_path / "features", int(1.5 * SIZE))
    both.get(KEY, N, Maker())
    with pytest.raises(RefusedError, match="E-RUN-38"):  # training and test examples of one run
        both.get(replace(KEY, split="test"), N, Maker())


def test_features_of_data_that_changed_or_are_no_longer_served_are_deleted(cache: FeatureCache) -> None:
    cache.get(KEY, N, Maker())
    cache.get(replace(KEY, data="version 2"), N, Maker())
    assert not file_of(cache).exists()
    kept = cache.get(replace(KEY, data="version 2"), N, Maker()).rows
    cache.forget(but="folder:/data")
    assert len(cache.files()) == 1
    cache.forget(but="folder:/other")
    assert cache.files() == []
    assert kept[7, 0] == 7  # a round that reads them goes on
