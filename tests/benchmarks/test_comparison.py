"""Fair comparisons: what is tuned on which seeds, how a table is made of the store, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from benchmarks.comparison import report, run, settings, study
from benchmarks.comparison.settings import Comparison
from benchmarks.run_store import Run, machine
from fl_core.errors import ConfigError, DataError
from fl_core.types.records import PERSONAL_SCORES
from tests.support import some

pytestmark = pytest.mark.integration

TINY = Comparison(
    name="tiny",
    title="Tiny",
    question="Which one?",
    words=("data=digits", "federation=p5c2", "model=digits_linear", "rounds=2", "threads=1", "train.max_steps=2"),
    lrs=(0.1, 0.2, 0.4),
    tuning_seeds=(100, 101),
    seeds=(0, 1, 2),
    measures=("ga",),
    baseline="FedAvg",
    methods={"FedAvg": (("method=fedavg",),), "FedProx": (("method=fedprox",),)},
)
COUNTS = ("updates_refused", "updates_cut", "cut_rows", "clipped")
FILE = """
title: Tiny
question: Which one?
words: data=digits federation=p5c2
lrs: [0.1]
tuning_seeds: [100]
seeds: [0, 1]
measures: [ga]
baseline: FedAvg
methods: {FedAvg: method=fedavg}
"""


def accuracy(trial: study.Trial) -> float:
    """FedAvg is best at 0.2 and FedProx at 0.1 on the tuning seeds; on the table's FedAvg would be best at 0.4."""
    if trial.seed >= 100:
        return {"FedAvg": {0.1: 0.5, 0.2: 0.7, 0.4: 0.6}, "FedProx": {0.1: 0.8, 0.2: 0.7, 0.4: 0.0}}[trial.method][
            trial.lr
        ]
    return {"FedAvg": {0.2: 0.6, 0.4: 0.9}, "FedProx": {0.1: 0.75}}[trial.method][trial.lr] + trial.seed**2 / 100


def computed(asked: list[study.Trial]) -> dict[str, Run]:
    kept = {"aggregator": "mean", **dict.fromkeys(COUNTS, 0), "cpu_seconds": 1.0}
    return {t.key: {"key": t.key, "ga": [0.1, accuracy(t) - 0.1, accuracy(t)], **kept} for t in asked}


@pytest.mark.parametrize("name", some(settings.names()))
def test_every_setting_is_fair_and_its_table_is_what_the_store_makes(name: str, tmp_path: Path) -> None:
    asked = settings.load(name)
    assert len(asked.seeds) >= 10
    assert not set(asked.seeds) & set(asked.tuning_seeds)
    store = run.RESULTS / f"{name}.jsonl"
    if asked.device != "cpu" and not store.with_suffix(".md").exists():
        with pytest.raises(DataError, match="expected all runs of the table"):  # a visit to a GPU goes on with it
            run.compare(asked, run.RESULTS, -1, None, stored=True)
        return
    (tmp_path / store.name).write_bytes(store.read_bytes())
    text = run.compare(asked, tmp_path, -1, None, stored=True)
    kept = (run.RESULTS / f"{name}.md").read_text()
    assert text == kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_linear", "digits_frozen", "digits_private"])
def test_stored_runs_are_what_todays_code_computes(name: str) -> None:
    """One of each method: to the last bit on such a machine as a run names, else within rounding that grew."""
    store, asked, found = run.RESULTS / f"{name}.jsonl", settings.load(name), list[float]()
    for method, tuned in study.compared(asked, run.stored_runs(store), None).items():
        (trial,) = study.trials(method, (*asked.words, *tuned.words), [tuned.lr], asked.seeds[:1], None)
        here, stored = study.measure(trial), tuned.runs[asked.seeds[0]]
        alike = stored.get("device") == machine()
        assert here["model"] == stored["model"] or not alike, f"{trial}: {trial.key}"
        pairs = zip(study.curve(here, "ga"), study.curve(stored, "ga"), strict=True)
        found.append(max(abs(ours - theirs) for ours, theirs in pairs))
    # A row that overshoots differs by five points between AVX2 and AVX512, and one at the edge of what is stable
    # (FedMR with mu1 1: its seeds end between 67 and 92 %) by any number in a single round.
    assert sorted(found)[-2] < 0.06, found
    assert sorted(found)[len(found) * 3 // 4] < 1e-3, found


def test_a_rate_is_chosen_for_each_method_on_seeds_that_the_table_does_not_use() -> None:
    seen = list[list[study.Trial]]()
    found = study.compared(TINY, lambda asked: seen.append(asked) or computed(asked), None)
    assert {m: t.lr for m, t in found.items()} == {"FedAvg": 0.2, "FedProx": 0.1}
    tuning, table = seen
    assert {(t.method, t.lr, t.seed) for t in tuning} == {
        (m, lr, s) for m in TINY.methods for lr in TINY.lrs for s in TINY.tuning_seeds
    }
    assert {(t.method, t.lr, t.seed) for t in table} == {(m, t.lr, s) for m, t in found.items() for s in TINY.seeds}
    assert (found["FedAvg"].on_the_edge, found["FedProx"].on_the_edge) == (False, True)
    assert report.target_of(TINY, found) == pytest.approx((0.6 + 0.7) / 2)  # of the tuning seeds, mean of both rounds


def test_differences_are_paired_with_their_standard_error_and_bold_where_the_interval_excludes_zero() -> None:
    ours, theirs = [60.0, 62.0, 61.0, 65.0], [58.0, 59.0, 60.0, 61.0]
    test = stats.ttest_rel(ours, theirs)
    low, high = report.interval([a - b for a, b in zip(ours, theirs, strict=True)])
    assert (low, high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert report.difference(ours, theirs) == "**+2.5 (0.6)**"
    assert report.difference([60.0, 62.0], [61.0, 60.0]) == "+0.5 (1.5)"
    assert report.difference([60.0], [61.0]) == "-1.0"
    assert all(map(math.isnan, report.interval([1.0])))


def test_the_table_says_rates_budget_failures_and_rounds_to_the_target() -> None:
    runs = study.compared(TINY, computed, None)
    text = report.markdown(TINY, runs)
    assert "| FedAvg | 0.2 | 56.7 ± 2.1 |  | 61.7 ± 2.1 |  | > 2 (0 of 3) |  |" in text
    assert "| FedProx | 0.1* | 71.7 ± 2.1 | **+15.0 (0.0)** | 76.7 ± 2.1 | **+15.0 (0.0)** | 1 (3 of 3) |" in text
    assert "with 6 runs: every rate of one grid on seeds 100, 101" in text
    broken = {
        m: replace(t, runs={**t.runs, 1: {"failed": "x", "aggregator": "mean", "cpu_seconds": 1}})
        for m, t in runs.items()
    }
    assert "count as 0 %: FedAvg 1, FedProx 1 of 3" in report.markdown(TINY, broken)


def test_a_comparison_is_kept_run_by_run_and_a_table_with_a_hole_replaces_none(tmp_path: Path) -> None:
    small = replace(TINY, lrs=(0.1, 0.2), tuning_seeds=(100,), seeds=(0, 1))
    text = run.compare(small, tmp_path, -1, None)
    assert (tmp_path / "tiny.md").read_text() == text
    assert run.compare(small, tmp_path, -1, None, stored=True) == text
    lines = (tmp_path / "tiny.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (2 + 2)
    assert len(json.loads(lines[0])["ga"]) == 3
    (tmp_path / "tiny.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(DataError, match="found 3 of 4"):
        run.compare(small, tmp_path, -1, None, stored=True)
    assert (tmp_path / "tiny.md").read_text() == text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seeds: [0, 1]", "seeds: [0, 100]"), r"found \[100\] in both"),
        (("seeds: [0, 1]", "seeds: [0, 0]"), "expected different seeds"),
        (("lrs: [0.1]", "lrs: []"), "expected different lrs"),
        (("baseline: FedAvg", "baseline: FedAvgg"), "did you mean 'FedAvg'"),
        (("measures: [ga]", "measures: [gaa]"), "did you mean 'ga'"),
        (("measures: [ga]", "measures: []"), "there is no measure"),
        (("title: Tiny", "titel: Tiny"), "titel"),
        (("federation=p5c2", "federation=p5c2 train.lr=0.1"), "found train.lr=0.1"),
        (("method=fedavg", "method=fedavg seed=3"), "found seed=3"),
    ],
)
def test_what_would_not_be_fair_or_is_unknown_is_refused(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    (tmp_path / "tiny.yaml").write_text(FILE.replace(*change))
    with pytest.raises(ConfigError, match=says):
        settings.load("tiny", tmp_path)


def test_a_run_with_personal_models_keeps_their_three_accuracies_of_every_round() -> None:
    (trial,) = study.trials("FedAvg", (*TINY.words, "method=fedavg", "personal=true"), [0.1], [0], None)
    kept = study.measure(trial)
    for name in PERSONAL_SCORES:
        values = kept[name]
        assert isinstance(values, list)
        assert values[0] is None  # no model of a silo's own before the first round
        assert len(values) == 3
        assert all(0 <= v <= 1 for v in values[1:])
