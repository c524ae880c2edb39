"""What the page of a run shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from coordinator import console
from coordinator.api import accuracy
from coordinator.reports.comparison import ComparedRun
from coordinator.reports.curves import Curve, by_class, curves_of_sums, text
from coordinator.reports.page.open_round import OpenRound, open_round
from coordinator.reports.page.overview import RunRow, away, run_row
from coordinator.reports.page.service_watch import FollowedRun
from fl_core.converter import ConversionError, parse_json
from privacy.reports.uncertainty import NOTHING, Estimate
from protos import clinical_report
from protos.consilium.v1 import federation_pb2 as pb
from protos.console import span
from web.chart import MOST_SERIES, Chart, Series

TITLES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced",
    "macro_auc": "macro AUC",
    "pa": "personal",
    "pm_l": "personal, all",
    "pm_v": "personal, even",
}
_TROUBLE = ("refused", "lost", "cut", "forgetting", "waiting", "warning", "excluded", "extended", "ended")
_MOST_TROUBLE, _MOST_ROUNDS, _MOST_HOSPITALS = 50, 60, 200
_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A closed round. missing: (hospital, why)."""

    number: str
    accuracy: str
    balanced: str
    there: str
    missing: tuple[tuple[str, str], ...]
    cut: tuple[tuple[str, str], ...]
    bytes_up: int
    seconds: str


@dataclass(frozen=True, slots=True)
class HospitalRow:
    """What a hospital did for a run, and what it stated with its newest update."""

    name: str
    rounds: str
    excluded: bool
    newest_reason: str
    bytes_up: int
    seconds: str
    policy: str
    ledger: str
    restored: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """An event that somebody may have to look into."""

    at: float
    kind: str
    where: str
    silo: str
    text: str


@dataclass(frozen=True, slots=True)
class Clinical:
    """What medicine asks of the newest model. by_class: rows under `CLASS_HEAD`; confusion: class, then predictions."""

    sentence: str
    head: tuple[str, ...]
    by_class: tuple[tuple[str, ...], ...]
    classes: tuple[str, ...]
    confusion: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run as its page shows it."""

    row: RunRow
    headline: str
    below: str
    privacy: str
    members: tuple[str, ...]
    excluded: tuple[str, ...]
    open: OpenRound | None
    scores: tuple[tuple[str, str, str, str], ...]
    chart: Chart | None
    class_charts: tuple[Chart, ...]
    classes: tuple[tuple[str, Estimate], ...]
    clinical: Clinical | None
    pace: Chart | None
    rounds: tuple[RoundRow, ...]
    rounds_left_out: int
    hospitals: tuple[HospitalRow, ...]
    hospitals_left_out: int
    trouble: tuple[Trouble, ...]
    configuration: Mapping[str, str]
    bytes_up: int
    bytes_down: int
    manifest_digest: str
    model_digest: str
    has_model: bool


def run_facts(info: pb.RunInfo, followed: FollowedRun, now: float) -> RunFacts:
    """Collect what is known of a run. info: the newest; raises ProtocolError (E-WIRE-06) as `ComparedRun.of`."""
    detail = followed.detail
    compared = ComparedRun.of(detail)
    head, below = headline(info, compared.curves.get("accuracy"))
    hospitals = _hospitals(compared.members, detail, info)
    rounds = [_round(r) for r in detail.rounds]
    return RunFacts(
        row=run_row(info),
        headline=head,
        below=below,
        privacy=_privacy(detail.manifest_json),
        members=compared.members[:_MOST_HOSPITALS],
        excluded=tuple(info.excluded),
        open=open_round(info, compared.members, followed.events, now),
        scores=tuple(
            (TITLES[n], text(n, c.scores.final), text(n, c.scores.best), text(n, c.scores.last))
            for n, c in compared.curves.items()
        ),
        chart=chart_of("Of all test images, answered right", {TITLES[n]: c for n, c in compared.curves.items()}),
        class_charts=_class_charts(compared.classes, detail.rounds),
        classes=tuple(compared.by_class.items()),
        clinical=_clinical(compared.classes, detail.rounds),
        pace=_pace(compared.members, detail.rounds),
        rounds=tuple(reversed(rounds[-_MOST_ROUNDS:])),
        rounds_left_out=max(0, len(rounds) - _MOST_ROUNDS),
        hospitals=tuple(hospitals[:_MOST_HOSPITALS]),
        hospitals_left_out=max(0, len(hospitals) - _MOST_HOSPITALS),
        trouble=_trouble(followed.events, info.rounds),
        configuration=compared.configuration,
        bytes_up=info.bytes_up,
        bytes_down=info.bytes_down,
        manifest_digest=info.manifest_digest,
        model_digest=info.model_digest,
        has_model=bool(info.model_object),
    )


def headline(info: pb.RunInfo, curve: Curve | None) -> tuple[str, str]:
    """Say how the run stands: in one sentence, and what explains it."""
    newest = accuracy.newest(info)
    reached = "" if newest == NOTHING else f"Newest accuracy: {newest.text()}."
    if info.state == "finished":
        share = newest.text() if newest.point is not None else "nothing that noise leaves a number of"
        best = "" if curve is None else f" Best over rounds: {curve.scores.best.text()}."
        return f"Finished: {share}", f"of all hospitals' test images, answered right by the model of all.{best}"
    if info.state in ("paused", "failed", "aborted"):
        after = f"{info.state.capitalize()} after {info.closed} of {info.rounds} rounds"
        return after, f"{info.reason or 'No reason was given.'} {reached}"
    if away(info):
        closes = f"{info.waiting.there} updates are there, {info.waiting.needed} close it."
        return f"Round {info.waiting.round + 1} of {info.rounds} waits for {away(info)}", f"{closes} {reached}"
    if info.state == "running":
        return f"{info.closed} of {info.rounds} rounds are done", reached
    return "It waits for its turn", "It begins when the runs before it are over."


def _round(info: pb.RoundInfo) -> RoundRow:
    asked = len(info.included) + len(info.missing)
    took = info.closed_unix - info.opened_unix
    measured = {name: curve.values[0] for name, curve in curves_of_sums([info]).items()}
    return RoundRow(
        number=console.round_text(info.round, info.kind),
        accuracy=measured["accuracy"].text(),
        balanced=measured["balanced_accuracy"].text(),
        there=f"{len(info.included)} of {asked}",
        missing=tuple(sorted(info.missing.items())[:_MOST_TROUBLE]),
        cut=tuple(sorted(info.cut.items())[:_MOST_TROUBLE]),
        bytes_up=sum(a.bytes for a in info.arrivals),
        seconds=span(took) if info.closed_unix and took >= 0 else "",
    )


def _hospitals(members: Sequence[str], detail: pb.RunDetail, info: pb.RunInfo) -> list[HospitalRow]:
    trained = [r for r in detail.rounds if r.kind == pb.TRAIN]
    took, missed, sent = Counter[str](), Counter[str](), Counter[str]()
    seconds: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    for r in trained:
        took.update(r.included)
        missed.update(r.missing.keys())
        reasons.update(r.missing)
        for arrival in r.arrivals:
            sent[arrival.silo] += arrival.bytes
            seconds.setdefault(arrival.silo, []).append(arrival.at_unix - r.opened_unix)
    stated = {d.silo: d.stated for d in detail.declarations}
    rows = []
    for name in members:
        said = stated.get(name)
        rows.append(
            HospitalRow(
                name=name,
                rounds=f"{took[name]} of {took[name] + missed[name]}",
                excluded=name in info.excluded,
                newest_reason=reasons.get(name, ""),
                bytes_up=sent[name],
                seconds=span(median(seconds[name])) if name in seconds else "",
                policy="none stated" if said is None else said.policy_digest[:12] or "no policy",
                ledger="" if said is None else f"entry {said.ledger_seq}" if said.ledger_seq else "no ledger",
                restored="" if said is None or not said.ledger_restored else f"put back {said.ledger_restored} times",
            )
        )
    return rows


def _clinical(classes: Sequence[str], rounds: Sequence[pb.RoundInfo]) -> Clinical | None:
    found = accuracy.clinical_of(rounds[-1]) if rounds else None
    if found is None or len(classes) != len(found.confusion):
        return None
    return Clinical(
        sentence=clinical_report.sentence(found, sum(rounds[-1].examples)),
        head=clinical_report.CLASS_HEAD,
        by_class=tuple(clinical_report.class_rows(found, classes)),
        classes=tuple(classes),
        confusion=tuple(clinical_report.confusion_rows(found, classes)),
    )


def _trouble(events: Sequence[pb.Event], rounds: int) -> tuple[Trouble, ...]:
    found = [
        Trouble(e.at_unix, e.kind, console.place(e, rounds), e.silo, e.text)
        for e in events
        if e.kind in _TROUBLE and not (e.kind == "ended" and e.text == "finished")
    ]
    return tuple(reversed(found[-_MOST_TROUBLE:]))


def _privacy(manifest: str) -> str:
    """Say what a run promises about privacy. manifest: JSON."""
    try:
        chosen = dict(parse_json(manifest))["privacy"]  # type: ignore[call-overload]
        name, options = str(chosen["name"]), dict(chosen["options"])
    except (ConversionError, KeyError, TypeError, ValueError):
        return "What it promises about privacy is written in a form that this version does not know."
    if name == "none":
        return "It promises nothing about privacy: this coordinator can read each hospital's update."
    asked = ", ".join(f"{key} {options[key]}" for key in ("epsilon", "delta", "unit") if key in options)
    how_much = f" ({asked})" if asked else ""
    return f"Profile {name}{how_much}: the most that it may spend at each hospital whose policy allows that."


# ---- charts --------------------------------------------------------------------------------------------------------


def chart_of(title: str, found: Mapping[str, Curve]) -> Chart | None:
    """Draw curves over rounds, in percent; None before there is a point."""
    x = sorted({behind for curve in found.values() for behind in curve.rounds})
    if not x:
        return None
    series = [Series(name, _at(x, dict(zip(c.rounds, _points(c), strict=True)))) for name, c in found.items()]
    return Chart(f"{title} (%)", "rounds of training", x, series, limits=(0.0, 100.0))


def _points(curve: Curve) -> list[float | None]:
    return [None if value.point is None else 100 * value.point for value in curve.values]


def _at(x: Sequence[int], values: Mapping[int, float | None]) -> list[float | None]:
    return [values.get(each) for each in x]


def _class_charts(classes: Sequence[str], rounds: Sequence[pb.RoundInfo]) -> tuple[Chart, ...]:
    """Draw the accuracy of each class, as many in one chart as a reader tells apart."""
    found = [(name, curve) for name, curve in zip(classes, by_class(rounds), strict=False) if curve.measured]
    groups = [dict(found[k : k + MOST_SERIES]) for k in range(0, min(len(found), 4 * MOST_SERIES), MOST_SERIES)]
    charts = [chart_of("Of the test images of each class, answered right", group) for group in groups]
    return tuple(chart for chart in charts if chart is not None)


def _pace(members: Sequence[str], rounds: Sequence[pb.RoundInfo]) -> Chart | None:
    """Draw how long each hospital's update took to be there, over the rounds of training."""
    took = {r.round + 1: {a.silo: a.at_unix - r.opened_unix for a in r.arrivals} for r in rounds if r.kind == pb.TRAIN}
    x = sorted(number for number, found in took.items() if found)
    if not x:
        return None
    slow = sorted(members, key=lambda name: -max((took[k].get(name, 0.0) for k in x), default=0.0))
    series = [Series(name, [_seconds(took[k].get(name)) for k in x]) for name in slow[:_MOST_HOSPITALS]]
    return Chart("Seconds until each hospital's update was there", "round", x, series)


def _seconds(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and 0 <= value <= _LONGEST_S else None
