"""No noisy number passes for an accuracy: not in a table, a line, a card, a picture's legend or a JSON object.

A run whose hospitals together counted 70.3 right answers among 39.1 examples, or -4 among 100, is put into the store as
the service puts it, and read through everything that shows accuracies.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from coordinator import console
from coordinator.api.messages import event, round_info, run_info, stored_result_noise
from coordinator.cli import research
from coordinator.cli import runs as lead
from coordinator.cli.export import model_card
from coordinator.demo import budgets
from coordinator.demo.report import PRIVATE, report
from coordinator.simulation.privacy_ablation import table as ablation_table
from coordinator.simulation.runner import Result
from coordinator.storage.records import Run
from coordinator.storage.store import Store
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from privacy.ablation.checks import Estimate
from privacy.profiles import result_noise
from privacy.reports.uncertainty import EvaluationNoise
from protos.consilium.v1 import federation_pb2 as pb
from silo.cli import console as show
from silo.storage.tasks import Evaluation
from silo.training import evaluation_summary
from tests.support.fake_coordinator import MEMBERS
from tests.support.hospital import B, M, key, opened
from tests.support.privacy import private

CLASSES = 10
PERSONAL = {"pa": 0.97, "pa_std": 0.02, "pm_l": 0.5, "pm_l_std": 0.1, "pm_v": 0.4, "pm_v_std": 0.1}
SUMS = {
    "right on 70 of 39": (70.3, 39.1),
    "-4 %": (-4.0, 100.0),
    "642 %": (642.0, 100.0),
    "nothing passed": (0.0, 0.0),
    "negative count": (3.0, -55.0),
    "minus one": (-100.0, 100.0),
    "zeros": (-0.0, -0.0),
    "huge": (1e38, 1e-40),
}
PER_CENT = re.compile(r"(-?\d+(?:\.\d+)?) ?%")
OUT_OF = re.compile(r"-?\d+ of (?:about )?-?\d+ own|\d+/\d+ -?\d")


def rows(total: float) -> tuple[float, ...]:
    return (total, *[0.0] * (CLASSES - 1))


def records(correct: float, examples: float, personal: bool = True) -> list[RoundRecord]:
    """Three rounds of these sums."""
    kinds = (TaskKind.TRAIN, TaskKind.TRAIN, TaskKind.EVALUATE)
    scores = PERSONAL if personal else {}
    return [
        RoundRecord(t, kind, rows(correct), rows(examples), tuple(MEMBERS), {}, 0, scores if t < 2 else {})
        for t, kind in enumerate(kinds)
    ]


class Case:
    """A run in the coordinator's store, as its service tells of it."""

    def __init__(self, folder: Path, manifest: RunManifest, found: list[RoundRecord]) -> None:
        self.manifest, self.records = manifest, found
        self.store = Store(folder)
        run = Run(
            "r1",
            "private",
            "q",
            "{}",
            manifest.to_json(),
            manifest.digest(),
            manifest.method.name,
            manifest.data,
            2,
            tuple(MEMBERS),
        )
        self.store.runs.add(run, 2)
        self.store.runs.begin("r1", "0" * 64, 5)
        for record in found:
            self.store.runs.open_round("r1", record.round, record.kind, MEMBERS)
            state = (f"{record.round + 1}" * 64, 5) if record.kind is TaskKind.TRAIN else None
            self.store.runs.close_round("r1", record, state, "model")

    @property
    def detail(self) -> pb.RunDetail:
        run, noise = self.store.runs.get("r1"), stored_result_noise(self.manifest.to_json())
        closed = [round_info(row, noise) for row in self.store.runs.rounds("r1")]
        return pb.RunDetail(info=run_info(run, self.store), manifest_json=run.manifest, rounds=closed)

    @property
    def events(self) -> list[pb.Event]:
        return [event(row, self.store) for row in self.store.runs.events("r1", 0)]


class Client:
    """What the lead's commands ask."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def show(self, run: str) -> pb.RunDetail:
        return self.case.detail

    def runs(self) -> list[pb.RunInfo]:
        return [self.case.detail.info]

    def silos(self) -> pb.SiloList:
        return pb.SiloList()

    def watch(self, run: str) -> Iterator[pb.Event]:
        yield from self.case.events


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = []

    def make(correct: float, examples: float, manifest: RunManifest | None = None, personal: bool = True) -> Case:
        case = Case(tmp_path / f"{len(made)}", manifest or private(), records(correct, examples, personal))
        made.append(case)

        @contextmanager
        def client(_: object) -> Iterator[Client]:
            yield Client(case)

        monkeypatch.setattr(lead, "_client", client)
        return case

    yield make
    for case in made:
        case.store.close()


def truthful(text: str, must_say: bool = True) -> None:
    """Check that a text for people has no share outside of 0 to 100 %, and says what noise left."""
    for found in PER_CENT.findall(text):
        assert 0 <= float(found) <= 100, text
    assert not OUT_OF.search(text), text
    assert "nan" not in text.lower().replace("nannan", ""), text
    assert not must_say or "withheld" in text or "95 %:" in text, text


def shares(value: object, name: str = "") -> Iterator[tuple[str, float | None]]:
    """List the accuracies and scores of a JSON object, by name."""
    if isinstance(value, dict):
        for k, v in value.items():
            inherits = "accuracy" in name or name == "personal_by_round"
            yield from shares(v, name if inherits else str(k))
    elif isinstance(value, list):
        for v in value:
            yield from shares(v, name)
    elif "accuracy" in name or name.removeprefix("best_") in ("pa", "pm_l", "pm_v", "fairness", "personal_by_round"):
        assert value is None or isinstance(value, float), (name, value)
        yield name, value


def machine(text: str, least: int = 1) -> list[tuple[str, float | None]]:
    """Check that JSON lines have shares of 0 to 1 or null alone; return them by name."""
    found = []
    for line in text.splitlines():
        found += list(shares(json.loads(line, parse_constant=pytest.fail)))
    assert len(found) >= least
    assert all(v is None or 0 <= v <= 1 for _, v in found), found
    return found


@pytest.mark.parametrize("case", SUMS)
def test_the_leads_commands_withhold_what_noise_hides(case: str, run, capsys: pytest.CaptureFixture[str]) -> None:
    run(*SUMS[case])
    for command in (lead.show, lead.watch):
        command()
        truthful(capsys.readouterr().out)
        command(as_json=True)
        found = machine(capsys.readouterr().out, 6)
        assert {v for _, v in found} == {None}
    for listing in (lead.runs, lead.status):
        listing()
        truthful(capsys.readouterr().out, must_say=listing is lead.runs)
        listing(as_json=True)
        machine(capsys.readouterr().out, 6 if listing is lead.runs else 0)


@pytest.mark.parametrize("case", SUMS)
def test_json_of_a_run_says_that_it_is_withheld(case: str, run) -> None:
    made = run(*SUMS[case])
    for found in (console.run_json(made.detail.info), console.round_json(made.detail.rounds[0])):
        assert found["withheld"] is True
        assert found["accuracy_low"] is found["accuracy_high"] is None
    facts = console.run_json(made.detail.info)
    assert facts["global_accuracy"] is facts["best_global_accuracy"] is None
    assert facts["best_withheld"] is True
    closed = console.round_json(made.detail.rounds[0])
    assert closed["noise_std"] == pytest.approx(20 * math.sqrt(2 * len(MEMBERS)), rel=0.01)
    assert closed["withheld_scores"] == ["pa", "pm_l", "pm_v"]
    assert (made.detail.info.accuracy, made.detail.info.best_accuracy) == (-1, -1)  # what older clients read as none
    assert not set(made.detail.rounds[0].personal) & set(PERSONAL)


@pytest.mark.parametrize("case", SUMS)
def test_live_progress_withholds_what_noise_hides(case: str, run) -> None:
    for terminal in (False, True):
        out = io.StringIO()
        watcher = console.Watcher(Console(file=out, force_terminal=terminal, width=300, markup=False))
        for e in run(*SUMS[case]).events:
            watcher.show(e)
        Console(file=out, width=300).print(watcher._table())
        truthful(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))


@pytest.mark.parametrize("case", SUMS)
def test_a_model_card_withholds_what_noise_hides(case: str, run) -> None:
    detail = run(*SUMS[case]).detail
    card = model_card(detail.info, RunManifest.from_json(detail.manifest_json), detail.rounds)
    truthful(card)
    assert "withheld: noise larger than signal" in card
    assert "39 " not in card  # no noisy count stands where the card has test examples


@pytest.mark.parametrize("case", SUMS)
def test_the_demos_report_withholds_what_noise_hides(
    case: str, run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = run(*SUMS[case]).detail
    spent = {"h0": budgets.Spending(7.5, 1e-5, 7.5, 7.1, 2.9, True)}
    silos, details = (
        [pb.SiloInfo(name="h0", fingerprint="ab" * 20)],
        dict.fromkeys(("fedmr", "fedavg", PRIVATE), detail),
    )
    report(tmp_path, details, {m: {"h0": None} for m in details}, spent, silos, 12.0, quiet=False)
    truthful(capsys.readouterr().out)
    machine(json.dumps(json.loads((tmp_path / "summary.json").read_text())), 6)


def test_a_picture_draws_no_point_outside_and_names_what_is_withheld(run, tmp_path: Path, monkeypatch) -> None:
    from matplotlib.axes import Axes

    drawn, legends = [], []
    plot = Axes.plot

    def watched(self, x, y, **more):
        drawn.extend(y)
        legends.append(more["label"])
        return plot(self, x, y, **more)

    monkeypatch.setattr(Axes, "plot", watched)
    from coordinator.demo.report import _picture

    bad, good = run(642.0, 100.0).detail, run(7000.0, 10_000.0).detail
    _picture(tmp_path / "a.png", {"fedmr": bad, "fedavg": good, PRIVATE: bad})
    assert len([v for v in drawn if not math.isnan(v)]) == 3
    assert all(math.isnan(v) or 0 <= v <= 100 for v in drawn)
    for legend in legends:
        truthful(legend)


@pytest.mark.parametrize("case", SUMS)
def test_a_simulation_withholds_what_noise_hides(case: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    manifest, found = private(), records(*SUMS[case])
    result = Result(manifest, result_noise(manifest), found, "d" * 64)

    def simulated(spec, root, tell, *_):
        for record in found if tell else ():
            tell(manifest).closed(record, {})
        return result

    monkeypatch.setattr(research.runner, "run", simulated)
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
    found = Evaluation(tuple("abcdefghij"), rows(correct), rows(examples), noise)
    truthful(evaluation_summary.sentence(found))
    assert evaluation_summary.facts(found)["withheld"] is True
    outbox = opened(tmp_path)
    from tests.support.hospital import finished

    outbox.store.record_run("run-1", "private", M, B)
    outbox.stage(key(), M, B, replace(finished(1.0), evaluation=found))
    (kept,) = outbox.store.history()[0].tasks
    assert kept.evaluation == found  # the noise is kept with the numbers
    for terminal in (True, False):
        out = io.StringIO()
        monkeypatch.setattr(show, "OUT", Console(file=out, force_terminal=terminal, width=300, soft_wrap=True))
        name, overall, by_class, fate = show._evaluation_row(kept)
        show.show_rows("run", ("task", "own", "by class", "update"), [(name, overall, by_class, fate)])
        truthful(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    facts = show._task_json(kept)
    assert facts["accuracy"] is None
    assert facts["withheld"] is True
    assert facts["noise_std"] == pytest.approx(20 * math.sqrt(2))


def test_enough_signal_is_shown_with_its_interval_everywhere(run, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(7000.0, 10_000.0, personal=False)
    lead.show()
    text = capsys.readouterr().out
    truthful(text)
    assert "70.0 % (95 %:" in " ".join(text.split())
    facts = console.run_json(made.detail.info)
    assert facts["withheld"] is facts["best_withheld"] is False
    assert facts["global_accuracy"] == pytest.approx(0.7)
    assert facts["accuracy_low"] < 0.7 < facts["accuracy_high"]
    assert facts["best_accuracy_low"] < facts["accuracy_low"]  # the best of three is less certain than one
    assert made.detail.info.accuracy == pytest.approx(0.7)
    simulated = Result(made.manifest, result_noise(made.manifest), made.records, "d" * 64).summary()
    assert simulated["accuracy_by_round"] == [console.round_json(r)["accuracy"] for r in made.detail.rounds]
    assert (simulated["accuracy_low"], simulated["accuracy_high"]) == (facts["accuracy_low"], facts["accuracy_high"])


def test_a_published_test_set_is_shown_as_it_was_counted(run, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(70.0, 100.0, private(test_data="public"), personal=False)
    assert console.run_json(made.detail.info)["global_accuracy"] == 0.7
    lead.show()
    assert "70.00 %" in capsys.readouterr().out
    assert "95 %:" not in model_card(made.detail.info, made.manifest, made.detail.rounds)


def test_a_plain_run_that_a_silo_lies_to_shows_no_impossible_share(run, capsys: pytest.CaptureFixture[str]) -> None:
    for sums in SUMS.values():
        if sums == (0.0, 0.0):
            continue
        run(*sums, replace(private(), privacy=NamedOptions("none")), personal=False)
        lead.show()
        truthful(capsys.readouterr().out, must_say=False)
        lead.show(as_json=True)
        machine(capsys.readouterr().out, 6)


def test_a_manifest_that_nobody_can_read_lists_its_run_and_withholds_its_numbers(run) -> None:
    made = run(70.0, 100.0)
    stored = replace(made.store.runs.get("r1"), manifest='{"format": 99}')
    info = run_info(stored, made.store)
    assert console.run_json(info)["withheld"] is True
    assert stored_result_noise('{"format": 99}').scores == {"pa", "pm_l", "pm_v"}


def test_an_ablation_writes_withheld_and_no_check_holds_on_it() -> None:
    assert ablation_table._cell(Estimate.of([0.5, math.nan])) == "withheld"


def test_numbers_of_an_earlier_version_that_are_no_counts_are_withheld(tmp_path: Path) -> None:
    """It wrote down no noise; what a hospital of a private run kept then is no accuracy now."""
    from silo.storage.store import _evaluation

    old = {"classes": ["a"], "correct": [30.3], "examples": [39.1]}
    assert evaluation_summary.estimate(_evaluation(old)).withheld
    assert evaluation_summary.overall(_evaluation(old | {"correct": [30.0], "examples": [39.0]})).startswith(
        "30/39 76.92"
    )
