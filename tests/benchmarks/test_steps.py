"""The benchmarks of steps compare ways that do the same work, and print what they say; no test here looks at a time."""

from __future__ import annotations

import json
import math
import sys
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import timing
from benchmarks.simulate import __main__ as simulate_program
from benchmarks.steps import __main__ as program
from benchmarks.steps.ways import OpacusSteps, PlainSteps, PrivateSteps, Setting, plan_of, ways
from fl_core.methods.disjoint.fedmr import FedMR
from fl_core.methods.fedavg import FedAvg
from fl_core.types import tensor_maps
from fl_core.types.records import TrainConfig
from privacy.mechanisms.record.per_sample_gradients import MODES

SMALL = Setting("digits_cnn", {}, shape=(1, 8, 8), batch=20, schedule=TrainConfig(lr=1.0))
MACHINE = {"processor", "device", "threads", "python", "torch"}


def apart(a: nn.Module, b: nn.Module) -> float:
    return max(
        float((v - tensor_maps.copy_state(b)[name]).abs().max()) for name, v in tensor_maps.copy_state(a).items()
    )


def moved(model: nn.Module, setting: Setting = SMALL) -> float:
    return apart(model, setting.build())


def test_fedmr_takes_its_losses_and_fedavg_none() -> None:
    examples = SMALL.examples()
    fedmr, fedavg = (PlainSteps(SMALL, examples, m) for m in (FedMR(mu1=1e-3, mu2=0.01, eps=1e-3), FedAvg()))
    for run in (fedmr, fedavg):
        run.take(1)
    assert apart(fedmr.model, fedavg.model) > 0.01 * moved(fedmr.model)


def test_private_steps_are_those_of_opacus() -> None:
    """Without noise: the same model, batch and clip, which cuts (the steps are not the plain ones)."""
    examples, plan = SMALL.examples(), plan_of(SMALL)
    plan.__dict__["noise"] = 0.0
    opacus, plain = OpacusSteps(SMALL, examples, plan), PlainSteps(SMALL, examples, FedAvg())
    private = [PrivateSteps(SMALL, examples, plan, mode) for mode in MODES]
    for run in (opacus, plain, *private):
        run.take(1)
    for run in private:
        assert apart(run.model, opacus.model) < 1e-4 * moved(opacus.model)
    assert apart(opacus.model, plain.model) > 0.1 * moved(plain.model)


def test_private_steps_have_the_noise_of_opacus() -> None:
    examples, plan = SMALL.examples(), plan_of(SMALL)
    plan.__dict__["noise"] = 50.0  # much more than the gradients
    runs = (
        OpacusSteps(SMALL, examples, plan),
        PrivateSteps(SMALL, examples, plan),
        PrivateSteps(SMALL, examples, plan, secure=True),
    )
    expected = SMALL.train.lr * 50.0 / SMALL.batch
    for run in runs:
        run.take(1)
        steps = torch.cat(
            [
                (v - tensor_maps.copy_state(SMALL.build())[n]).flatten()
                for n, v in tensor_maps.copy_state(run.model).items()
            ]
        )
        assert float(steps.std()) == pytest.approx(expected, rel=0.02)


def test_each_mode_of_a_model_is_measured() -> None:
    assert set(ways(SMALL)) == {"plain", "fedmr", "opacus", *MODES, "secure"}


def test_turns_are_taken_one_after_the_other_and_warm_up_is_not_counted() -> None:
    order: list[str] = []
    found = timing.interleaved({name: partial(order.append, name) for name in "ab"}, turns=3, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(t.wall) for name, t in found.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_the_median_over_turns() -> None:
    ours, bare = timing.Timed([1.0, 9.0, 3.0], [1.0, 1.0, 1.0]), timing.Timed([1.0, 1.0, 2.0], [2.0, 2.0, 2.0])
    assert timing.ratio(ours, bare) == {"ratio": 1.5, "cpu_ratio": 0.5}


def test_every_way_is_reported_with_its_ratios() -> None:
    found = program.measure(SMALL, turns=1, steps=1)
    names = ("plain", "fedmr", "opacus", "bookkeeping", "hooks", "secure")
    keys = {f"{way}_{kind}" for way in names for kind in ("ms", "cpu_ms")}
    assert set(found) == {"batch", "mode", "to_opacus", "to_plain", *keys}
    assert set(found["to_opacus"]) == {"bookkeeping", "hooks", "secure"}  # type: ignore[call-overload]
    assert set(found["to_plain"]) == {*names} - {"plain"}  # type: ignore[call-overload]


def test_the_plain_loop_does_what_the_federation_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # At a rate of 0.1 training is so unstable that the last bit of the first mean grows to 3e-3 on some processors.
    words = ["simulate", "--silos", "3", "--rounds", "2", "--words", "train.epochs=2", "train.lr=0.01", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    simulate_program.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert (found["silos"], found["rounds"]) == (3, 2)
    assert found["steps"] == 2 * sum(2 * math.ceil(n / 32) for n in [479, 479, 479])
    assert found["accuracy"] == found["plain_accuracy"] > 0.3
    assert found["weights_apart"] < 1e-4
    ratios = {f"{cpu}ratio{of}" for cpu in ("", "cpu_") for of in ("", "_of_rounds", "_evaluated")}
    names = ("federation", "plain", "plain_evaluation")
    seconds = {f"{name}{cpu}_seconds" for name in names for cpu in ("", "_cpu")}
    assert set(found) == MACHINE | ratios | seconds | {
        "silos",
        "rounds",
        "epochs",
        "steps",
        "accuracy",
        "plain_accuracy",
        "weights_apart",
    }
