"""Work in pieces is done once for every piece, whoever does it, and an error of one is heard of."""

from __future__ import annotations

import threading

import pytest
import torch

from fl_core.blockwise import parallel as pieces
from fl_core.blockwise.parallel import PIECE, cut, side_by_side
from fl_core.types import tensor_maps as trees
from fl_core.types.values import Part


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pieces, "THREADS", request.param)
    return int(request.param)


@pytest.mark.parametrize("n", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_pieces_are_views_of_all_tensors_at_the_same_places(n: int) -> None:
    a, b = torch.zeros(n), torch.arange(n).reshape(1, n)
    for x, y in cut(a, b):
        assert 0 < len(x) <= PIECE
        x += y
    assert torch.equal(a, torch.arange(n).float())


@pytest.mark.parametrize("n", [0, 1, 3, 4, 100])
def test_every_piece_is_done_once(threads: int, n: int) -> None:
    done: list[int] = []
    side_by_side(done.append, range(n))
    assert sorted(done) == list(range(n))


def test_several_threads_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "THREADS", 3)
    together = threading.Barrier(3)  # broken, and so an error, unless three of them come
    side_by_side(lambda _: together.wait(20), range(12))


def test_an_error_is_raised_when_no_thread_works_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "THREADS", 3)
    in_hand, done = threading.Barrier(3), list[int]()

    def work(piece: int) -> None:
        if piece < 3:
            in_hand.wait(20)  # each of three threads has one
        if piece == 0:
            raise ValueError("this one")
        done.append(piece)

    with pytest.raises(ValueError, match="this one"):
        side_by_side(work, range(10_000))
    assert sorted(done) == list(range(1, 10_000))  # by the two others, which nobody waits for after this


def test_an_error_of_a_single_thread_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "THREADS", 1)
    done: list[int] = []

    def work(piece: int) -> None:
        if piece == 50:
            raise ValueError("this one")
        done.append(piece)

    with pytest.raises(ValueError, match="this one"):
        side_by_side(work, range(100))
    assert done == list(range(50))


def test_sums_and_means_are_the_same_to_the_last_bit_however_many_threads(threads: int) -> None:
    made = torch.Generator().manual_seed(0)
    shapes = [(3, PIECE), (PIECE // 2 + 1, 3), (7,), ()]
    a = {str(i): torch.randn(shape, generator=made) for i, shape in enumerate(shapes)}
    b = {str(i): torch.randn(shape, generator=made) for i, shape in enumerate(shapes)}
    for name, total in trees.add(a, b).items():
        assert torch.equal(total, a[name] + b[name])
    mean = Part({name: v.double() for name, v in a.items()}, torch.tensor(7.0)).mean()
    for name, v in mean.items():
        assert v.shape == a[name].shape
        assert torch.equal(v, (a[name].double() / 7.0).float())


def test_a_mean_beyond_float32_is_infinite_without_a_warning() -> None:
    mean = Part({"x": torch.tensor([1e300, -1e300, 3.0], dtype=torch.float64)}, torch.tensor(3.0)).mean()
    assert mean["x"].tolist() == [float("inf"), float("-inf"), 1.0]
