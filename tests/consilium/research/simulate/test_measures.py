"""What a simulation says of a run: which images, which silos, which rounds, and the papers' rule for GA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from consilium import simulate as python_simulate
from consilium.research.commands import simulate
from consilium.research.simulate import results, runner
from coordinator.config.hydra_config import compose_simulation
from coordinator.runs import run_facts
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.records import RoundRecord
from fl_core.types.values import State
from service_core.console import pluralize

DIGITS = ["data=digits", "train.max_steps=3", "threads=1", "seed=0"]
HELD_OUT = {
    "map": ["federation=map", "federation.silos=4"],
    "label": ["federation=label", "federation.silos=5", "federation.slots=4"],
    "persilo": ["federation=persilo", "federation.silos=4"],
}


class Newest(Observer):
    """Keeps the newest state, and what the rounds' lines would say."""

    def __init__(self) -> None:
        self.server: State = {}
        self.told: list[RoundRecord] = []

    def closed(self, record: RoundRecord, server: State) -> None:
        self.server = server
        self.told.append(record)


@pytest.mark.parametrize(("name", "cohort"), [("map", 0), ("map", 2), ("label", 2), ("persilo", 0)])
def test_where_silos_hold_out_tests_the_global_model_is_measured_on_the_official_test_set(
    name: str, cohort: int
) -> None:
    spec, newest = compose_simulation([*DIGITS, *HELD_OUT[name], "rounds=2", f"cohort={cohort}"]), Newest()
    result = runner.run(spec, observer=newest)
    manifest, sets = runner.build_simulation(spec)
    official = sets[0].public
    assert official is not None
    runtime = RunSetup.of(manifest).silo_runtime()
    model = runtime.method.global_model(runtime.reset_model(), runtime.method.broadcast(newest.server)).eval()
    x, y = official.batch(torch.arange(len(official)))
    with torch.no_grad():
        right = model(x).argmax(1) == y
    by_class = [float(right[y == c].float().mean()) for c in range(10)]
    said = result.summary()
    assert said["test_set"] == "official"
    assert said["global_accuracy"] == pytest.approx(float(right.float().mean()))
    assert said["balanced_accuracy"] == pytest.approx(sum(by_class) / 10)
    assert [said["class_accuracy"][c] for c in manifest.schema.classes] == pytest.approx(by_class)  # type: ignore[index]
    assert [sum(r.examples) for r in newest.told] == [len(official)] * 3
    own = sum(len(s.test) for s in sets)
    assert sum(result.records[-1].examples) == own != len(official)  # what a federation would see
    assert len(said["cohort_accuracy_by_round"]) == 3  # type: ignore[arg-type]


def test_elsewhere_the_silos_tests_are_the_test_set() -> None:
    result = runner.run(compose_simulation([*DIGITS, "federation=p5c2", "rounds=1"]))
    assert (result.summary()["test_set"], result.measured) == ("silos", ())


@pytest.mark.integration
def test_the_mean_of_the_last_rounds_stands_beside_the_best() -> None:
    words = [*DIGITS, "federation=iid", "federation.silos=4", "cohort=2", "rounds=6", "personal=true"]
    said = runner.run(compose_simulation(words)).summary()
    curve, pa = said["accuracy_by_round"], [s["pa"] for s in said["personal_by_round"]]  # type: ignore[attr-defined]
    assert said["last_rounds"] == 5
    assert said["mean_last_global_accuracy"] == said["mean_last_ga"] == pytest.approx(sum(curve[-5:]) / 5)  # type: ignore[index]
    assert said["mean_last_pa"] == pytest.approx(sum(pa[-5:]) / 5)
    assert said["best_pa"] == max(pa)
    assert pa != [s["pa"] for s in said["cohort_personal_by_round"]]  # type: ignore[attr-defined]
    assert results.mean_of_last([0.5, None]) is results.mean_of_last([]) is None


@pytest.mark.slow
@pytest.mark.parametrize(("method", "personal"), [("fedrep", True), ("fedbabu", True), ("fedavg", False)])
def test_ga_of_a_method_whose_model_is_personal_is_its_personal_models_mean(
    method: str, personal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*DIGITS, "federation=p5c2", "rounds=2", "personal=true", f"method={method}", "train.lr=0.05"]
    result = runner.run(compose_simulation(words))
    said, last = result.summary(), result.records[-1 if method == "fedbabu" else -2].personal["ga"]
    assert said["ga"] == (last if personal else said["global_accuracy"])
    assert said["ga"] != (said["global_accuracy"] if personal else last)
    simulate(words)
    assert ("(GA in papers)" in capsys.readouterr().out) is personal


UNEVEN = {"data": "digits", "federation": "dirichlet-0.1-6", "model": "digits_linear", "method": "fedmr"}
SHORT = {"rounds": 3, "threads": 1, "seed": 0, "train.lr": 0.3, "train.epochs": 1, "train.batch_size": 32}


@pytest.mark.integration
@pytest.mark.parametrize("rule", ["mean", "norm_clipped"])
def test_a_simulation_says_its_rule_and_how_many_updates_and_rows_it_refused_and_cut(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {} if rule == "mean" else {"aggregator": rule}
    simulate([f"{key}={value}" for key, value in {**UNEVEN, **SHORT, **chosen}.items()], out=tmp_path / "out")
    printed = capsys.readouterr().out
    said = json.loads((tmp_path / "out/summary.json").read_text())
    same = python_simulate(**UNEVEN, **{key.replace(".", "__"): value for key, value in SHORT.items()}, **chosen)
    assert same.summary["model_digest"] == said["model_digest"]
    records = same.result.records
    cuts, rows = sum(len(r.cut) for r in records), sum(r.cut_rows for r in records)
    assert (cuts > 0, rows > 0) == (rule == "norm_clipped",) * 2
    for summary in (said, same.summary):
        assert (summary["aggregator"], summary["updates_cut"], summary["cut_rows"]) == (rule, cuts, rows)
        assert summary["updates_refused"] == sum(len(r.missing) for r in records)
    assert (f"aggregator={rule}: " in printed) == (cuts + rows > 0)
    assert not cuts or f"{pluralize(cuts, 'update')} clipped, {pluralize(rows, 'row')} of prototypes clipped" in printed


def test_a_simulation_under_silo_level_privacy_says_that_it_adds_whatever_rule_was_asked_for() -> None:
    words = [*DIGITS, "federation=iid-4", "model=digits_linear", "rounds=1", "privacy=dp_silo_small"]
    said = runner.run(compose_simulation([*words, "aggregator=norm_clipped"]))
    assert said.manifest.aggregator.name == "norm_clipped"
    assert said.summary()["aggregator"] == "mean"
    assert run_facts.computed(said.manifest.to_json()).aggregator == "mean"
    assert run_facts.computed("{}").aggregator == ""
