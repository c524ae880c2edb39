"""The papers' tables and claims: what their files say, how they are run and written, and their figures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.comparison import protocol, search, settings, verdicts
from benchmarks.comparison import run as comparison
from benchmarks.paper import claims, frame, report, run, study, tables
from benchmarks.paper.measures import MEASURES
from benchmarks.run_store import read, seeded
from coordinator.config.hydra_config import choices, compose_simulation
from tests.support import some

pytestmark = pytest.mark.integration

TINY = """
paper: A paper, Table 9
experiment: fedmr_1
measures: [ga, ga_last]
across: {across}
own: FedMR
methods: {{FedAvg: method=fedavg, Best baseline: null, FedMR: method=fedmr}}
settings: {{CIFAR10 P5C2: data=cifar10 federation=p5c2}}
printed: {{CIFAR10 P5C2: 67.68/1 69.64/2 74.19/3}}
small:
  words: rounds=2 train.max_steps=2
  settings:
    digits P5C2: {{words: data=digits federation=p5c2, beside: CIFAR10 P5C2}}
"""


def _tiny(folder: Path, across: str = "methods") -> tables.Table:
    (folder / "tiny.yaml").write_text(TINY.format(across=across))
    return tables.load("tiny", "small", folder)


MAY_LACK = ("gm", "balanced", "rounds")
"""Measures that a method without a global model, or a run of two rounds, has no number for."""
DIGITS = "data=digits federation=p5c2 cohort=0"
"""In place of images that only their owner has."""


@pytest.mark.parametrize("scale", tables.SCALES)
@pytest.mark.parametrize("name", tables.names())
def test_every_table_reads_and_has_its_experiment(name: str, scale: str) -> None:
    table = tables.load(name, scale)
    assert table.experiment == name
    assert name in choices("experiment")
    assert table.own in table.methods
    assert table.across in ("methods", "settings")
    assert set(table.fine_tune) <= set(tables.load(name, "paper").methods)
    for setting in table.settings:
        for method in table.methods:
            assert len(table.printed_cell(method, setting)) == len(table.measures)


def test_printed_numbers_are_those_of_the_papers() -> None:
    """One number from a corner of each table's middle, as the specification lists it."""

    def cell(table: str, setting: str, method: str) -> tuple[str, ...]:
        return tables.load(table, "paper").printed[setting][method]

    assert cell("fedmr_1", "CIFAR10 P5C2", "FedDyn") == ("69.64",)
    assert cell("fedmr_2", "ISIC2019 Real", "FedMR") == ("76.55",)
    assert cell("fedmr_7", "P10C2", "FedMR (inter+intra)") == ("538",)
    assert cell("fedgela_2", "CIFAR10 partial 0.2", "FedGELA") == ("86.55", "60.52")
    assert cell("fedgela_5", "SVHN P50C2", "Best baseline") == ("96.88", "72.97")
    assert cell("fednh_1", "CIFAR100 Dir(1.0)", "FedNH") == ("43.19", "36.88", "45.46")
    assert cell("fedcd_1", "CIFAR100 β=5", "MOON") == ("68.29",)


def _made(table: tables.Table, accuracies: dict[str, float]) -> report.Results:
    grid = study.grid(table, [0, 1], None)
    runs = {}
    for (method, _), cell in grid.items():
        for seed, (point,) in cell.items():
            a = accuracies[method] + seed / 100
            runs[point.key] = {"key": point.key, "by_round": [0.1, a, a - 0.05], "manifest": "m", "aggregator": "mean"}
    return report.Results(table, grid, runs)


def test_the_layout_is_the_papers_with_the_printed_number_beside_ours(tmp_path: Path) -> None:
    results = _made(_tiny(tmp_path), {"FedAvg": 0.5, "FedMR": 0.75})
    lines = report.markdown(results).splitlines()
    assert "|  | FedAvg | Best baseline | FedMR |" in lines
    assert (
        "| digits P5C2 (CIFAR10 P5C2) | 50.50 ± 0.71 (67.68) / 45.50 ± 0.71 (1) | not run (69.64) / not run (2) | "
        "75.50 ± 0.71 (74.19) / 70.50 ± 0.71 (3) |"
    ) in lines
    assert "| digits P5C2, global accuracy | +25.0 (0.0) |" in lines
    assert any(line.startswith("Updates were aggregated with aggregator=mean.") for line in lines)
    down = report.markdown(_made(_tiny(tmp_path, "settings"), {"FedAvg": 0.5, "FedMR": 0.75}))
    assert "| FedAvg | 50.50 ± 0.71 (67.68) / 45.50 ± 0.71 (1) |" in down.splitlines()


@pytest.mark.parametrize("file", some(sorted(run.RESULTS.glob("*_small.md"), reverse=True)), ids=lambda file: file.stem)
def test_every_table_of_the_small_scale_is_what_its_store_makes(file: Path, tmp_path: Path) -> None:
    (tmp_path / "runs_small.jsonl").write_bytes((run.RESULTS / "runs_small.jsonl").read_bytes())
    text = run.write(tables.load(file.stem.removesuffix("_small"), "small"), tmp_path)
    assert text.splitlines()[:-1] == file.read_text().splitlines()[:-1]  # the last line names the machine
    assert (tmp_path / f"{file.stem}.csv").read_text() == file.with_suffix(".csv").read_text()


def test_measures_read_what_a_run_kept() -> None:
    fedavg = {"key": "a", "by_round": [0.1, 0.4, 0.6, 0.5]}
    ours = {"key": "b", "by_round": [0.1, 0.6, 0.5, 0.7], "personal": {"pa": [0.8, 0.9, 0.7]}, "pa_fine_tuned": None}
    alone = {"key": "c", "by_round": [None] * 4, "personal": {"ga": [0.2, 0.3, 0.1]}, "pa_fine_tuned": 0.5}
    fedrep = {**ours, "personal": {"pa": [0.5, 0.6, 0.4], "ga": [0.2, 0.3, 0.1]}, "ga_of": "personal"}
    fedbabu = {**fedrep, "personal": {"pa": [0.9], "ga": [0.35]}}

    def read(name: str, one: dict[str, object], at: int = 0) -> float:
        return MEASURES[name].read(one, fedavg, at)

    assert (read("ga", ours), read("ga_last", ours), read("ga", ours, 2)) == (0.7, 0.7, 0.6)
    assert (read("pa", ours), read("pa_last", ours), read("pa", alone)) == (0.9, 0.7, 0.5)
    assert (read("ga", alone), read("ga_last", alone)) == (0.3, 0.1)
    assert math.isnan(read("gm", alone))
    assert (read("ga", fedrep), read("ga_last", fedrep), read("gm", fedrep)) == (0.3, 0.1, 0.7)
    assert (read("ga", fedbabu), read("ga_last", fedbabu), read("ga_mean", fedbabu)) == (0.35, 0.35, 0.35)
    assert math.isnan(read("ga", fedbabu, 2))  # its personal models are made at the end
    assert (read("ga_mean", ours), read("pa_mean", fedrep)) == (pytest.approx(0.6), pytest.approx(0.5))
    assert (read("rounds", fedavg), read("rounds", ours)) == (3, 1)
    assert math.isnan(MEASURES["rounds"].read(fedavg, ours, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", tables.names())
def test_every_table_runs_through_at_the_small_scale(name: str, tmp_path: Path) -> None:
    """All methods of its first setting, cut to two rounds of one step: every cell has a number, and is written."""
    table = tables.load(name, "small")
    first = table.settings[0]
    given = DIGITS.split() if any(word.startswith("images=") for word in first.runs[0]) else first.runs[0]
    words = (*given, "rounds=2", "train.max_steps=1")
    short = replace(table, settings=[replace(first, runs=(words,), at=min(first.at, 1))])
    run.compute(short, [0], tmp_path, -1, None)
    text = run.write(short, tmp_path)
    results = report.Results(short, study.grid(short, [0], None), read(tmp_path / "runs_small.jsonl"))
    for method, own in table.methods.items():
        if own is not None:
            found = [results.values(method, short.settings[0], m)[0] for m in table.measures if m not in MAY_LACK]
            assert not any(map(math.isnan, found)), (method, found)
    assert (f"{table.own} minus another method" in text) == (name != "fedmr_3")  # which counts, and ranks nothing


def test_every_paper_has_a_claim_and_every_comparison_stands_behind_one() -> None:
    page, asked = claims.PAGE.read_text(), (claims.HERE / "claims.yaml").read_text()
    assert all(f"| {paper} |" in page for paper in ("FedMR", "FedGELA", "FedNH", "MAP", "FedCD"))
    beyond = {"digits_frozen", "digits_private"}  # closed forms, which none of the five papers has
    made = {name for name in settings.names() if (comparison.RESULTS / f"{name}.md").exists()}
    assert all(f"[{name}," in asked for name in made - beyond)


def test_a_number_whose_rates_were_chosen_on_test_images_has_no_verdict() -> None:
    listed = yaml.safe_load((claims.HERE / "claims.yaml").read_text())
    assert all(("ours" in raw) != ("why" in raw) and "level" not in raw for raw in listed)
    assert all("verdict" not in raw for raw in listed if "ours" in raw)
    row = claims.older({"paper": "MAP", "claim": "x", "printed": "lost", "ours": ["fmnist_dir05", "FedCD", "ga"]})
    assert row.ours.startswith("+4.7 [2.2, 7.2]")  # above 0, and yet:
    assert (row.verdict, row.why) == ("not decided", claims.OLDER)


def test_a_protocol_replaces_older_rows_when_its_runs_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = protocol.load("fmnist_p5c2_claims")

    def followed(rows: object) -> list[claims.Row]:
        monkeypatch.setattr(claims, "older", lambda raw: claims.Row(*[""] * 7, str(raw["claim"]), ""))
        monkeypatch.setattr(
            claims, "followed", lambda name: (protocol.load(name), rows if name == fixed.name else None)
        )
        return claims.rows()

    before = followed(None)
    assert [r.verdict for r in before if r.comparison == fixed.name] == ["not decided"] * len(fixed.claims)
    replaced = "GA above FedAvg's, FMNIST P5C2 (Table 1)"
    assert any(r.comparison == replaced for r in before)
    interval = verdicts.Interval(3.0, 1.0, 5.0, 0.5, 0.5)
    verdict = verdicts.Verdict("holds", "", interval, "FedAvg, batch", interval, "MOON")
    monkeypatch.setattr(verdicts, "judge", lambda *_: verdict)
    chosen = search.Searched(chosen=(("network=plain", "method=fedmr", "method.mu1=0.1"), 0.1))
    after = followed(dict.fromkeys(fixed.methods, chosen))
    assert not any(r.comparison == replaced for r in after)
    assert len(before) - len(after) == 4
    (row,) = [r for r in after if r.comparison == fixed.name and r.paper == "FedMR"]
    assert row.cells()[3:6] == [
        "+3.0 [1.0, 5.0] (FedAvg, batch), +3.0 [1.0, 5.0] (MOON)", "**holds**", "lr 0.1, network=plain, mu1=0.1"
    ]  # fmt: skip


def test_fedgelas_plain_frame_answers_as_its_record_says_and_equal_counts_change_nothing() -> None:
    words = ["experiment=fedgela_3", "scale=small", "federation=p5c2", "cohort=0", "rounds=2", "train.max_steps=3"]
    found = frame.answers(words, 0, None)
    result = study.runner.run(seeded(compose_simulation(words), 0))
    assert found["plain"]["accuracy"] == round(result.accuracies[-1], 4)
    assert found["plain"]["balanced"] == pytest.approx(result.records[-1].balanced_accuracy, abs=1e-4)
    logits = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    equal = frame.ways(logits, torch.full((4,), 7.0))
    assert all(torch.equal(way.argmax(1), logits.argmax(1)) for way in equal.values())
    skewed = frame.ways(torch.tensor([[2.0, 1.2]]), torch.tensor([1.0, 9.0]))
    torch.testing.assert_close(skewed["adapted"], torch.tensor([[0.4, 2.16]]))
    assert [int(skewed[name].argmax()) for name in ("plain", "adapted", "shifted", "levelled")] == [0, 1, 1, 0]
