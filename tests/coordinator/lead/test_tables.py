"""What a person sees of numbers."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console
from rich.table import Table

from coordinator.cli.runs import detail_lines
from coordinator.lead import tables
from coordinator.lead.as_json import round_json, run_json, software_json
from coordinator.lead.watcher import Watcher, chart
from fl_core.types.records import NO_BOUND
from privacy.accounting.measures import plain
from protos.consilium.v1 import federation_pb2 as pb
from service_core import console
from service_core.console import KeyValues, TextTable, make_table
from tests.support.made_up_service import MASKED, every_kind


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0.00 %"),
        (0.923, "92.30 %"),
        (1.0, "100.00 %"),
        (-1.0, "-"),
        (-0.031, "withheld: no counts give these values"),
        (1.2, "withheld: no counts give these values"),
    ],
)
def test_what_can_be_no_accuracy_is_not_shown_as_one(share: float, shown: str) -> None:
    assert plain(share).text() == shown


AS_IT_IS = "29:AB:FB:0A /data/[b]/x [/dim] :smile:"


@pytest.mark.parametrize("terminal", [True, False])
def test_text_is_shown_as_it_is(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fingerprints are read out to others: no part of one may turn into a picture."""
    monkeypatch.setattr(console.OUT, "_force_terminal", terminal)
    table = make_table("[/title]", ("[/head]",), [(AS_IT_IS,)])
    items = (AS_IT_IS, table, TextTable("[/title]", ("[/head]",), [(AS_IT_IS,)]), KeyValues([("key", AS_IT_IS)]))
    console.show_reply(console.CommandResult(None, items, [AS_IT_IS]), as_json=False)
    shown, noted = capsys.readouterr()
    assert (shown.count(AS_IT_IS), noted.count(AS_IT_IS)) == (4, 1)
    assert "[/title]" in shown
    assert "[/head]" in shown


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [("opened", 0, "round 1/3"), ("closed", 2, "round 3/3"), ("closed", 3, "evaluation"), ("ended", 3, "")],
)
def test_rounds_are_counted_from_one_for_people(
    kind: str, number: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Watcher() as watcher:
        watcher.show(pb.Event(kind=kind, round=number, info=pb.RunInfo(rounds=3, accuracy=-1, best_accuracy=-1)))
    shown = capsys.readouterr().out
    assert said in shown
    assert ("round" in shown) == said.startswith("round")


def test_a_round_is_named_by_its_place_and_the_evaluation_after_the_last_by_what_it_is() -> None:
    assert tables.round_text(0, pb.TRAIN) == "1"
    assert tables.round_text(3, pb.EVALUATE) == "evaluation"


JUDGED = pb.RoundInfo(
    round=1,
    kind=pb.TRAIN,
    missing={"west": "E-RUN-44: west: too long", "late": "E-RUN-13: no update"},
    cut={"north": "2 rows of prototypes cut", "east": "update clipped to 4 times the usual norm"},
    cut_rows=2,
    unbounded=True,
)
COUNTS = "1 update refused, 2 updates clipped, 2 rows of prototypes clipped, 1 round without a limit on updates"


def test_a_closed_round_says_which_updates_were_refused_and_cut_and_that_nothing_bounded_them() -> None:
    said = round_json(JUDGED)
    assert said["refused"] == {"west": "E-RUN-44: west: too long"}
    assert (set(said["cut"]), said["cut_rows"], said["unbounded"]) == ({"north", "east"}, 2, True)  # type: ignore[call-overload]
    assert tables.outcome_rows(JUDGED)[0] == ("all", NO_BOUND)
    assert [name for name, _ in tables.outcome_rows(JUDGED)] == ["all", "late", "west", "east", "north"]


def test_watch_counts_refusals_and_cuts_on_the_line_of_a_round_and_over_the_run_in_the_title() -> None:
    other = pb.RoundInfo(round=0, kind=pb.TRAIN, cut={"north": "cut"})
    info = pb.RunInfo(rounds=3, accuracy=-1, best_accuracy=-1)
    for terminal in (False, True):
        written = io.StringIO()
        with Watcher(Console(file=written, force_terminal=terminal, width=250)) as watcher:
            for k, closed in enumerate((other, JUDGED)):
                watcher.show(pb.Event(kind="closed", round=k, closed=closed, info=info))
        shown = written.getvalue()
        total = COUNTS.replace("2 updates", "3 updates") if terminal else COUNTS
        assert f"({total})" in shown
        assert terminal or "(1 update clipped)" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_watch_and_show_do_not_narrate_a_survey_as_a_training(terminal: bool) -> None:
    info = pb.RunInfo(run_id="s1", method="survey", rounds=1, closed=1, accuracy=-1, best_accuracy=-1)
    rounds = [pb.RoundInfo(round=0, kind=pb.TRAIN, included=["north"]), pb.RoundInfo(round=1, kind=pb.EVALUATE)]
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=250)
    with Watcher(console) as watcher:
        for closed in rounds:
            watcher.show(pb.Event(kind="closed", round=closed.round, closed=closed, info=info))
    manifest = '{"method": {"options": {}}}'
    for part in detail_lines(pb.RunDetail(info=info, rounds=rounds, aggregator="mean", manifest_json=manifest)):
        if not isinstance(part, Table) or part.title != "Runs":
            console.print(part)
    shown = written.getvalue()
    assert "coordinator survey --of s1" in shown
    assert not [word for word in ("accuracy", "before the round", "aggregator") if word in shown]


def test_a_run_says_what_its_rule_did_to_updates_and_nothing_where_it_did_nothing() -> None:
    none = dict.fromkeys(("updates_refused", "updates_cut", "cut_rows", "unbounded_rounds"), 0)
    assert tables.aggregator_text("mean", none) == ""
    said = tables.aggregator_text("norm_clipped", none | {"updates_refused": 1, "cut_rows": 2})
    assert said == "aggregator=norm_clipped: 1 update refused, 2 rows of prototypes clipped"


SOUTH = pb.AwaitedSilo(name="south", left_s=725, offline_s=2400, classes=["keratosis"])
WAITING = pb.RunInfo(
    run_id="run-1", rounds=9, closed=6, state="running", waiting=pb.Waiting(round=6, there=5, needed=4, silos=[SOUTH])
)


def test_who_is_awaited_is_named_with_a_countdown_and_the_classes_that_depend_on_it() -> None:
    line = "south (offline 40 min, at most 12 min left; no other hospital has keratosis)"
    assert tables.waiting_lines(WAITING) == [
        "round 7: 5 updates received, 4 needed; waits for",
        f"  {line}",
    ]
    assert run_json(WAITING)["waiting"] == {
        "round": 6,
        "there": 5,
        "needed": 4,
        "sealed": False,
        "silos": [{"name": "south", "left": 725.0, "online": False, "offline": 2400.0, "classes": ["keratosis"]}],
    }
    sealed = pb.RunInfo()
    sealed.CopyFrom(WAITING)
    sealed.waiting.sealed, sealed.waiting.there = True, 2
    assert tables.waiting_lines(sealed) == [
        "round 7: all updates received; 2 of 4 confirmations; waits for",
        f"  {line}",
    ]
    out = io.StringIO()
    with Watcher(Console(file=out, force_terminal=True, width=200)) as watcher:
        watcher.show(pb.Event(kind="silo", info=WAITING, silos=[pb.SiloInfo(name="south", state="offline")]))
    assert "offline; awaited (offline 40 min, at most 12 min left; no other hospital has keratosis)" in out.getvalue()


def closed(number: int, correct: float) -> pb.Event:
    return pb.Event(
        kind="closed", round=number, closed=pb.RoundInfo(round=number, correct=[correct], examples=[4]), info=WAITING
    )


def test_a_terminal_shows_the_accuracies_of_a_run_as_a_chart_and_a_pipe_does_not() -> None:
    shown, piped = io.StringIO(), io.StringIO()
    for out, terminal in ((shown, True), (piped, False)):
        with Watcher(Console(file=out, force_terminal=terminal, width=80)) as watcher:
            for number, correct in enumerate((1.0, 2.0, 4.0)):
                watcher.show(closed(number, correct))
    assert "accuracy over 2 rounds of training" in shown.getvalue()
    assert " 100 % ┤" in shown.getvalue()
    assert "█" not in piped.getvalue()
    assert "accuracy over" not in piped.getvalue()


def test_on_a_narrow_terminal_a_run_can_still_be_named_and_nothing_is_left_out() -> None:
    runs = [pb.RunInfo(run_id=f"fedmr-folder-{k:04x}", state="finished", rounds=3, accuracy=-1) for k in (1, 2)]
    for run in runs:
        run.accuracy_estimate.withheld = "noise larger than signal"
    out = io.StringIO()
    Console(file=out, width=80).print(tables.runs_table(runs))
    assert "fedmr-folder-0001" in out.getvalue()
    assert "fedmr-folder-0002" in out.getvalue()
    assert "…" not in out.getvalue()
    assert "noise larger" not in out.getvalue()


def test_the_table_of_runs_says_of_how_many_classes_a_model_was_taught_and_tested() -> None:
    counted = pb.RunInfo(run_id="run-1", accuracy=-1)
    counted.coverage.CopyFrom(pb.ClassCoverage(classes=[*"abcd"], hospitals=[1, 3, 2, 0], least=1, tested=[5, 0, 9, 0]))
    older = pb.RunInfo(run_id="run-2", accuracy=-1)
    out = io.StringIO()
    Console(file=out, width=300).print(tables.runs_table([counted, older]))
    first, second = (line for line in out.getvalue().splitlines() if "run-" in line)
    assert "│ 2 of 4 classes tested, 3 of 4 trained at 1 to 3 hospitals each │" in first
    assert "trained" not in second


def test_the_live_view_says_how_the_run_stands_in_one_line_and_keeps_warnings_above_it() -> None:
    out = io.StringIO()
    info = pb.RunInfo(run_id="run-1", state="running", rounds=3, closed=1, accuracy=0.5, best_accuracy=0.5)
    with Watcher(Console(file=out, force_terminal=True, width=200, highlight=False)) as watcher:
        watcher.show(pb.Event(kind="warning", text="fewer than 3 silos", info=info, at_unix=1))
        watcher.show(pb.Event(kind="silo", info=info, silos=[pb.SiloInfo(name="north", state="online")]))
    lines = out.getvalue().splitlines()
    assert any("warning" in line and "fewer than 3 silos" in line for line in lines)
    assert any("run-1  running  round 1/3  accuracy 50.00 %" in line for line in lines)


def test_a_sealed_set_is_said_to_be_of_its_round() -> None:
    info = pb.RunInfo(rounds=3, closed=1)
    events = [pb.Event(kind="sealed", round=k, info=info, text="6 of 6 updates received") for k in (1, 3)]
    assert [tables.place(event, info.rounds) for event in events] == ["round 2/3", "evaluation"]


def test_the_accuracy_of_a_closed_training_round_is_said_to_be_of_the_model_before_it() -> None:
    out = io.StringIO()
    info = pb.RunInfo(rounds=3, closed=1, accuracy=0.5, best_accuracy=0.5)
    with Watcher(Console(file=out, width=200)) as watcher:
        for number in (0, 3):
            closed = pb.RoundInfo(round=number, correct=[1, 1], examples=[2, 2])
            watcher.show(pb.Event(kind="closed", round=number, info=info, closed=closed))
    trained, evaluated = out.getvalue().splitlines()
    assert "round 1/3  model before the round: balanced accuracy 50.00 %  accuracy 50.00 %" in trained
    assert "evaluation  balanced accuracy 50.00 %  accuracy 50.00 %" in evaluated


def test_hospitals_are_shown_with_what_they_declare_and_do_in_words() -> None:
    silo = pb.SiloInfo(name="north", state="online", activity=pb.AWAITING_APPROVAL, software="consilium-fl 0.1.0+abc")
    silo.data.CopyFrom(pb.DataOffer(name="folder", nominal_size=100, holds=["nevus", "keratosis"]))
    out = io.StringIO()
    Console(file=out, width=220).print(tables.silos_table([silo]))
    for said in ("size, rounded up", "nevus, keratosis", "awaiting approval (round 1)", " 0.1.0+abc "):
        assert said in out.getvalue()


def test_a_run_names_its_coordinators_build_and_the_hospitals_that_had_another() -> None:
    found = {"": "fl 1+a", "north": "fl 1+a", "west": "fl 1+a", "south": "fl 1+b", "east": ""}
    assert tables.software_text(found) == ("fl 1+a (coordinator and 2 silos), east no version given, south fl 1+b")
    assert tables.software_text({"": "fl 1+a"}) == "fl 1+a (coordinator and 0 silos)"
    assert tables.software_text({}) == ""
    assert software_json(found) == {
        "coordinator": "fl 1+a",
        "silos": {"east": "", "north": "fl 1+a", "south": "fl 1+b", "west": "fl 1+a"},
    }


def test_the_builds_of_a_run_are_no_lines_of_watch_and_a_warning_of_them_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Watcher() as watcher:
        watcher.show(pb.Event(kind="software", silo="north", text="fl 1+b"))
        watcher.show(pb.Event(kind="warning", text="expected fl 1+a on all sides, found north (fl 1+b)"))
    shown = capsys.readouterr().out
    assert shown.count("fl 1+b") == 1


# ---- the curve in a few lines of text -------------------------------------------------------------------------------


def heights(lines: list[str]) -> list[float]:
    """Read how many lines high each column is."""
    bars = [line.split("│")[-1].split("┤")[-1] for line in lines]
    return [sum(" ▁▂▃▄▅▆▇█".index(bar[k]) / 8 for bar in bars) for k in range(len(bars[0]))]


def test_columns_are_as_high_as_their_shares_over_an_axis_in_percent() -> None:
    lines = chart([0.0, 0.25, 0.5, 1.0], width=4, height=4)
    assert lines[0].startswith(" 100 %")
    assert lines[-1].startswith("   0 %")
    assert heights(lines) == [0.125, 1, 2, 4]  # a share of 0 is still seen


def test_more_rounds_than_columns_are_averaged_and_fewer_are_widened() -> None:
    assert heights(chart([0.0, 0.5, 0.5, 1.0], width=2, height=4)) == [1, 3]
    assert heights(chart([0.0, 1.0], width=5, height=1)) == [0.125, 0.125, 1, 1]


def test_what_is_no_share_is_a_gap() -> None:
    found = heights(chart([0.5, None, math.nan, 7.0, -1.0, 1.0], width=6, height=4))
    assert found[1:5] == [0, 0, 0, 0]
    assert found[5] == 4


@pytest.mark.parametrize("values", [[], [0.5], [None, None], [math.nan, 0.5]])
def test_without_two_values_there_is_no_chart(values: list[float | None]) -> None:
    assert chart(values) == []


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    assert "".join(chart([0.1, 0.9], ascii_only=True)).isascii()


def test_a_long_run_fits_the_width() -> None:
    lines = chart([k / 5000 for k in range(5000)], width=60)
    assert {len(line) for line in lines} == {68}


@pytest.mark.parametrize(("members", "why"), [(2, "; masks need 3 hospitals, and 2 take part"), (3, "")])
def test_a_run_without_masks_says_who_reads_single_updates_and_why(members: int, why: str) -> None:
    """`secagg=auto` has none with two hospitals, or with three of which one is away."""
    named = [{"name": f"h{k}"} for k in range(members)]
    text = tables.unmasked(json.dumps({"members": named}))
    assert text == f"no masks: the coordinator reads each hospital's update by itself{why}"
    assert tables.unmasked(json.dumps({"members": named, "secagg": {"min_contributors": 1}})) == ""


def test_show_says_of_a_run_whether_the_coordinator_reads_single_updates() -> None:
    service = every_kind(1e9)
    lines = {d.info.run_id: [line for line in detail_lines(d) if isinstance(line, str)] for d in service.details}
    read = "reads each hospital's update by itself"
    said = {run: any(read in line for line in found) for run, found in lines.items()}
    assert said == {run: run != MASKED for run in lines}


@pytest.mark.parametrize(
    ("method", "model", "train", "hinted"),
    [
        ("analytic", "efficientnet_lite0", {}, True),
        ("analytic", "efficientnet_lite0", {"freeze": "features"}, False),
        ("analytic", "random_features", {}, False),
        ("fedavg", "efficientnet_lite0", {}, False),
    ],
)
def test_a_run_that_could_keep_features_at_the_same_result_says_so(
    method: str, model: str, train: dict[str, str], hinted: bool
) -> None:
    manifest = json.dumps({"method": {"name": method}, "model": {"name": model}, "train": train})
    assert ("train.freeze=features" in tables.feature_hint(manifest)) is hinted
