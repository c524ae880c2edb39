"""`coordinator simulate`: sweeps in processes, engines, and what does not go together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from consilium.research.commands import simulate
from consilium.research.simulate import answer, runner
from consilium.research.simulate.engine import SimulationEngine
from consilium.research.simulate.runner import SimulationJob
from consilium.research.simulate.sweep import SweepTable, combinations, swept
from coordinator.config.hydra_config import compose_simulation
from fl_core.errors import ConfigError

COMMAND = str(Path(sys.executable).parent / "coordinator")
SHORT = ["data=digits", "federation=p5c2", "rounds=1", "train.max_steps=2", "threads=1"]


def test_combinations_are_the_grid_and_brackets_separate_nothing() -> None:
    words = ["seed=0,1", "method=fedavg,fedmr", "federation=p5c2", "silos=[a,b]"]
    assert combinations(words) == [
        [f"seed={s}", f"method={m}", "federation=p5c2", "silos=[a,b]"] for s in (0, 1) for m in ("fedavg", "fedmr")
    ]
    assert swept(words) == ["seed", "method"]
    assert swept(words[2:]) == swept(["=1"]) == []


def test_methods_of_ones_own_are_swept_over_by_their_places_and_quoted_names_are_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "swept_over.py").write_text("from consilium.extending import FedAvg\n\nclass Mine(FedAvg):\n    pass\n")
    words = ["method=fedavg,swept_over:Mine,'fedmr'"]
    assert combinations(words) == [["method=fedavg"], ["method=swept_over:Mine"], ["method=fedmr"]]


@pytest.mark.parametrize(
    ("words", "code"), [(["seed=0,x"], "E-CFG-02"), (["method=fedavg,fedmrr"], "E-CFG-01"), (["=1"], "E-CFG-01")]
)
def test_a_wrong_word_is_refused_before_anything_runs(words: list[str], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        combinations(words)
    assert caught.value.code == code


def test_a_sweep_shows_a_table_of_its_runs_and_with_json_an_object_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spent = {"overrides": ["privacy.epsilon=4", "seed=1"], "privacy": {"epsilon": 3.75, "delta": 1e-5}}
    noisy = {"overrides": ["privacy.epsilon=2", "seed=1"], "global_accuracy": None, "withheld": True, "privacy": None}
    results = [{**spent, "global_accuracy": 0.5, "best_global_accuracy": 0.625, "balanced_accuracy": 0.25}, noisy]
    monkeypatch.setattr(answer, "sweep", lambda *_: iter(results))
    words = ["privacy=dp_record", "privacy.epsilon=4,2", "seed=1"]
    answer.answer(SimulationJob(), words, 1, as_json=False)
    shown = capsys.readouterr()
    assert "{" not in shown.out
    assert "1 of 2 done, left 0 s  privacy.epsilon=4  accuracy 50.00 %" in shown.err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.out.splitlines() if "│" in line]
    assert rows == [["2", "withheld", "-", "-", "-"], ["4", "50.00 %", "62.50 %", "25.00 %", "3.750"]]
    answer.answer(SimulationJob(), words, 1, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results
    table = SweepTable(tmp_path, words)
    table.add(results[0])
    assert "3.75" in (tmp_path / "sweep.csv").read_text()
    assert "epsilon,delta" in (tmp_path / "sweep.csv").read_text()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("data.classes=[nevus,Melanom (bösartig)]", "quote names with accents"),
        ("data.classes=nevus,keratosis", r"a list is written \[A,B\]"),
        ("train.lr=0,1", "a number with a point, 0.1"),
    ],
)
def test_a_value_that_the_grammar_does_not_take_is_answered_with_how_it_is_written(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        compose_simulation(["data=folder", word])
    assert caught.value.code == "E-CFG-01"
    assert "Exception" not in caught.value.message


def test_names_with_accents_and_signs_are_classes_in_quotes() -> None:
    spec = compose_simulation(["data=folder", 'data.classes=["Melanom (bösartig)",nevus]'])
    assert spec.data["classes"] == ["Melanom (bösartig)", "nevus"]


@pytest.mark.slow
def test_a_sweep_prints_one_object_per_run_that_equals_the_run_alone() -> None:
    done = subprocess.run(
        [COMMAND, "simulate", "-m", *SHORT, "seed=0,1", "--jobs", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(r["seed"] for r in found) == [0, 1]
    assert "2 of 2 done" in done.stderr
    one = next(r for r in found if r["seed"] == 1)
    assert one.pop("overrides") == [*SHORT, "seed=1"]
    assert one == json.loads(json.dumps(runner.run(compose_simulation([*SHORT, "seed=1"])).summary()))


def test_ways_to_run_give_one_digest_and_fine_tuning_changes_none(tmp_path: Path) -> None:
    spec = compose_simulation([*SHORT, "method=scaffold", "cohort=3"])
    plain = runner.run(spec)
    other = runner.run(spec, engine=SimulationEngine(device="cpu", spill=tmp_path, exact=True), fine_tune=1)
    assert other.model_digest == plain.model_digest
    assert other.summary()["pa_fine_tuned"] > other.summary()["best_global_accuracy"]
    assert "pa_fine_tuned" not in plain.summary()
    assert list(tmp_path.iterdir())


def test_under_a_cohort_accuracies_are_over_all_silos_and_the_cohorts_are_given_beside() -> None:
    partial, whole = (runner.run(compose_simulation([*SHORT, words])) for words in ("cohort=2", "cohort=0"))
    said = partial.summary()
    assert "cohort_accuracy_by_round" not in whole.summary()
    assert said["cohort_accuracy_by_round"] == [r.accuracy for r in partial.records]
    assert said["accuracy_by_round"] == [r.accuracy for r in partial.measured]
    assert all(r.examples == whole.records[0].examples for r in partial.measured)
    assert said["accuracy_by_round"][0] == whole.summary()["accuracy_by_round"][0]  # type: ignore[index]
    assert said["best_global_accuracy"] == max(said["accuracy_by_round"][1:])  # type: ignore[index]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "more", "code"),
    [
        (["seed=0,1"], {}, "E-CFG-08"),
        ([], {"engine": "slurm"}, "E-CFG-08"),
        ([], {"device": "tpu"}, "E-CFG-02"),
        ([], {"engine": "ray", "device": "auto"}, "E-CFG-08"),
        (["train.amp=int8"], {}, "E-CFG-02"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], more: dict[str, str], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate([*SHORT, *words], **more)
    assert caught.value.code == code
