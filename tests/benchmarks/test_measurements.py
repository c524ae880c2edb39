"""What the benchmarks measure is what they say; no test here looks at a time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import run_store
from benchmarks.comparison import study
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import skin
from benchmarks.honest.__main__ import SETTINGS, Case, measure
from benchmarks.privacy_budget import search
from benchmarks.round_trip.models import workload
from benchmarks.simulate import __main__ as simulate_program
from benchmarks.steps.ways import OpacusSteps, PlainSteps, PrivateSteps, Setting, plan_of
from consilium.research.engines.in_process import RoundHistory, SiloShare, simulate
from consilium.research.simulate import runner
from consilium.research.simulate.runner import build_simulation
from coordinator.config.hydra_config import compose_simulation, compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core import datasets
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.metric_parts import GLOBAL_PARTS
from fl_core.types.records import TrainConfig
from fl_core.types.values import Part
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.record.per_sample_gradients import MODES
from protos.wire.codec import pack_bundle, pack_state
from tests.support.data import isic_row, write_csv, write_isic

pytestmark = pytest.mark.integration

SMALL = Setting("digits_cnn", {}, shape=(1, 8, 8), batch=20, schedule=TrainConfig(lr=1.0))


def apart(a: nn.Module, b: nn.Module) -> float:
    return max(
        float((v - tensor_maps.copy_state(b)[name]).abs().max()) for name, v in tensor_maps.copy_state(a).items()
    )


def moved(model: nn.Module, setting: Setting = SMALL) -> float:
    return apart(model, setting.build())


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


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_small_round_trip_counts_the_bytes_of_its_messages() -> None:
    words = [sys.executable, "-m", "benchmarks.round_trip", "--silos", "2", "--params", "50000", "--rounds", "13"]
    done = subprocess.run(
        [*words, "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["silos"], found["rounds"], found["starts"]) == (2, 13, 2)
    manifest = manifest_from(
        compose_spec([*workload(50_000).overrides, "rounds=15", "method=fedavg"]), ["hospital0", "hospital1"]
    )
    state = RunSetup.of(manifest).initial_state()
    parts = {
        name: Part({key: torch.zeros(s) for key, s in spec.shapes.items()}, torch.zeros(spec.weight_shape))
        for name, spec in manifest.layout.items()
    }
    up, down = len(pack_bundle(parts)), len(pack_state(state))
    assert (found["bytes_up"], found["bytes_down"]) == (up, down)
    closing = len(pack_bundle({name: parts[name] for name in GLOBAL_PARTS}))
    rounds = 3 + 12 + 3 + 1  # of two starts, with those that warm up
    assert found["run_bytes_up"] == 2 * (rounds * up + 2 * closing)
    broadcasts = 2 * (rounds + 2) * down  # with the closing evaluations; beside them each silo reads the manifest
    assert 0 < found["run_bytes_down"] - broadcasts < 2 * 2 * 20_000
    assert (len(found["round_seconds_each"]), len(found["warm_up_seconds_each"])) == (13, 4)
    assert all(s > 0 for s in (*found["round_seconds_each"], *found["bare_stream_seconds_each"]))


def test_a_gpu_visit_is_ten_minutes_with_the_medical_rows_first_and_checks_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--dry-run", "--out", str(tmp_path)]) == 0  # without images and without a GPU
    rows = capsys.readouterr().out.splitlines()
    assert [row[:22].strip() for row in rows[:-1]] == [*gpu.STEPS]
    assert rows[0].startswith("skin")
    assert rows[-2].startswith("check")
    seconds = {row[:22].strip(): float(row[22:].split()[0]) for row in rows}
    begun = [row[:22].strip() for row in rows[:-1] if "next visit" not in row]
    assert sum(seconds[name] for name in begun) == seconds["in this visit"] <= 600
    assert (tmp_path / "fmnist_p5c2_resnet18.jsonl").exists()  # what the tree has is not computed again
    now = gpu.Visit(tmp_path, "cpu", math.inf, False, None, tmp_path, 1)
    now.note("steps.jsonl", {"step": "throughput", "complete": True})
    assert "throughput" not in gpu.estimates(now)
    run_store.append(tmp_path / skin.STORE, {"key": "a", "balanced": [0.1] * 21})
    assert gpu.estimates(now)["skin"] == pytest.approx(seconds["skin"] - 20 * skin.IMAGES / skin.PER_SECOND, abs=0.6)


def test_a_step_that_does_not_fit_into_the_minutes_left_is_left_to_the_next_visit(tmp_path: Path) -> None:
    made = list[str]()
    steps = {name: lambda _, name=name: made.append(name) or {} for name in ("skin", "tests", "check plain")}
    now = gpu.Visit(tmp_path, "cpu", time.monotonic() + 30, False, None, tmp_path, 1)
    assert gpu.visit(now, steps) == 0
    assert made == ["skin", "check plain"]


@pytest.mark.parametrize("method", skin.METHODS)
def test_every_medical_row_composes_for_the_whole_network(method: str) -> None:
    words = (*skin.WORDS.split(), "federation.centers=[1,2,3,5]", f"model.weights={skin.weights()}")
    pilot, table, elsewhere = (
        skin.trial(method, 0.01, seed, more, None, "cuda")
        for seed, more in ((100, words), (10, words), (10, (*words[:-1], "model.weights=/else/" + skin.weights().name)))
    )
    assert ("rounds=4" in pilot.words, "rounds=20" in table.words) == (True, True)
    assert table.key == elsewhere.key != pilot.key


def test_medical_images_that_validate_are_in_no_table(tmp_path: Path) -> None:
    names = [f"ISIC_{k:07}" for k in range(240)]
    rows = [isic_row(name, k % 8, (1, 3)[k % 4 // 2], ("test", "train")[k % 5 > 0]) for k, name in enumerate(names)]
    folder = write_isic(tmp_path / "given", rows)
    lesions = {name: f"L{k // 2}" for k, name in enumerate(names)}
    write_csv(folder / "groups.csv", ("image", "lesion_id"), list(lesions.items()))

    def halves(seed: int) -> tuple[set[str], set[str]]:
        assert skin.split(tmp_path / "given", tmp_path / str(seed), seed) == [1, 3]
        sets = [datasets.load(f"isic2019/center{c}", data_root=tmp_path / str(seed)) for c in (1, 3)]
        return tuple({g for s in sets for g in getattr(s, half).groups} for half in ("train", "test"))  # type: ignore[return-value]

    validation = {lesion for lesion in lesions.values() if skin.validates(lesion)}
    trained, chosen_on = halves(skin.PILOT)
    assert chosen_on == validation
    assert not trained & validation
    tests = []
    for seed in skin.SEEDS:
        train, test = halves(seed)
        assert not (train & test) | ((train | test) & validation)
        assert train | test == set(lesions.values()) - validation
        tests.append(frozenset(test))
    assert len(set(tests)) == len(skin.SEEDS)


def test_the_medical_rows_go_on_where_a_visit_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skin, "METHODS", {m: skin.METHODS[m] for m in ("FedAvg", "FedMR")})
    made = list[str]()

    def measure(trial: study.Trial) -> Mapping[str, object]:
        made.append(trial.key)
        if len(made) == 9:
            raise KeyboardInterrupt
        return {"key": trial.key, "balanced": [0.1, *[trial.lr] * 5], "aggregator": "mean"}

    monkeypatch.setattr(study, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        skin.compare(None, tmp_path, -1, math.inf, "cpu", gpu.SMALL)
    text = skin.compare(None, tmp_path, -1, math.inf, "cpu", gpu.SMALL)
    assert len(made) == 1 + 2 * (3 + 3)  # the one that was cut off, and each other once
    assert "| FedMR | 0.03 | 3.0 ± 0.0 | +0.0 (0.0) | 0.3, 1.0, 3.0 |" in text
    assert (tmp_path / skin.PAGE).read_text() == text


@pytest.mark.slow
@pytest.mark.timeout(900)  # torch.compile takes minutes where cores are busy
def test_the_small_mode_does_all_steps_on_a_cpu(tmp_path: Path) -> None:
    assert gpu.main(["--small", "--device", "cpu", "--minutes", "30", "--out", str(tmp_path)]) == 0
    assert [line["step"] for line in gpu.lines(tmp_path / "steps.jsonl")] == [*gpu.STEPS]
    assert all(line["complete"] and not line.get("wrong") for line in gpu.lines(tmp_path / "steps.jsonl"))


SHARE = {"disjoint": 0.35, "dir0.1": 0.15, "dir0.3": 0.05, "sizes1:100": 0.1}
"""Updates that may be cut: with this learning rate training overshoots where classes are disjoint."""


@pytest.mark.fault("an honest hospital", "is larger than the few others of a round", "its run continues to the end")
def test_a_run_of_honest_hospitals_of_uneven_size_is_not_ended_by_the_check_of_lengths() -> None:
    """Updates of 5.0 and 6.4 medians were refused in round 8, and three of five were too few."""
    words = "method=fedgela data=digits federation=dirichlet-0.2-20 cohort=5 rounds=8 model=digits_linear seed=0"
    schedule = ["threads=1", "train.epochs=1", "train.lr=0.1", "aggregator=norm_clipped", "secagg=off"]
    manifest, sets = build_simulation(compose_spec([*words.split(), *schedule]))
    history = RoundHistory()
    simulate(CompiledRun.of(manifest), [SiloShare(s.train, s.test) for s in sets], history)
    assert [dict(record.missing) for record in history.records] == [{}] * 9


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_honest_update_is_refused_and_few_are_cut(setting: str) -> None:
    cases = [Case(name, setting, 3, 0.1, 0) for name in ("fedavg", "fednova", "fedrep", "fedmr", "fedrod")]
    runs = [measure(case) for case in [*cases, replace(cases[0], cohort=5), replace(cases[0], rate=0.01)]]
    assert [run["ended"] for run in runs] == [""] * len(runs)
    assert [run["refused"] for run in runs] == [[{}] * 20] * len(runs)
    cut = sum(len(names) for run in runs for names in run["cut"])  # type: ignore[attr-defined]
    assert cut <= SHARE[setting] * sum(run["updates"] for run in runs)  # type: ignore[misc]


@pytest.mark.parametrize("d", [0, 16])
def test_clipped_sums_are_those_of_single_gradients(d: int) -> None:
    model = build_model("digits_linear", {"projection": [d] if d else []}, datasets.schema_of("digits"), 3).double()
    pixels, labels = datasets.load("digits/hospital0").train.batch(torch.arange(7))
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(pixels.double(), labels, strict=True):
        loss = cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        expected = [e + g * (1.5 / norm).clamp(max=1.0) for e, g in zip(expected, grads, strict=True)]
    (x, y), *_ = search._data("hospitals6")[0]
    found = search._clipped_sum(search._initial(d, 3), x[:7], y[:7], 1.5)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-5, atol=1e-7)


def test_a_run_without_noise_is_the_simulations_at_epsilon_600() -> None:
    words = ["model=digits_linear", "method=fedavg", "rounds=4", "train.lr=5", "train.batch_size=300", "seed=2"]
    private = ["privacy=dp_record", "privacy.epsilon=600", "privacy.rng=test", "privacy.test_data=public"]
    simulated = runner.run(compose_simulation([*words, "train.weight_decay=0", *private])).accuracies[1:]
    assert search.run(search.Setting(rounds=4), 2, noisy=False) == pytest.approx(simulated, abs=0.012)
    assert simulated[-1] > 0.5
