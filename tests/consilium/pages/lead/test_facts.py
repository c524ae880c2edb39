"""What the lead's page says of what the service answers."""

from __future__ import annotations

import math

import pytest

from consilium.pages.lead import overview
from consilium.pages.lead.overview import DAY_S, OwnCertificates, State
from consilium.pages.lead.run_facts import headline, open_round, run_facts
from consilium.pages.lead.run_record import WatchedRun
from consilium.pages.lead.service_watch import FollowedRun, ServiceSnapshot, ServiceUnreachable
from consilium.pages.lead.site import comparison_facts
from consilium.report.comparison import compare
from coordinator.lead import accuracy
from coordinator.lead.tables import hospital_tables
from fl_core.types.records import NO_BOUND
from protos.consilium.v1 import federation_pb2 as pb
from tests.support.made_up_service import FEDAVG, FEDMR, LONG, MASKED, PRIVATE, every_kind
from tests.support.recorded_runs import detail, measured

HERE = pb.SiloInfo(name="north", state="online")
GONE = pb.SiloInfo(name="south", state="offline")
RUNNING = pb.RunInfo(run_id="run-1", state="running", rounds=9, closed=6)


def waiting(**silos: bool) -> pb.RunInfo:
    info = pb.RunInfo()
    info.CopyFrom(RUNNING)
    awaited = [pb.AwaitedSilo(name=name, online=online, left_s=60, offline_s=120) for name, online in silos.items()]
    info.waiting.CopyFrom(pb.Waiting(round=6, there=1, needed=2, silos=awaited, opened_unix=100.0))
    return info


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (ServiceSnapshot(away=ServiceUnreachable(5.0, "x")), "The coordinator does not answer"),
        (
            ServiceSnapshot(1.0, [HERE], away=ServiceUnreachable(1e9, "x")),
            "The coordinator has not answered since 2001",
        ),
        (ServiceSnapshot(1.0, [pb.SiloInfo(name="east", alarm="two keys")]), "Somebody else may have the key of east"),
        (
            ServiceSnapshot(1.0, [HERE, GONE], runs=[waiting(north=True, south=False)]),
            "Round 7 of run-1 waits for south",
        ),
        (ServiceSnapshot(1.0, [HERE], runs=[waiting(north=True)]), "run-1 is in round 7 of 9"),
        (
            ServiceSnapshot(1.0, [HERE], runs=[pb.RunInfo(run_id="run-2", state="paused", reason="few")]),
            "run-2 is paused",
        ),
        (ServiceSnapshot(1.0, [HERE], runs=[pb.RunInfo(run_id="run-2", state="finished")]), "No run is under way"),
        (ServiceSnapshot(1.0, [HERE]), "No run yet"),
        (ServiceSnapshot(1.0), "No hospital has joined yet"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_headline_says_what_matters_most(found: ServiceSnapshot, says: str) -> None:
    assert overview.headline(found, 10.0)[0].startswith(says)


def test_certificates_are_listed_by_when_they_end_with_what_to_do_about_those_that_do() -> None:
    silos = [
        pb.SiloInfo(name="far", state="online", certificate_until_unix=60 * DAY_S),
        pb.SiloInfo(name="soon", state="offline", certificate_until_unix=5 * DAY_S),
        pb.SiloInfo(name="over", state="offline", certificate_until_unix=-DAY_S),
        pb.SiloInfo(name="out", state="revoked", certificate_until_unix=-DAY_S),
    ]
    found = overview.certificates(silos, OwnCertificates("anna", 10 * DAY_S, 3650 * DAY_S), 0.0)
    assert [(c.whose, c.state.kind) for c in found] == [
        ("over", "bad"),
        ("soon", "wait"),
        ("anna (you)", "wait"),
        ("far", "good"),
        ("the authority", "good"),
    ]
    assert "coordinator invite NAME --again" in found[0].renewal
    assert "coordinator leads renew anna" in found[2].renewal
    assert found[3].renewal == ""


def test_the_open_round_says_of_each_hospital_where_it_stands() -> None:
    info = waiting(east=True, south=False)
    info.waiting.silos[1].classes.append("keratosis")
    info.waiting.arrivals.append(pb.Arrival(silo="north", bytes=5, at_unix=130.0))
    info.excluded.append("late")
    events = [
        pb.Event(kind="refused", round=6, silo="west", text="E-X: no"),
        pb.Event(kind="refused", round=5, silo="east", text="an earlier round"),
    ]
    found = open_round(info, ["north", "east", "south", "west", "late"], events, 160.0)
    assert found is not None
    assert [(bar.name, bar.state) for bar in found.bars] == [
        ("east", State("wait", "pending")),
        ("south", State("bad", "pending, offline")),
        ("north", State("good", "received")),
        ("west", State("bad", "refused")),
        ("late", State("off", "excluded")),
    ]
    east, south, north, west, _ = found.bars
    assert east.when == "60 s left"
    assert south.when == "60 s left, offline for 2 min"
    assert south.alone == "no other hospital has keratosis"
    assert (north.when, north.width, north.size) == ("after 30 s", 50.0, 5)
    assert west.when == "E-X: no"
    assert open_round(RUNNING, ["north"], [], 160.0) is None


def test_what_hospitals_did_and_stated_is_counted_over_training_rounds() -> None:
    rounds = measured([0.1, 0.2, 0.3])
    for k, r in enumerate(rounds):
        r.included.extend(["north"] if k == 1 else ["north", "south"])
        r.opened_unix = 100.0
        r.arrivals.extend([pb.Arrival(silo=name, bytes=10, at_unix=100.0 + 10 * (k + 1)) for name in r.included])
    rounds[1].missing["south"] = "E-RUN-13: away"
    made = detail("run-1", rounds)
    stated = pb.Attestation(policy_digest="p" * 64, ledger_seq=7, ledger_head="h" * 64, ledger_restored=2)
    made.declarations.append(pb.Declaration(silo="south", round=2, stated=stated))
    facts = run_facts(made.info, FollowedRun(WatchedRun(made)), 200.0)
    rows = {row.name: row for row in facts.hospitals}
    assert rows["north"].rounds == "2 of 2"
    assert (rows["north"].bytes_up, rows["north"].seconds, rows["north"].policy) == (20, "15 s", "none stated")
    assert (rows["south"].rounds, rows["south"].newest_reason) == ("1 of 2", "E-RUN-13: away")
    assert (rows["south"].policy, rows["south"].ledger) == ("p" * 12, "entry 7")
    assert rows["south"].restored == "restored 2 times"
    assert facts.record.rounds[1].judged == (("south", "E-RUN-13: away"),)
    assert [chart.x for chart in facts.record.paces] == [[1, 2]]


def test_the_page_says_the_rule_and_counts_what_it_did_to_updates() -> None:
    rounds = measured([0.1, 0.2, 0.3])
    rounds[1].missing["south"], rounds[1].cut["north"] = "E-RUN-44: south: too long", "3 rows of prototypes cut"
    rounds[1].cut_rows, rounds[0].unbounded = 3, True
    made = detail("run-1", rounds)
    made.aggregator = "norm_clipped"
    facts = run_facts(made.info, FollowedRun(WatchedRun(made)), 200.0)
    assert facts.aggregator == (
        "aggregator=norm_clipped: 1 update refused, 1 update clipped, 3 rows of prototypes clipped, "
        "1 round without a limit on updates"
    )
    assert [row.judged for row in reversed(facts.record.rounds)][:2] == [
        (("all", NO_BOUND),),
        (("south", "E-RUN-44: south: too long"), ("north", "3 rows of prototypes cut")),
    ]


def test_waiting_and_cuts_are_not_what_went_wrong() -> None:
    kinds = ("waiting", "cut", "refused", "ended", "closed", "warning", "waiting")
    events = [pb.Event(kind=kind, round=k, text=f"number {k}") for k, kind in enumerate(kinds)]
    made = detail("run-1", [])
    facts = run_facts(made.info, FollowedRun(WatchedRun(made), events=events), 1.0)
    assert [e.kind for e in facts.trouble] == ["warning", "ended", "refused"]
    assert [(e.kind, e.round) for e in facts.as_planned] == [("waiting", 6), ("cut", 1), ("waiting", 0)]


def test_curves_of_the_page_are_those_of_the_record() -> None:
    made = detail("run-1", measured([0.1, 0.25, 0.5]))
    facts = run_facts(made.info, FollowedRun(WatchedRun(made)), 1.0)
    assert facts.record.charts
    assert facts.record.charts[0].series[1].values == pytest.approx([10.0, 25.0, 50.0])
    assert [series.name for series in facts.record.charts[0].series] == ["balanced accuracy", "accuracy"]
    assert [name for name, *_ in facts.scores] == ["balanced accuracy", "accuracy"]
    assert [chart.series[0].name for chart in facts.record.class_charts] == ["a"]


def test_a_class_has_its_chart_and_its_colour_whatever_was_measured_so_far() -> None:
    run = every_kind().details[1]
    drawn = {s.name: (k, s.colour) for k, chart in enumerate(WatchedRun(run).class_charts) for s in chart.series}
    assert list(drawn) == list(LONG.classes[:9])  # the last one has no test images
    assert len(set(drawn.values())) == 9
    for r in run.rounds:
        r.examples[2] = r.correct[2] = 0.0
    fewer = {s.name: (k, s.colour) for k, chart in enumerate(WatchedRun(run).class_charts) for s in chart.series}
    assert fewer == {name: place for name, place in drawn.items() if name != LONG.classes[2]}


def test_a_measure_has_its_colour_and_a_run_its_own_whatever_others_have() -> None:
    plain, other = every_kind().show(FEDAVG), WatchedRun(every_kind().show(FEDMR))
    for r in plain.rounds:
        r.ClearField("clinical")
    colours = [{s.name: s.colour for s in each.charts[0].series} for each in (WatchedRun(plain), other)]
    assert colours == [{"balanced accuracy": 1, "accuracy": 2}, {"balanced accuracy": 1, "accuracy": 2, "macro AUC": 3}]
    charts = comparison_facts(compare([WatchedRun(plain).compared, other.compared])).charts
    assert [{s.name: s.colour for s in chart.series} for chart in charts] == [
        {"A": 1, "B": 2},
        {"A": 1, "B": 2},
        {"B": 2},
    ]


def test_where_noise_hides_all_points_there_is_no_chart_and_the_table_says_why() -> None:
    record = WatchedRun(every_kind().show(PRIVATE))
    assert (record.charts, record.class_charts) == ((), ())
    assert {value.withheld for value in record.compared.by_class.values()} == {"noise larger than signal"}


def test_a_run_says_who_reads_its_updates_with_masks_and_without() -> None:
    said = {
        run.info.run_id: run_facts(run.info, FollowedRun(WatchedRun(run)), 1.0).privacy for run in every_kind().details
    }
    assert (
        said[MASKED][0]
        == "Updates are masked: this coordinator reads sums only, unless more than 3 hospitals collude with it."
    )
    assert said[FEDMR][0] == "Updates are not masked: this coordinator can read the update of each hospital."
    assert said[PRIVATE][1].startswith("Profile dp_record (epsilon 3.0, delta 1e-05, unit patient)")


def test_an_evaluation_says_of_hospitals_what_the_command_says() -> None:
    run = every_kind().details[-1]
    rows, said = WatchedRun(run).hospitals
    table, *sentences = hospital_tables(run)
    assert [[*column.cells] for column in table.columns] == [list(cells) for cells in zip(*rows, strict=True)]
    assert [text.rstrip(".").lower() for text in said] == [text.lower() for text in sentences]
    assert "10 hospitals in the sums alone" in said[0]
    assert "models that they trained alone" in said[1]


def test_a_run_with_noise_says_what_is_not_measured_and_one_without_says_nothing() -> None:
    rounds = measured([0.1, 0.25])
    assert WatchedRun(detail("run-1", rounds)).not_measured == ""
    assert WatchedRun(detail("run-1", [])).not_measured == ""
    for r in rounds:
        r.noise.CopyFrom(pb.Noise(std=2.0, draws=1))
    said = WatchedRun(detail("run-1", rounds)).not_measured
    assert said.startswith("Specificity, AUC, confusion matrix and calibration are not measured")


@pytest.mark.parametrize(
    "state", ["finished", "paused", "failed", "aborted", "running", "waiting", "of a later version"]
)
def test_a_run_in_any_state_has_a_headline(state: str) -> None:
    info = pb.RunInfo(run_id="run-1", state=state, rounds=3, closed=1, accuracy=0.5, best_accuracy=0.6)
    text, _ = headline(info, None)
    assert text
    if state == "finished":
        assert text == "Finished: accuracy 50.00 %"  # of a service that says no balanced one
        info.guessed_among = 4
        accuracy.set_balanced(info, ([1, 1, 0, 2], [2, 2, 2, 2], None))
        text, below = headline(info, None)
        assert text == "Finished: balanced accuracy 50.00 %"
        assert "guessing: 25.0 %" in below
    if state == "paused":
        assert text == "Paused after 1 of 3 rounds"


def test_a_finished_run_whose_accuracy_noise_hides_says_so_in_a_sentence() -> None:
    info = pb.RunInfo(run_id="run-1", state="finished", rounds=3, closed=3)
    info.accuracy_estimate.withheld = "noise larger than signal"
    assert headline(info, None) == (
        "Finished",
        "The model's accuracy is withheld: noise larger than signal. Each hospital can see the accuracy on its "
        "own images without noise: silo status.",
    )
    nothing = pb.RunInfo(state="finished", accuracy=-1, best_accuracy=-1)
    assert headline(nothing, None) == ("Finished", "The model was not evaluated.")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e38, -1.0, 2.0**63])
def test_numbers_that_are_none_end_no_page(wrong: float) -> None:
    info = waiting(north=False)
    info.waiting.opened_unix = wrong
    info.waiting.silos[0].left_s = info.waiting.silos[0].offline_s = wrong
    info.waiting.arrivals.append(pb.Arrival(silo="south", bytes=2**64 - 1, at_unix=wrong))
    info.accuracy = info.best_accuracy = info.created_unix = info.ended_unix = wrong
    rounds = measured([0.1, 0.2])
    for r in rounds:
        r.opened_unix = r.closed_unix = wrong
        r.correct[0] = wrong
        r.arrivals.append(pb.Arrival(silo="north", at_unix=wrong))
        r.personal["pa"] = wrong
    made = detail("run-1", rounds)
    made.info.CopyFrom(info)
    facts = run_facts(info, FollowedRun(WatchedRun(made)), 160.0)
    assert facts.open is not None
    assert all(0 <= bar.width <= 100 for bar in facts.open.bars)
    overview.waits_for(info)
    silo = pb.SiloInfo(name="x", state="online", certificate_until_unix=wrong, last_seen_unix=wrong)
    silo.data.nominal_size = wrong
    overview.declared_size(silo)
    overview.headline(ServiceSnapshot(1.0, [silo], runs=[info]), 1.0)
    overview.certificates([silo], OwnCertificates("anna", 1.0, 2.0), 0.0)
