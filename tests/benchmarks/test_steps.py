"""The benchmarks of steps compare ways that do the same work, and print what they say; no test here looks at a time."""

from __future__ import annotations

import json
import math
import sys
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import dp_step, simulate, step_cost, throughput, timing
from benchmarks.dp_step import __main__ as dp_step_program
from benchmarks.dp_step.arms import OpacusSteps, PlainSteps, PrivateSteps, arms, course_of
from benchmarks.local_step import BareSteps, Setting, Steps, method_of
from benchmarks.simulate import __main__ as simulate_program
from benchmarks.step_cost import __main__ as step_cost_program
from benchmarks.step_cost.naive import LoopFedMR, intra_loop
from benchmarks.throughput import __main__ as throughput_program
from fl_core.methods.disjoint.fedmr import FedMR
from fl_core.methods.losses.fedmr import IntraVariant, intra_loss
from fl_core.types import tensor_maps as trees
from fl_core.types.values import TrainConfig
from privacy.dp_sgd.per_sample_gradients import MODES

SMALL = Setting("digits_cnn", shape=(1, 8, 8), batch=20, schedule=TrainConfig(lr=1.0))
MACHINE = {"processor", "device", "threads", "python", "torch"}


def apart(a: nn.Module, b: nn.Module) -> float:
    return max(float((v - trees.read(b)[name]).abs().max()) for name, v in trees.read(a).items())


def moved(model: nn.Module, setting: Setting = SMALL) -> float:
    return apart(model, setting.build())


@pytest.mark.parametrize("found", [step_cost, throughput, simulate, dp_step])
def test_every_benchmark_says_what_it_is_for(found: object) -> None:
    assert found.__doc__


def test_the_loop_over_classes_is_the_same_loss() -> None:
    g = torch.Generator().manual_seed(0)
    for labels in (torch.arange(20) % 10, torch.tensor([0, 0, 0, 1, 2, 2, 5]), torch.arange(4)):
        z = torch.randn(len(labels), 512, generator=g).double()
        ours = intra_loss(z, labels, 10, IntraVariant())
        assert torch.allclose(intra_loop(z, labels, 10, 1e-8), ours, rtol=1e-9)


def test_fedmr_with_the_loop_takes_the_same_steps() -> None:
    examples = SMALL.examples()
    runs = [
        Steps(SMALL, examples, m)
        for m in (FedMR(mu1=1e-3, eps=1e-3), LoopFedMR(mu1=1e-3, eps=1e-3), method_of("fedavg"))
    ]
    for run in runs:
        run.take(1)
    ours, loop, fedavg = (run.model for run in runs)
    assert apart(ours, loop) < 1e-4 * moved(ours)
    assert apart(ours, fedavg) > 0.1 * moved(ours)  # the losses are there


@pytest.mark.parametrize("name", ["fedavg", "fedmr"])
def test_the_bare_loop_takes_the_same_steps_bit_for_bit(name: str) -> None:
    setting = Setting("digits_cnn", shape=(1, 8, 8), batch=20, batches=3, schedule=TrainConfig(channels_last=True))
    examples, method = setting.examples(), method_of(name)
    runs = Steps(setting, examples, method), BareSteps(setting, examples, method)
    for run in runs:
        run.take(4)
        run.take(2)
    assert trees.digest(trees.read(runs[0].model)) == trees.digest(trees.read(runs[1].model))
    assert moved(runs[0].model) > 0


def test_private_steps_are_those_of_opacus() -> None:
    """Without noise: the same model, batch and clip, which cuts (the steps are not the plain ones)."""
    examples, course = SMALL.examples(), course_of(SMALL)
    course.__dict__["noise"] = 0.0
    opacus, plain = OpacusSteps(SMALL, examples, course), PlainSteps(SMALL, examples)
    private = [PrivateSteps(SMALL, examples, course, mode) for mode in MODES]
    for run in (opacus, plain, *private):
        run.take(1)
    for run in private:
        assert apart(run.model, opacus.model) < 1e-4 * moved(opacus.model)
    assert apart(opacus.model, plain.model) > 0.1 * moved(plain.model)


def test_private_steps_have_the_noise_of_opacus() -> None:
    examples, course = SMALL.examples(), course_of(SMALL)
    course.__dict__["noise"] = 50.0  # much more than the gradients
    ways = (
        OpacusSteps(SMALL, examples, course), PrivateSteps(SMALL, examples, course),
        PrivateSteps(SMALL, examples, course, secure=True),
    )  # fmt: skip
    expected = SMALL.train.lr * 50.0 / SMALL.batch
    for way in ways:
        way.take(1)
        steps = torch.cat([(v - trees.read(SMALL.build())[n]).flatten() for n, v in trees.read(way.model).items()])
        assert float(steps.std()) == pytest.approx(expected, rel=0.02)


def test_each_mode_of_a_model_is_measured() -> None:
    assert set(arms(SMALL)) == {"plain", "opacus", *MODES, "secure"}


def test_turns_are_taken_one_after_the_other_and_warm_up_is_not_counted() -> None:
    order: list[str] = []
    found = timing.interleaved({name: partial(order.append, name) for name in "ab"}, turns=3, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(t.wall) for name, t in found.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_the_median_over_turns() -> None:
    ours, bare = timing.Timed([1.0, 9.0, 3.0], [1.0, 1.0, 1.0]), timing.Timed([1.0, 1.0, 2.0], [2.0, 2.0, 2.0])
    assert timing.ratio(ours, bare) == {"ratio": 1.5, "cpu_ratio": 0.5}


def test_step_cost_and_throughput_report_what_they_measured() -> None:
    found = step_cost_program.measure(SMALL, turns=1, steps=1)
    ways = [
        f"{name}_{kind}"
        for name in ("fedavg", "fedmr", "fedmr_loop", "intra", "intra_loop")
        for kind in ("ms", "cpu_ms")
    ]
    assert set(found) == MACHINE | {
        "model", "features", "batch", "classes_in_batch", "turns", "steps_per_turn", *ways, "ratio", "cpu_ratio",
        "loop_ratio", "loop_cpu_ratio",
    }  # fmt: skip
    assert (found["features"], found["batch"], found["classes_in_batch"]) == (64, 20, 10)
    rates = throughput_program.measure(SMALL, ["fedavg"], turns=1, steps=2)
    assert set(rates) == MACHINE | {"model", "batch", "amp", "channels_last", "turns", "steps_per_turn", "methods"}
    assert {"ratio", "cpu_ratio", "images_per_second", "bare_images_per_second"} <= set(rates["methods"]["fedavg"])  # type: ignore[arg-type,index]


def test_step_cost_is_measured_on_ten_classes_and_512_features() -> None:
    setting = Setting()
    assert setting.build().feature_dim == 512
    assert sorted(setting.examples().labels[: setting.batch].unique().tolist()) == list(range(10))
    assert len(setting.examples()) == setting.batch  # so every step sees them all


def test_dp_step_reports_every_way_and_its_ratios() -> None:
    found = dp_step_program.measure(SMALL, turns=1, steps=1)
    ways = ("plain", "opacus", "bookkeeping", "hooks", "secure")
    keys = {f"{way}_{kind}" for way in ways for kind in ("ms", "cpu_ms")}
    assert set(found) == {"batch", "mode", "to_opacus", "to_plain", *keys}
    assert set(found["to_opacus"]) == {"bookkeeping", "hooks", "secure"}  # type: ignore[call-overload]


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
        "silos", "rounds", "epochs", "steps", "accuracy", "plain_accuracy", "weights_apart",
    }  # fmt: skip
