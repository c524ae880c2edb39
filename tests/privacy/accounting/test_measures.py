"""A measure is defined once: JSON, tables, pages, CSV, the card, comparisons and trackers list it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from consilium.pages.lead.exports import rounds_csv
from consilium.report.comparison import ComparedRun, compare, comparison_json
from consilium.research import trackers
from consilium.research.simulate.results import Result, history
from coordinator.lead import hospital_results, tables
from coordinator.lead.as_json import round_json
from coordinator.lead.watcher import Watcher
from fl_core.types.enums import TaskKind
from fl_core.types.intervals import share
from fl_core.types.records import HospitalResult, RoundRecord
from privacy.accounting import measures
from privacy.accounting.measures import EvaluationResult, Measure
from privacy.accounting.uncertainty import NO_NOISE, NOTHING, Estimate, EvaluationNoise
from protos.consilium.v1 import federation_pb2 as pb
from silo.storage.tasks import LocalEvaluation
from silo.training import evaluation_summary
from tests.support.cards import markdown_of
from tests.support.federations import manifest
from tests.support.made_up_service import MadeUpService
from tests.support.pages import opened, shown
from tests.support.recorded_runs import detail, measured

NAME, LABEL = "worst_class", "worst class"


def worst(result: EvaluationResult) -> Estimate:
    return min(
        (value for value in result.by_class() if value.point is not None), key=lambda v: v.point or 0, default=NOTHING
    )


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a measure: the accuracy of the class that is recognised least."""
    new = Measure(name=NAME, label=LABEL, title="Worst class", estimate=worst, json=f"{NAME}_withheld")
    monkeypatch.setattr(measures, "MEASURES", (*measures.MEASURES, new))


@pytest.fixture
def run(added: None) -> pb.RunDetail:
    return detail("one", measured([0.5, 0.75, 0.9], included=["north"]))


def text(*shown: object) -> str:
    console = Console(file=io.StringIO(), width=400)
    for one in shown:
        console.print(one)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_new_measure_is_in_json_and_in_tables(run: pb.RunDetail) -> None:
    last = run.rounds[-1]
    written = round_json(last)
    assert written[NAME] == pytest.approx(last.correct[0] / last.examples[0])
    assert (written[f"{NAME}_low"], written[f"{NAME}_withheld"]) == (written[NAME], False)
    assert LABEL in text(tables.rounds_table(run.rounds))
    results = {"north": HospitalResult((5.0, 1.0), (10.0, 10.0))}
    assert LABEL in hospital_results.head()
    assert "10.00 %" in next(hospital_results.rows(results))
    stays = LocalEvaluation(("a", "b"), (5.0, 1.0), (10.0, 10.0))
    assert evaluation_summary.class_facts(stays)[NAME] == pytest.approx(0.1)
    assert f"{LABEL} 10.00 %" in evaluation_summary.others(stays)


def test_a_new_measure_is_watched(run: pb.RunDetail) -> None:
    console = Console(file=io.StringIO(), width=400)
    watcher = Watcher(console)
    watcher.show(pb.Event(kind="closed", number=1, round=2, info=run.info, closed=run.rounds[-1]))
    assert f"{LABEL} " in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.integration
def test_a_new_measure_is_on_the_page_of_a_run(run: pb.RunDetail, tmp_path: Path) -> None:
    with shown(MadeUpService(details=[run]), tmp_path / "page") as (server, _):
        page = opened(server).get("/runs/one").text
    assert f'<th scope="col" class="number">{LABEL}</th>' in page  # round by round
    assert f'scope="row">{LABEL}</th>' in page  # final, best, mean of the last


def test_a_new_measure_is_in_the_csv_of_a_run_and_of_a_simulation(run: pb.RunDetail) -> None:
    rows = list(csv.DictReader(io.StringIO(rounds_csv(run).decode())))
    assert float(rows[-1][NAME]) == pytest.approx(run.rounds[-1].correct[0] / run.rounds[-1].examples[0])
    made = manifest(rounds=1)
    record = RoundRecord(1, TaskKind.EVALUATE, (1.0, 3.0, 0.0, 0.0), (4.0, 4.0, 0.0, 0.0), ("north",), {})
    simulated = Result(made, NO_NOISE, [record], "d" * 64)
    assert [row.value for row in history(simulated) if row.measure == NAME] == [0.25]
    assert simulated.summary()[NAME] == 0.25


def test_a_new_measure_is_on_the_card(added: None) -> None:
    last = pb.RoundInfo(kind=pb.EVALUATE, correct=[1, 1, 0, 0], examples=[2, 4, 0, 0])
    info = pb.RunInfo(run_id="r1", name="test", rounds=1)
    card = markdown_of(pb.RunDetail(info=info, manifest_json=manifest(rounds=1).to_json(), rounds=[last]))
    assert "- Worst class: 25.0 %" in card


def test_a_new_measure_is_compared_and_tracked(run: pb.RunDetail) -> None:
    other = detail("two", measured([0.5, 0.75, 0.8], included=["north"]))
    compared = comparison_json(compare([ComparedRun.of(run), ComparedRun.of(other)]))
    assert NAME in compared["standing"]["values"]["one"]  # type: ignore[index]
    assert NAME in compared["runs"][0]["scores"]  # type: ignore[index]
    assert NAME in trackers.values_of(run.rounds[-1])[0]


# ---- values ----------------------------------------------------------------------------------------------------------


def test_a_measure_of_counts_has_the_interval_of_sampling_and_one_with_noise_has_none() -> None:
    counted = EvaluationResult((3.0, 1.0), (4.0, 4.0))
    assert measures.ACCURACY.interval(counted) == share(4, 8)
    assert measures.ACCURACY.estimate(counted) == Estimate(0.5, 0.5, 0.5)
    assert measures.ACCURACY.with_interval(counted) == "50.0 % (15.7 to 84.3)"
    noisy = EvaluationResult((3.0, 1.0), (4.0, 4.0), EvaluationNoise(1.0))
    assert measures.ACCURACY.interval(noisy) is None
