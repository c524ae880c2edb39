"""Silos trained in one tensor: within float noise of the loop, whatever their sizes; refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_core.errors import ConfigError
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.batched import BatchedCohort, simulate_batched
from fl_core.simulation.in_process import RoundHistory, SiloShare, local_ports, run_rounds, simulate
from fl_core.types.records import TrainConfig
from tests.support.federations import Given, manifest, shares

SGD = TrainConfig(lr=0.05, batch_size=4, epochs=2)
CASES = {
    "fedavg": ("fedavg", {}, SGD),
    "one step each": ("fedavg", {}, replace(SGD, batch_size=64, epochs=1)),
    "uniform weights, decay, nesterov": (
        "fedavg",
        {"weights": "uniform"},
        replace(SGD, weight_decay=0.1, nesterov=True, lr_decay=0.5),
    ),
    "no momentum, a limit of steps": ("fedavg", {}, replace(SGD, momentum=0.0, max_steps=3)),
    "fedprox, clipped": ("fedprox", {"mu": 0.5}, replace(SGD, clip_norm=0.3)),
    "augmented": ("fedavg", {}, replace(SGD, augment=True)),
}


def uneven() -> list[SiloShare]:
    """Give silos 14, 6 and 1 training examples, and none to test at the second."""
    found = shares()
    for k, n in ((1, 6), (2, 1)):
        train = found[k].train
        assert isinstance(train, Given)
        found[k] = replace(found[k], train=Given(train.x[:n], train.labels[:n]))
    test = found[1].test
    assert isinstance(test, Given)
    found[1] = replace(found[1], test=Given(test.x[:0], test.labels[:0]))
    return found


@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, "digits_mlp") for name in CASES), ("fedavg", "digits_cnn"), ("augmented", "digits_cnn")],
)
def test_a_batched_run_is_within_float_noise_of_the_loop(name: str, model: str) -> None:
    method, options, train = CASES[name]
    run = RunSetup.of(manifest(method, options, train=train, model=model, rounds=2))
    loop, batched = RoundHistory(), RoundHistory()
    expected, found = simulate(run, uneven(), loop), simulate_batched(run, uneven(), batched)
    assert set(found["w"]) == set(expected["w"])
    start = run.initial_state()["w"]
    for w, value in expected["w"].items():
        assert (found["w"][w] - value).norm() <= 1e-4 * (value - start[w]).norm() + 1e-6, w
    assert [r.examples for r in batched.records] == [r.examples for r in loop.records]
    assert [r.included for r in batched.records] == [r.included for r in loop.records]
    assert batched.records[0].correct == loop.records[0].correct


def test_how_many_silos_are_in_one_tensor_changes_nothing_but_noise_and_a_cohort_is_drawn_as_ever() -> None:
    run = RunSetup.of(manifest(train=SGD, cohort=2, rounds=3))
    alone, history = RoundHistory(), RoundHistory()
    cohort = BatchedCohort(run, torch.device("cpu"), at_once=1)
    loop = run.round_loop(local_ports(run, shares()), parallel=1, exchange=cohort.exchange)
    expected, found = run_rounds(loop, run, alone, None), simulate_batched(run, shares(), history)
    assert all(torch.allclose(found["w"][name], v, atol=1e-5) for name, v in expected["w"].items())
    assert [r.included for r in history.records] == [r.included for r in alone.records]


def test_a_silo_without_examples_is_refused_as_in_the_loop() -> None:
    run, given = RunSetup.of(manifest(train=SGD, rounds=1, quorum=2)), shares()
    given[0] = replace(given[0], train=Given(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)))
    loop, batched = RoundHistory(), RoundHistory()
    simulate(run, given, loop)
    simulate_batched(run, given, batched)
    assert batched.records[0].missing == loop.records[0].missing
    assert batched.records[0].missing["north"].startswith("E-DATA-08")


@pytest.mark.parametrize(
    ("method", "options", "more", "named"),
    [
        ("scaffold", {}, {}, "scaffold"),
        ("fedmr", {}, {}, "fedmr"),
        ("fedprox", {"prototypes": "additive"}, {}, "without prototypes"),
        ("fedavg", {}, {"personal": True}, "personal"),
        ("fedavg", {}, {"train": replace(SGD, optimizer="adam")}, "sgd"),
        ("fedavg", {}, {"train": replace(SGD, amp="bf16")}, "bf16"),
        ("fedavg", {}, {"train": replace(SGD, channels_last=True)}, "channels_last=true"),
        ("fedavg", {}, {"train": replace(SGD, compile=True)}, "compile=true"),
        ("fedavg", {}, {"train": replace(SGD, cudnn_benchmark=True)}, "cudnn_benchmark=true"),
        ("fedavg", {}, {"model_options": {"norm": "batch"}}, "BatchNorm2d"),
    ],
)
def test_what_cannot_train_in_one_tensor_is_refused_with_what_was_found(
    method: str, options: dict[str, object], more: dict[str, object], named: str
) -> None:
    run = RunSetup.of(manifest(method, options, **more))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{named}.*--engine local") as caught:
        simulate_batched(run, shares(), RoundHistory())
    assert caught.value.code == "E-CFG-08"
