"""A coordinator that chooses the model and knows all records but one: no printed epsilon is refuted, every fault is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.audit.faults import FAULTS
from consilium.audit import hostile
from consilium.audit.step_checks import ZeroNoise
from consilium.audit.worlds import AttackResult, measure
from privacy.mechanisms.noise.sources import NoiseSource, SeededNoise

pytestmark = pytest.mark.integration

QUICK = ("overflow", "layer norm", "prototype", "low bits", "convolution", "linear", "normalisation", "moments")
LONG = ("augmentation", "dropout", "batch shape", "worst record", "class of one")
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
