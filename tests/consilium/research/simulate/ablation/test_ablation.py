"""The ablation's grid, statistics, table and picture; and a small whole, interrupted and resumed."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from consilium.research.simulate.ablation import program as privacy_ablation
from consilium.research.simulate.ablation import report
from consilium.research.simulate.ablation.grid import VARIANTS, Grid, GridRun, Words, canonical, controls
from consilium.research.simulate.ablation.report import SeedMean
from coordinator.cli.main import program
from fl_core.errors import ConfigError, UnavailableError

pytestmark = pytest.mark.integration

INF = math.inf
PAPER = Grid(
    ("fedavg", "fedmr-intra", "fedmr", "fedmr-inter", "fedproc", "fedproto"),
    (INF, 8.0, 4.0, 2.0, 1.0, 0.5),
    (0.0, 0.5, 0.8, 1.0),
    (0, 1, 2, 3, 4),
)
SMALL = Grid(("fedavg", "fedmr"), (INF, 2.0), (0.0, 1.0), (0, 1))


def test_the_papers_grid_has_72_distinct_configurations_and_15_more_without_the_coupled_term() -> None:
    """Specification section 9: 6 x (1 + 1 + 3 + 3 + 4) = 72, over 5 seeds 360 runs, and 75 of FedMR-inter."""
    runs = PAPER.runs()
    inter = [r for r in runs if r.variant == "fedmr-inter"]
    assert len(runs) - len(inter) == 360
    assert len(inter) == 75
    assert all(not math.isinf(r.epsilon) for r in inter)
    assert [r.seed for r in runs] == sorted(r.seed for r in runs)
    assert len({r.key(("data=digits",), "v1") for r in runs}) == len(runs)
    assert runs[0].key((), "v1") != runs[0].key((), "v2") != runs[0].key(("rounds=3",), "v2")


def test_cells_share_runs() -> None:
    assert canonical(GridRun("fedmr", 8.0, 0.0, 1)) == GridRun("fedmr-intra", 8.0, 1.0, 1)
    assert canonical(GridRun("fedproc", 8.0, 0.0, 1)) == GridRun("fedavg", 8.0, 1.0, 1)
    assert canonical(GridRun("fedavg", 8.0, 0.5, 1)) == GridRun("fedavg", 8.0, 1.0, 1)
    assert canonical(GridRun("fedproto", 8.0, 0.0, 1)) == GridRun("fedproto", 8.0, 0.0, 1)
    names = [c.name for c in controls(PAPER)]
    assert "share 0 of fedproc is fedavg" in names
    assert "epsilon=inf of fedmr is the run without privacy" in names
    left = next(c for c in controls(PAPER) if c.name.startswith("share 0 of fedmr is")).left
    assert "prototype_share=0" in left.words
    assert GridRun("fedmr", INF, 0.5, 3).words[1] == "privacy.epsilon=inf"


@pytest.mark.parametrize(
    "bad",
    [
        (("fedsgd",), (1.0,), (1.0,), (0,)),
        (("fedavg",), (0.0,), (1.0,), (0,)),
        (("fedavg",), (1.0,), (1.5,), (0,)),
        (("fedavg",), (1.0, 1.0), (1.0,), (0,)),
        (("fedavg",), (1.0,), (1.0,), ()),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(bad: tuple[tuple[str], tuple[float], tuple[float], tuple[int]]) -> None:
    with pytest.raises(ConfigError) as found:
        Grid(*bad)
    assert found.value.code == "E-CFG-02"


def accuracies(of: Callable[[GridRun], float], grid: Grid = SMALL) -> dict[GridRun, float]:
    return {run: of(run) for run in grid.runs()}


def test_estimates_of_three_seeds() -> None:
    """Mean 2, SE = 1 / sqrt(3), t_(0.975, 2) = 4.3027."""
    found = SeedMean.of([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.error == pytest.approx(3**-0.5)
    assert found.half == pytest.approx(4.302653 * 3**-0.5)
    assert math.isnan(SeedMean.of([1.0]).error)


def test_checks_hold_and_fail_as_they_should() -> None:
    growing = accuracies(lambda r: (0.9 if math.isinf(r.epsilon) else 0.5) + 0.01 * r.seed)
    assert report.monotone(growing, SMALL).holds
    falling = accuracies(lambda r: (0.5 if math.isinf(r.epsilon) else 0.9) + 0.01 * r.seed)
    assert not report.monotone(falling, SMALL).holds
    noisy = accuracies(lambda r: 0.5 + (0.2 if math.isinf(r.epsilon) == bool(r.seed) else 0.0))
    assert report.monotone(noisy, SMALL).holds  # the paired difference changes its sign with the seed
    worse = accuracies(lambda r: 0.9 - 0.3 * (r.variant == "fedmr") + 0.01 * r.seed)
    helps, hurts = report.full_share_helps(growing, SMALL), report.full_share_helps(worse, SMALL)
    assert helps is not None
    assert helps.holds
    assert hurts is not None
    assert not hurts.holds
    assert report.full_share_helps(growing, Grid(("fedavg",), (INF,), (0.0, 1.0), (0,))) is None
    assert report.above_chance(growing, SMALL, 10).holds
    assert not report.above_chance(accuracies(lambda _: 0.09), SMALL, 10).holds

    hidden = accuracies(lambda r: math.nan if r.epsilon == min(SMALL.epsilons) else 0.9)  # noise withholds them
    assert not report.monotone(hidden, SMALL).holds
    assert not report.above_chance(hidden, SMALL, 10).holds
    assert "withheld" in report.table5(hidden, SMALL, "digits", "p5c2")

    def row(eps: float, found: float, used: float) -> dict[str, str]:
        return {"eps_target": str(eps), "eps_rdp": str(found), "budget_used": str(used)}

    assert report.spent([row(8, 7.2, 0.99), row(INF, INF, 0)]).holds
    assert not report.spent([row(8, 8.1, 0.99)]).holds
    assert not report.spent([row(8, 7.2, 1.01)]).holds
    assert not report.spent([row(8, 7.2, 0.9)]).holds


def test_the_table_has_fedmrs_layout_and_the_picture_is_drawn(tmp_path: Path) -> None:
    found = accuracies(lambda r: 0.5 + 0.1 * (r.variant == "fedmr") + 0.02 * r.seed)
    text = report.table5(found, SMALL, "digits", "p5c2")
    assert "| dataset | split | method | FedAvg | 0 % | 100 % |" in text
    assert "| digits | p5c2 | fedmr | 51.00 ± 1.00 | 51.00 ± 1.00 | 61.00 ± 1.00 |" in text
    assert text.index("epsilon = inf") < text.index("epsilon = 2")
    report.draw(found, SMALL, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    below = report.by_epsilon(found, SMALL)
    assert "| method | epsilon inf | epsilon 2 |" in below
    assert "| fedmr | 61.00 ± 1.00 | 61.00 ± 1.00 |" in below
    missing = {r: a for r, a in found.items() if r.variant != "fedmr"}
    assert "51.00 ± 1.00 | - |" in report.table5(missing, SMALL, "digits", "p5c2")


def test_runs_that_were_made_outlast_a_rewriting_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"config_hash": str(k), "git_sha": "a", "acc_final": "0.5"} for k in range(3)]
    for row in rows:
        report.append(tmp_path / "runs.csv", row)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UnavailableError, match="E-STATE-63"):
            report.append(tmp_path / "runs.csv", rows[0] | {"config_hash": "3"})
    assert list(report.read(tmp_path / "runs.csv").values()) == rows
    report.write(tmp_path / "runs.csv", rows[:2])
    assert list(report.read(tmp_path / "runs.csv").values()) == rows[:2]
    assert [file.name for file in tmp_path.iterdir()] == ["runs.csv"]


def test_help_says_what_it_does_and_with_which_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert program().run(["ablation", "--help"]) == 0
    said = "".join(capsys.readouterr().out.split())
    assert "scale=fmnist|paper|small|smoke" in said
    assert "epsilons=" in said


def test_every_scale_composes_and_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert privacy_ablation.composed(["scale=paper"]).grid == PAPER
    for scale in ("smoke", "small", "fmnist", "paper"):
        plan = privacy_ablation.composed([f"scale={scale}", "jobs=1"])
        for run in plan.grid.runs()[:: max(1, len(plan.grid.runs()) // 3)]:
            privacy_ablation.compose_spec(plan.words(run))
    assert privacy_ablation.composed(["scale=smoke", "epsilons=[inf,1]"]).grid.epsilons == (INF, 1.0)
    small = privacy_ablation.composed(["scale=small"])
    assert set(small.rates) == set(small.grid.epsilons)
    assert "train.lr=5" in small.schedule(8.0)
    assert "train.lr=0.1" in small.schedule(INF)
    assert not any(word.startswith("train.lr") for word in privacy_ablation.composed(["scale=smoke"]).schedule(2.0))
    assert program().run(["ablation", "scale=nothing"]) == 2
    assert program().run(["ablation", "methods=[nothing]"]) == 2
    assert "E-CFG" in capsys.readouterr().err


def test_a_variant_with_its_own_model_takes_no_option_of_the_common_one() -> None:
    plan = privacy_ablation.composed(["scale=fmnist"])
    ours, common = (plan.words(GridRun(name, INF, 1.0, 0)) for name in ("analytic", "fedavg"))
    assert "model.width=128" in common
    assert [word for word in ours if word.startswith("model")] == ["model=random_features"]
    assert privacy_ablation.compose_spec(ours).model["width"] != 128


def here(
    job: Callable[[Words], object], wordings: Sequence[Words], jobs: int, threads: int
) -> Iterator[tuple[Words, object]]:
    for words in wordings:
        yield words, job(words)


@pytest.mark.slow
def test_a_small_grid_resumes_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T-42: the controls compare real runs bit for bit."""
    made: list[Words] = []

    def stops(
        job: Callable[[Words], object], wordings: Sequence[Words], jobs: int, threads: int
    ) -> Iterator[tuple[Words, object]]:
        for words, result in here(job, wordings[:2], jobs, threads):
            made.append(words)
            yield words, result
        raise KeyboardInterrupt

    words = ["scale=smoke", "seeds=[0]", "methods=[fedavg,fedmr]", f"out={tmp_path}"]
    plan = privacy_ablation.composed(words)
    monkeypatch.setattr(privacy_ablation, "in_processes", stops)
    with pytest.raises(KeyboardInterrupt):
        privacy_ablation.ablate(plan, lambda _: None)
    with (tmp_path / "runs.csv").open("a") as file:
        file.write("cut off,")
    monkeypatch.setattr(privacy_ablation, "in_processes", here)
    messages: list[str] = []
    found = privacy_ablation.ablate(plan, messages.append)
    assert messages[0] == "6 runs, 4 to do, 6 cells"
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert len(rows) == 6
    assert all(math.isinf(float(r["eps_rdp"])) == math.isinf(float(r["eps_target"])) for r in rows)
    finite = [r for r in rows if r["eps_target"] == "2"]
    assert all(0 < float(r["eps_rdp"]) <= 2 and float(r["z_min"]) > 0 and r["private"] == "False" for r in finite)
    assert json.loads((tmp_path / "report.json").read_text())["runs"] == 6
    equal = [c for c in found if "is the run without" in c.name or c.name.startswith("share 0")]
    assert len(equal) == 3
    assert all(c.holds for c in equal)
    assert (tmp_path / "acc_vs_eps.png").exists()
    assert "### epsilon = 2" in (tmp_path / "table5.md").read_text()
    cells = list(csv.DictReader((tmp_path / "cells.csv").open()))
    shared = [c for c in cells if c["shared_run_id"]]
    assert {c["method"] for c in shared} == {"fedmr"}
    assert all(VARIANTS[c["method"]].zero and c["share"] == "0" for c in shared)


@pytest.mark.slow
def test_the_smoke_scale_runs_in_processes_of_its_own(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "coordinator.cli.main", "ablation", "scale=smoke", f"out={tmp_path}"], check=False
    )
    assert len(list(csv.DictReader((tmp_path / "runs.csv").open()))) == 12
    assert json.loads((tmp_path / "report.json").read_text())["runs"] == 12
