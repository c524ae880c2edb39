"""A coordinator that chooses the model and knows all records but one: no printed epsilon is refuted, every fault is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy.stats import kstest

from benchmarks.audit.faults import FAULTS
from consilium.audit import hostile
from consilium.audit.step_checks import ZeroNoise
from consilium.audit.target import ListedExamples
from consilium.audit.worlds import Attack, AttackResult, measure
from fl_core.methods.disjoint.analytic import OF_MEAN
from privacy.mechanisms.noise.sources import NoiseSource, SeededNoise

pytestmark = pytest.mark.integration

QUICK = ("overflow", "layer norm", "prototype", "low bits", "convolution", "linear", "normalisation", "moments")
LONG = ("augmentation", "dropout", "batch shape", "worst record", "class of one", "centred release")
TRIALS = 60
"""Enough to refute an epsilon of 1.3 where the worlds are told apart every time."""


def attacked(
    name: str, source: Callable[[bool, int], NoiseSource] | None = None, trials: int | None = None
) -> AttackResult:
    (attack,) = hostile.attacks(name)
    return measure(attack, source, trials)


def test_the_attacks_are_those_that_are_tested() -> None:
    assert {a.name for a in hostile.attacks()} == {*QUICK, *LONG}


@pytest.mark.parametrize("name", QUICK)
def test_no_attack_refutes_the_epsilon_that_is_printed(name: str) -> None:
    """A true claim is refuted once in twenty: three tries."""
    assert any(attacked(name, trials=TRIALS).holds for _ in range(3))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_no_attack_refutes_the_epsilon_that_is_printed_in_many_trials(name: str) -> None:
    for _ in range(3):
        found = attacked(name)
        if found.holds:
            break
    assert found.holds, found


@pytest.mark.parametrize(
    ("fault", "name", "trials"),
    [
        ("finite check removed", "overflow", TRIALS),
        pytest.param("finite check removed", "layer norm", TRIALS, marks=pytest.mark.slow),
        ("finite check removed", "prototype", TRIALS),
        ("rounding removed", "low bits", TRIALS // 2),
        pytest.param("draws by position", "augmentation", 150, marks=pytest.mark.slow),
        ("draws by position", "dropout", 110),
        ("any batch shape", "batch shape", 110),
        ("convolutions not clipped", "convolution", TRIALS),
        ("moments not clipped", "moments", TRIALS),
        ("halved noise on moments", "class of one", 400),
        ("halved noise on moments", "centred release", 150),
    ],
)
def test_an_attack_sees_the_fault_that_it_is_there_for(fault: str, name: str, trials: int) -> None:
    if fault == "any batch shape" and not _shapes_differ():
        pytest.skip("this machine's kernels round alike in batches of 3 and of 4")
    with FAULTS[fault]():
        found = attacked(name, _seeded, trials)
    assert max(found.lower, found.gaussian) > found.printed, found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_worst_record_sees_half_of_the_noise_missing() -> None:
    with FAULTS["halved noise"]():
        found = attacked("worst record", _seeded)
    assert found.gaussian > found.printed


SILENT = ZeroNoise(torch.zeros(0))


def _exchanges(release: torch.Tensor) -> list[torch.Tensor]:
    """Return (svec(A), B) of both exchanges of the centred release, whose mean is one number."""
    svec = torch.tensor([1.0, math.sqrt(2.0), 1.0] + [1.0] * 8, dtype=torch.float64)
    return [part[:11] * svec for part in torch.split(release, 12)[:2]]


def test_the_neighbours_of_the_centred_attack_are_as_far_apart_as_is_accounted() -> None:
    """And no other record is further away, whatever the mean is about which the second sum is taken."""
    (attack,) = hostile.attacks("centred release")
    most = (1.0, math.sqrt(2.0))
    worst = _moved(attack, torch.tensor([-0.9]).double())
    assert worst == pytest.approx(most, abs=1e-3)
    furthest = [0.0, 0.0]
    for value in (-1e38, -3.0, -1.0, -0.2, 0.0, 1e-40, 0.4, 1.1, 1e30, math.nan, math.inf):
        for mean in (-1e30, -0.97, -0.3, 0.0, 0.5, 2.0):
            x = attack.both.batch(torch.arange(401))[0].clone()
            x[-1] = value
            moved = _moved(replace(attack, both=ListedExamples(x, attack.both.labels)), torch.tensor([mean]).double())
            furthest = [max(pair) for pair in zip(furthest, moved, strict=True)]
    assert all(found <= bound * (1 + 1e-12) for found, bound in zip(furthest, most, strict=True))


def _moved(attack: Attack, mean: torch.Tensor) -> list[float]:
    pair = (_exchanges(attack.released(world, SILENT, mean)) for world in (False, True))
    return [float((a - b).norm()) for a, b in zip(*pair, strict=True)]


def test_the_noise_of_both_centred_exchanges_is_the_gaussian_that_is_charged() -> None:
    """1 / z^2 is shared between them."""
    (attack,) = hostile.attacks("centred release")
    assert attack.shares == pytest.approx({0: OF_MEAN, 1: 1 - OF_MEAN})
    drawn: list[list[torch.Tensor]] = [[], []]
    for trial in range(150):
        release = attack.released(False, _seeded(False, trial))
        expected = _exchanges(attack.released(False, SILENT, release[-1:]))
        for of, noisy, exact in zip(drawn, _exchanges(release), expected, strict=True):
            of.append(noisy - exact)
    of_mean, of_sums = (torch.stack(rows) for rows in drawn)
    assert not bool(of_mean[:, [0, 1, 2, *range(5, 11)]].any())  # no moments, one sum
    z = attack.noise
    for noise, std in ((of_mean[:, 3:5], z / math.sqrt(OF_MEAN)), (of_sums, z * math.sqrt(2 / (1 - OF_MEAN)))):
        assert kstest((noise / std).flatten().numpy(), "norm").pvalue > 1e-3
        assert kstest((noise / std / 2).flatten().numpy(), "norm").pvalue < 1e-3


def _seeded(world: bool, trial: int) -> NoiseSource:
    """Noise that repeats, of a source that may be called private: layers draw as they do at a hospital."""

    class Repeating(SeededNoise):
        private = True

    return Repeating(trial, "attack", int(world))


def _shapes_differ() -> bool:
    (attack,) = hostile.attacks("batch shape")
    silent = ZeroNoise(torch.zeros(0))
    with FAULTS["any batch shape"]():
        moved = attack.released(True, silent) - attack.released(False, silent)
    return float(moved.norm()) > 1.5
