"""FedDC on problem Q (T-DC-1, T-DC-2), lost updates, unequal sizes and steps, momentum, and prototypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fl_core.methods.drift.feddc import FedDC
from fl_core.methods.drift.feddyn import FedDyn
from fl_core.types.records import TrainConfig
from tests.support.federations import QData, alternating, play, same, simulated

pytestmark = pytest.mark.integration

Q = (QData(1, 0), QData(4, 1))
TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=1)


def cloud(control: str, alpha: float = 1.0) -> FedDC:
    return FedDC(alpha=alpha, control=control, report="cloud")


@pytest.mark.parametrize(
    ("control", "first", "tenth", "h", "c"),
    [
        ("code", [0.79921875, 0.9414139632, 0.8854285464], 0.8000028048, 0.4, 0.4),
        ("paper", [0.79921875, 0.9414139632, 0.7869215502], 0.7952603636, 0.8, 0.0),
    ],
)
def test_t_dc_1_both_readings_reach_the_optimum(
    control: str, first: list[float], tenth: float, h: float, c: float
) -> None:
    played = play(cloud(control), Q, 100)
    assert played.path[:3] == pytest.approx(first, abs=1e-6)
    assert played.path[9] == pytest.approx(tenth, abs=1e-6)
    assert played.path[-1] == pytest.approx(0.8, abs=1e-6)
    assert played.state(-1, "m") == pytest.approx([-h, h], abs=1e-6)
    assert played.state(-1, "c") == pytest.approx([c, -c], abs=1e-6)
    assert played.server(-1, "c") == pytest.approx(0, abs=1e-6)


def test_t_dc_2_without_control_it_is_feddyn() -> None:
    path = play(cloud("none"), Q, 100).path
    assert path[:3] == pytest.approx([0.79921875, 0.8429069670, 0.8132641514], abs=1e-6)
    assert path[9] == pytest.approx(0.7993104431, abs=1e-6)
    assert path[-1] == pytest.approx(0.8, abs=1e-6)
    assert path == play(FedDyn(alpha=1, report="cloud"), Q, 100).path
    drift, dyn = (
        simulated(name, {"alpha": 0.1, **options}, train=TRAIN)
        for name, options in (("feddc", {"control": "none"}), ("feddyn", {}))
    )
    assert set(drift) == set(dyn)
    assert all(same(drift[group], dyn[group]) for group in dyn)


LOSSES: list[tuple[Callable[[int], list[int]] | None, dict[int, list[int]]]] = [
    (None, {1: [0], 4: [0, 1], 6: [1]}),
    (alternating, {1: [1], 4: [0]}),
]


@pytest.mark.parametrize("control", ["code", "paper"])
@pytest.mark.parametrize(("asked", "lost"), LOSSES)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3)])
def test_server_mirrors_all_states_whatever_is_lost(
    control: str,
    asked: Callable[[int], list[int]] | None,
    lost: dict[int, list[int]],
    sizes: tuple[int, int],
) -> None:
    silos = (QData(1, 0, n=sizes[0]), QData(4, 1, n=sizes[1]))
    played = play(cloud(control), silos, 20, asked=asked, lost=lost)
    for t, server in enumerate(played.servers):
        assert played.server(t, "m") == pytest.approx(sum(played.state(t, "m")) / 2, rel=1e-6, abs=1e-6)
        if float(server["census"]["silos"]) == 2 or sizes[0] == sizes[1]:
            mean = sum(n * c for n, c in zip(sizes, played.state(t, "c"), strict=True)) / sum(sizes)
            assert played.server(t, "c") == pytest.approx(mean, abs=1e-9)


def test_lost_update_does_no_harm_and_committed_anyway_it_would() -> None:
    """Section 1.5 for FedDC: the run that keeps states of lost updates never comes back to 0.8."""
    assert play(cloud("code"), Q, 80, lost={1: [0]}).path[-1] == pytest.approx(0.8, abs=1e-6)
    wrong = play(cloud("code"), Q, 80, lost={1: [0]}, commit_anyway=True).path
    assert abs(wrong[-1] - 0.8) > 0.01
    assert wrong[-1] == pytest.approx(wrong[-20], abs=1e-6)


@pytest.mark.parametrize("control", ["code", "paper", "none"])
def test_unequal_sizes_reach_the_weighed_optimum(control: str) -> None:
    sized = (QData(1, 0, n=1), QData(4, 1, n=3))
    assert play(cloud(control), sized, 60).path[-1] == pytest.approx(12 / 13, abs=1e-6)
    uniform = FedDC(alpha=1, control=control, weights="uniform", report="cloud")
    assert play(uniform, sized, 10).path == play(cloud(control), Q, 10).path


@pytest.mark.parametrize("control", ["code", "paper", "none"])
def test_unequal_steps_reach_the_optimum(control: str) -> None:
    silos = (QData(1, 0, steps=2), QData(4, 1, steps=20))
    assert play(cloud(control), silos, 140).path[-1] == pytest.approx(0.8, abs=1e-6)


def test_momentum_enters_by_the_effective_steps() -> None:
    silos = (QData(1, 0, lr=0.01, momentum=0.9), QData(4, 1, lr=0.01, momentum=0.9))
    played = play(cloud("paper"), silos, 100)
    assert played.path[-1] == pytest.approx(0.8, abs=1e-6)
    moved = [played.trained[0][k] for k in (0, 1)]
    assert played.state(0, "c") == pytest.approx([-d / (0.01 * 41.381059609) for d in moved], abs=1e-6)


def test_readings_part_from_the_third_round_on() -> None:
    paths = [play(cloud(control), Q, 3).path for control in ("code", "paper")]
    assert paths[0][:2] == pytest.approx(paths[1][:2], abs=1e-9)
    assert abs(paths[0][2] - paths[1][2]) > 0.05
