"""No noisy number passes for an accuracy in a demo's report, a picture, a simulation, an ablation or at a hospital."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from consilium.report.curves import curves
from consilium.research import commands as research
from consilium.research import plots
from consilium.research.demo import budgets
from consilium.research.demo.report import CLOSED, PLAIN, PRIVATE, REPAIRED, report
from consilium.research.simulate import runner
from consilium.research.simulate.ablation import report as ablation_report
from consilium.research.simulate.ablation.report import SeedMean
from consilium.research.simulate.results import Result
from privacy.accounting.uncertainty import EvaluationNoise
from privacy.profiles import result_noise
from protos.consilium.v1 import federation_pb2 as pb
from service_core import console
from silo.cli import status
from silo.storage.tasks import LocalEvaluation
from silo.training import evaluation_summary
from tests.support.hospital import B, M, key, opened
from tests.support.privacy import private
from tests.support.recorded_runs import SUMS, machine, records, rows, truthful

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("case", SUMS)
def test_the_demos_report_withholds_what_noise_hides(
    case: str, run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = run(*SUMS[case]).detail
    spent = {"h0": budgets.PrivateRunSpending(7.5, 1e-5, 7.5, 7.1, 2.9)}
    silos, details = (
        [pb.SiloInfo(name="h0", fingerprint="ab" * 20)],
        dict.fromkeys((PLAIN, REPAIRED, CLOSED, PRIVATE), detail),
    )
    scores = {m: {"h0": None} for m in details}
    console.show_reply(report(tmp_path, details, scores, spent, silos, {"h0": [1, 1]}, 12.0), False)
    truthful(capsys.readouterr().out)
    machine(json.dumps(json.loads((tmp_path / "summary.json").read_text())), 6)


def test_a_picture_draws_no_point_outside_and_names_what_is_withheld(run, monkeypatch) -> None:
    from matplotlib.axes import Axes

    drawn, legends = [], []
    plot = Axes.plot

    def watched(self, x, y, dash, **more):
        drawn.extend(y)
        legends.append(more["label"])
        return plot(self, x, y, dash, **more)

    monkeypatch.setattr(Axes, "plot", watched)
    bad, good = run(642.0, 100.0).detail, run(7000.0, 10_000.0).detail
    plots.picture(["accuracy"], ["a", "b", "c"], [curves(detail.rounds) for detail in (bad, good, bad)], "png")
    assert len([v for v in drawn if not math.isnan(v)]) == 3
    assert all(math.isnan(v) or 0 <= v <= 100 for v in drawn)
    for legend in legends:
        truthful(legend)


@pytest.mark.parametrize("case", SUMS)
def test_a_simulation_withholds_what_noise_hides(case: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    manifest, found = private(), records(*SUMS[case])
    result = Result(manifest, result_noise(manifest), found, "d" * 64)

    def simulated(spec, root, tell, *_, **__):
        for record in found if tell else ():
            tell(manifest).closed(record, {})
        return result

    monkeypatch.setattr(runner, "run", simulated)
    words = {
        "multirun": False,
        "jobs": 0,
        "engine": "local",
        "device": "cpu",
        "deterministic": False,
        "spill": None,
        "fine_tune": 0,
        "ray_address": None,
        "ray_actors": 2,
        "ray_gpus": 0.0,
        "data_root": None,
    }
    research.simulate([], **words, as_json=False)
    output = capsys.readouterr()
    truthful(output.out)
    truthful(output.err)
    assert "specificity, AUC, confusion matrix and calibration are not measured" in " ".join(output.out.split())
    research.simulate([], **words, as_json=True)
    text = capsys.readouterr().out
    assert {v for _, v in machine(text, 10)} == {None}
    facts = json.loads(text)
    assert facts["withheld"] is facts["best_withheld"] is facts["balanced_withheld"] is True
    assert facts["withheld_scores"] == ["pa", "pm_l", "pm_v"]
    assert all(0 <= a <= 1 or a == -1 for a in result.accuracies)


@pytest.mark.parametrize("case", SUMS)
def test_a_hospital_reads_no_noise_as_its_own_accuracy(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    correct, examples = SUMS[case]
    noise = EvaluationNoise(20 * math.sqrt(2), 1, True)
    found = LocalEvaluation(tuple("abcdefghij"), rows(correct), rows(examples), noise)
    truthful(evaluation_summary.sentence(found))
    assert evaluation_summary.facts(found)["withheld"] is True
    outbox = opened(tmp_path)
    from tests.support.hospital import finished

    outbox.store.record_run("run-1", "private", M, B)
    outbox.begin(key(), M, B, replace(finished(1.0), evaluation=found)).finish()
    (kept,) = outbox.store.history()[0].tasks
    assert kept.evaluation == found  # the noise is kept with the numbers
    for terminal in (True, False):
        out = io.StringIO()
        monkeypatch.setattr(console, "OUT", Console(file=out, force_terminal=terminal, width=300))
        console.show(status.evaluations("run", [kept]))
        truthful(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    facts = status.task_json(kept)
    assert facts["accuracy"] is None
    assert facts["withheld"] is True
    assert facts["noise_std"] == pytest.approx(20 * math.sqrt(2))


def test_an_ablation_writes_withheld_and_no_check_holds_on_it() -> None:
    assert ablation_report._cell(SeedMean.of([0.5, math.nan])) == "withheld"
