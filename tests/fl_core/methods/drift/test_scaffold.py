"""SCAFFOLD on problem Q (T-SCF-1 to T-SCF-6), lost updates, and its first round on images."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fl_core.methods.drift.scaffold import Scaffold
from fl_core.methods.fedavg import FedAvg
from fl_core.types.records import TrainConfig
from tests.support.federations import QData, alternating, play, same, simulated

Q = (QData(1, 0), QData(4, 1))
A_10 = 41.381059609  # effective steps of ten steps with momentum 0.9


def test_t_scf_1_reaches_the_optimum_with_the_stated_variates() -> None:
    played = play(Scaffold(), Q, 50)
    expected = [0.4969766912, 0.6852210929, 0.7565241447, 0.7835322531, 0.7937623611]
    assert played.path[:5] == pytest.approx(expected, abs=1e-6)
    assert played.path[9] == pytest.approx(0.7999513648, abs=1e-6)
    assert played.path[-1] == pytest.approx(0.8, abs=1e-6)
    assert played.state(0, "c") == pytest.approx([0, -0.9939533824], abs=1e-6)
    assert played.server(0, "c") == pytest.approx(-0.4969766912, abs=1e-6)
    assert played.state(1, "c") == pytest.approx([0.4969766912, -0.8734654946], abs=1e-6)
    assert played.state(-1, "c") == pytest.approx([0.8, -0.8], abs=1e-6)
    assert played.server(-1, "c") == pytest.approx(0, abs=1e-6)


def test_t_scf_2_alternating_silos() -> None:
    path = play(Scaffold(), Q, 150, asked=alternating).path
    expected = [0, 0.9939533824, 0.6702617487, 0.7725500259, 0.8654178651, 0.7715876792]
    assert path[:6] == pytest.approx(expected, abs=1e-6)
    assert path[-1] == pytest.approx(0.8, abs=1e-6)


def test_t_scf_3_unequal_steps() -> None:
    silos = (QData(1, 0, steps=2), QData(4, 1, steps=20))
    path = play(Scaffold(), silos, 80).path
    assert path[:3] == pytest.approx([0.4999817192, 0.6949848723, 0.7671221026], abs=1e-6)
    assert path[9] == pytest.approx(0.8002057727, abs=1e-6)
    assert path[-1] == pytest.approx(0.8, abs=1e-6)
    assert play(FedAvg(), silos, 80).path[-1] == pytest.approx(0.8403312288, abs=1e-6)


def test_t_scf_4_unequal_sizes() -> None:
    path = play(Scaffold(), (QData(1, 0, n=1), QData(4, 1, n=3)), 80).path
    assert path[:3] == pytest.approx([0.7454650368, 0.8889021091, 0.9165012488], abs=1e-6)
    assert path[-1] == pytest.approx(12 / 13, abs=1e-6)


def test_uniform_weights_disregard_sizes() -> None:
    sized = (QData(1, 0, n=1), QData(4, 1, n=3))
    assert play(Scaffold(weights="uniform"), sized, 20).path == play(Scaffold(), Q, 20).path


def slow(rounds: int, length: float, *, inside: bool) -> list[float]:
    """SCAFFOLD on Q with momentum 0.9 and eta 0.01 in plain numbers: variates divided by eta x length.

    inside: the correction passes through the momentum buffer; else it is added to the buffer's step.
    """
    w, c, own, path = 0.0, 0.0, [0.0, 0.0], []
    for _ in range(rounds):
        moved = []
        for k, (a, b) in enumerate(((1, 0), (4, 1))):
            x, buffer = w, 0.0
            for _ in range(10):
                correction = c - own[k]
                buffer = 0.9 * buffer + a * (x - b) + (correction if inside else 0.0)
                x -= 0.01 * (buffer if inside else buffer + correction)
            moved.append(x - w)
        change = [-c - d / (0.01 * length) for d in moved]
        own = [old + d for old, d in zip(own, change, strict=True)]
        c, w = c + sum(change) / 2, w + sum(moved) / 2
        path.append(w)
    return path


def test_t_scf_5_momentum_needs_the_effective_steps() -> None:
    """T-SCF-5, and why: with K eta inside the buffer the run blows up, outside of it the fixed point is biased."""
    silos = (QData(1, 0, lr=0.01, momentum=0.9), QData(4, 1, lr=0.01, momentum=0.9))
    path = play(Scaffold(weights="uniform"), silos, 80).path
    assert path[:3] == pytest.approx([0.5763867022, 0.7745353816, 0.8087382686], abs=1e-6)
    assert path[-1] == pytest.approx(0.8, abs=1e-6)
    assert path == pytest.approx(slow(80, A_10, inside=True), abs=1e-6)
    naive = slow(20, 10, inside=True)
    assert naive[:3] == pytest.approx([0.5763867022, 0.9728200212, 0.3537926246], abs=1e-9)
    assert abs(naive[-1]) > 4e5
    assert slow(600, 10, inside=False)[-1] == pytest.approx(0.8285841897, abs=1e-9)


LOSSES: list[tuple[Callable[[int], list[int]] | None, dict[int, list[int]]]] = [
    (None, {1: [0]}),
    (None, {0: [1], 3: [0, 1], 5: [0]}),
    (alternating, {1: [1], 4: [0]}),
]


@pytest.mark.parametrize(("asked", "lost"), LOSSES)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3)])
def test_t_scf_6_c_is_the_mean_of_all_variates_whatever_is_lost(
    asked: Callable[[int], list[int]] | None, lost: dict[int, list[int]], sizes: tuple[int, int]
) -> None:
    silos = (QData(1, 0, n=sizes[0]), QData(4, 1, n=sizes[1]))
    played = play(Scaffold(), silos, 120, asked=asked, lost=lost)
    for t, server in enumerate(played.servers):
        met = float(server["census"]["silos"]) == 2
        if met or sizes[0] == sizes[1]:
            mean = sum(n * c for n, c in zip(sizes, played.state(t, "c"), strict=True)) / sum(sizes)
            assert played.server(t, "c") == pytest.approx(mean, abs=1e-12)
    optimum = sum(n * a * b for n, a, b in ((sizes[0], 1, 0), (sizes[1], 4, 1))) / (sizes[0] + 4 * sizes[1])
    assert met
    assert played.path[-1] == pytest.approx(optimum, abs=1e-6)


def test_lost_update_committed_anyway_would_bias_the_run_for_ever() -> None:
    """Section 1.5: silo 1's update of round 2 is lost. A silo that keeps its state regardless leaves 0.8 for ever."""
    assert play(Scaffold(), Q, 100, lost={1: [0]}).path[-1] == pytest.approx(0.8, abs=1e-6)
    wrong = play(Scaffold(), Q, 100, lost={1: [0]}, commit_anyway=True)
    mismatch = sum(wrong.state(-1, "c")) / 2 - wrong.server(-1, "c")
    assert mismatch == pytest.approx(0.2484883456, abs=1e-6)
    assert wrong.path[-1] == pytest.approx(0.8993953382, abs=1e-6)
    assert wrong.path[-1] - 0.8 == pytest.approx(mismatch / 2.5, abs=1e-6)


def test_silos_not_met_yet_count_with_the_mean_size_of_the_others() -> None:
    silos = (QData(1, 0, n=10), QData(4, 1, n=30), QData(2, 1, n=20))
    played = play(Scaffold(), silos, 3, asked=lambda t: [t])
    census = [(float(s["census"]["n"]), float(s["census"]["silos"])) for s in played.servers]
    assert census == [(10, 1), (40, 2), (60, 3)]
    total = [sum(n * c for n, c in zip((10, 30, 20), played.state(t, "c"), strict=True)) for t in range(3)]
    assert [played.server(t, "c") for t in range(3)] == pytest.approx(
        [total[0] / 30, total[1] / 60, total[2] / 60], abs=1e-12
    )


def test_first_round_is_fedavg_bit_for_bit_and_the_second_is_not() -> None:
    train = TrainConfig(lr=0.05, batch_size=4, epochs=1, momentum=0.9)
    finals = {
        (name, rounds): simulated(name, train=train, rounds=rounds)["w"]
        for name in ("fedavg", "scaffold")
        for rounds in (1, 2)
    }
    assert same(finals["fedavg", 1], finals["scaffold", 1])
    assert not same(finals["fedavg", 2], finals["scaffold", 2])


def test_buffers_have_no_variate_and_are_not_stretched() -> None:
    options = {"norm": "batch"}
    once, twice = (simulated("scaffold", {"server_lr": rate}, rounds=1, model_options=options) for rate in (1.0, 2.0))
    buffers = {name for name in once["w"] if "running" in name}
    assert buffers
    assert not buffers & set(once["c"])
    assert all(torch.equal(once["w"][name], twice["w"][name]) for name in buffers)
    assert not any(torch.equal(once["w"][name], twice["w"][name]) for name in once["c"])


def test_rate_of_the_round_is_the_one_that_divides() -> None:
    """Under a falling rate variates still estimate gradients: after one step from 0, c_k = a (0 - b)."""
    for rate in (0.1, 0.01):
        silos = (QData(1, 0, steps=1, lr=rate), QData(4, 1, steps=1, lr=rate))
        assert play(Scaffold(), silos, 1).state(0, "c") == pytest.approx([0, -4], abs=1e-9)
