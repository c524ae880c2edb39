"""Data of a run's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from consilium.pages.lead.overview import State, away, run_state
from consilium.pages.lead.run_record import MAX_ROUNDS, WatchedRun
from consilium.pages.lead.service_watch import FollowedRun
from consilium.report.curves import Curve
from coordinator.lead import accuracy, tables
from fl_core.converter import ConversionError, parse_json
from fl_core.kinds import kind_of
from fl_core.training import clinical_report
from fl_core.types.records import update_outcomes
from fl_core.types.secagg import tolerated_colluders
from privacy.accounting.uncertainty import NOTHING
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import format_duration, pluralize

_TROUBLE = ("refused", "lost", "forgetting", "warning", "excluded", "extended", "ended")
_AS_PLANNED = ("waiting", "cut")
"""Kinds of events that are expected in a run: waiting for hospitals, and clipping long updates to the run's bound."""
_MAX_TROUBLE, _MAX_HOSPITALS = 50, 200


@dataclass(frozen=True, slots=True)
class HospitalRow:
    """A hospital's part in a run, and its statement with the newest update."""

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
class ShownRun:
    """Data of a run's page. info: the newest   scores: measure, and final, best and mean of the last rounds."""

    info: pb.RunInfo
    state: State
    record: WatchedRun
    headline: str
    below: str
    privacy: tuple[str, ...]
    open: OpenRoundFacts | None
    scores: tuple[tuple[str, tuple[str, ...]], ...]
    aggregator: str
    classes: tuple[str, ...]
    rounds_left_out: int
    hospitals: tuple[HospitalRow, ...]
    hospitals_left_out: int
    trouble: tuple[pb.Event, ...]
    as_planned: tuple[pb.Event, ...]


def run_facts(info: pb.RunInfo, followed: FollowedRun, now: float) -> ShownRun:
    """Collect the data of a run's page. info: the newest. Raises ProtocolError (E-WIRE-06) as `WatchedRun`."""
    record = followed.record
    curves, members = record.compared.curves, record.compared.members
    head, below = headline(info, curves.get("balanced_accuracy"))
    hospitals = _hospitals(members, record.detail, info)
    return ShownRun(
        info=info,
        state=run_state(info.state),
        record=record,
        headline=head,
        below=below,
        privacy=_privacy(record.detail.manifest_json),
        open=open_round(info, members, followed.events, now),
        scores=tuple(
            (c.measure.label, tuple(map(c.measure.text, (c.scores.final, c.scores.best, c.scores.last))))
            for c in curves.values()
        ),
        aggregator=tables.aggregator_text(record.detail.aggregator, update_outcomes(record.detail.rounds)),
        classes=tuple(map(_sentence, accuracy.coverage(info).sentences())),
        rounds_left_out=max(0, len(record.detail.rounds) - MAX_ROUNDS),
        hospitals=tuple(hospitals[:_MAX_HOSPITALS]),
        hospitals_left_out=max(0, len(hospitals) - _MAX_HOSPITALS),
        trouble=_newest(e for e in followed.events if _is_trouble(e)),
        as_planned=_newest(e for e in followed.events if e.kind in _AS_PLANNED),
    )


def headline(info: pb.RunInfo, curve: Curve | None) -> tuple[str, str]:
    """Return a headline on the run's state, and the text below it."""
    plain, balanced = accuracy.newest(info), accuracy.newest_balanced(info)
    newest = plain if balanced == NOTHING else balanced
    reached = (
        "" if newest == NOTHING else f"Newest {'' if balanced == NOTHING else 'balanced '}accuracy: {newest.text()}."
    )
    kind = kind_of(info.method, info.rounds)
    if info.state == "finished" and not kind.measures:
        return kind.answered, f"The same as a command: {kind.how_to_read(info.run_id)}"
    if info.state == "finished":
        if newest.withheld:
            hint = "Each hospital can see the accuracy on its own images without noise: silo status."
            return "Finished", f"The model's accuracy is withheld: {newest.withheld}. {hint}"
        if newest.point is None:
            return "Finished", "The model was not evaluated."
        best = "" if curve is None or not info.rounds else f" Best over rounds: {curve.scores.best.text()}."
        if balanced == NOTHING:
            return (
                f"Finished: accuracy {plain.text()}",
                f"This is the share of all test images that are classified correctly.{best}",
            )
        taught = accuracy.coverage(info).headline()
        guessing = f"guessing: {clinical_report.percent(accuracy.chance(info))}"
        return (
            f"{'Finished' if info.rounds else 'Measured'}: balanced accuracy {accuracy.balanced_text(info)}",
            f"{_sentence(taught) + ' ' if taught else ''}Each class has the same weight ({guessing}). Of all test "
            f"images {plain.text()} are classified correctly.{best}",
        )
    if info.state in ("paused", "failed", "aborted"):
        after = f"{info.state.capitalize()} after {info.closed} of {info.rounds} rounds"
        return after, f"{info.reason or 'There is no recorded reason.'} {reached}"
    if away(info):
        closes = _sentence(tables.received_text(info.waiting))
        return f"Round {info.waiting.round + 1} of {info.rounds} waits for {away(info)}", f"{closes} {reached}"
    if info.state == "running":
        done = f"{info.closed} of {info.rounds} rounds are done" if info.rounds else "The model is being evaluated"
        return done, reached
    return "Queued", "It starts when the runs before it have ended."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _hospitals(members: Sequence[str], detail: pb.RunDetail, info: pb.RunInfo) -> list[HospitalRow]:
    took, missed, sent = Counter[str](), Counter[str](), Counter[str]()
    seconds: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    for r in detail.rounds:
        if r.kind != pb.TRAIN and info.rounds:
            continue
        took.update(r.included)
        missed.update(r.missing.keys())
        reasons.update(r.missing)
        for arrival in r.arrivals:
            sent[arrival.silo] += arrival.bytes
            seconds.setdefault(arrival.silo, []).append(arrival.at_unix - r.opened_unix)
    stated = {d.silo: d.stated for d in detail.declarations}
    rows = []
    for name in members:
        statement = stated.get(name)
        rows.append(
            HospitalRow(
                name=name,
                rounds=f"{took[name]} of {took[name] + missed[name]}",
                excluded=name in info.excluded,
                newest_reason=reasons.get(name, ""),
                bytes_up=sent[name],
                seconds=format_duration(median(seconds[name])) if name in seconds else "",
                policy="none stated" if statement is None else statement.policy_digest[:12] or "no policy",
                ledger=""
                if statement is None
                else f"entry {statement.ledger_seq}"
                if statement.ledger_seq
                else "no ledger",
                restored=""
                if statement is None or not statement.ledger_restored
                else f"restored {statement.ledger_restored} times",
            )
        )
    return rows


def _is_trouble(event: pb.Event) -> bool:
    """Return whether an event may need attention."""
    return event.kind in _TROUBLE and not (event.kind == "ended" and event.text == "finished")


def _newest(events: Iterable[pb.Event]) -> tuple[pb.Event, ...]:
    """Return the newest events, the last first."""
    return tuple(reversed([*events][-_MAX_TROUBLE:]))


def _privacy(manifest: str) -> tuple[str, ...]:
    """Describe a run's privacy guarantee, and what this coordinator can read. manifest: JSON."""
    try:
        raw = dict(parse_json(manifest))  # type: ignore[call-overload]
        name, options = str(raw["privacy"]["name"]), dict(raw["privacy"]["options"])
        masked = raw.get("secagg") is not None
        cohort = int(raw.get("cohort") or 0) or len(raw["members"])
    except (ConversionError, KeyError, TypeError, ValueError):
        return ("This version cannot read the run's privacy settings.",)
    read = "Updates are not masked: this coordinator can read the update of each hospital."
    if masked:
        most = tolerated_colluders(cohort)
        read = (
            f"Updates are masked: this coordinator reads sums only, unless more than {pluralize(most, 'hospital')} "
            f"{'colludes' if most == 1 else 'collude'} with it."
        )
    if name == "none":
        return read, "There is no differential privacy: nothing limits what an update or a sum reveals."
    terms = ", ".join(f"{key} {options[key]}" for key in ("epsilon", "delta", "unit") if key in options)
    how_much = f" ({terms})" if terms else ""
    return read, f"Profile {name}{how_much}: this is the most that is spent at each hospital whose policy allows it."


# ---- the open round --------------------------------------------------------------------------------------------------

MAX_BARS = 200
_MAX_S = 1e9


@dataclass(frozen=True, slots=True)
class Bar:
    """A hospital in the open round.

    width: of its bar, in percent of the time shown   alone: a sentence on classes that only this hospital has.
    """

    name: str
    state: State
    when: str
    width: float = 0.0
    size: int = 0
    alone: str = ""


@dataclass(frozen=True, slots=True)
class OpenRoundFacts:
    """The open round. rule: received and required updates, in words   left_out: number of hospitals not shown."""

    number: int
    since: float
    rule: str
    bars: tuple[Bar, ...]
    left_out: int


def open_round(
    info: pb.RunInfo, members: Sequence[str], events: Sequence[pb.Event], now: float
) -> OpenRoundFacts | None:
    """Describe the open round by hospital, with pending ones first; None between rounds."""
    if not info.HasField("waiting"):
        return None
    waiting = info.waiting
    passed = _bounded(now - waiting.opened_unix) if waiting.opened_unix else 0.0
    bars = list(_bars(info, members, events, max(passed, 1.0)))
    rule = tables.received_text(waiting)
    shown = tuple(bars[:MAX_BARS])
    return OpenRoundFacts(waiting.round + 1, waiting.opened_unix, rule, shown, len(bars) - len(shown))


def _bars(info: pb.RunInfo, members: Sequence[str], events: Sequence[pb.Event], passed: float) -> Iterator[Bar]:
    waiting = info.waiting
    came = {a.silo: a for a in waiting.arrivals}
    awaited = {s.name: s for s in waiting.silos}
    refused = {e.silo: e.text for e in events if e.kind == "refused" and e.round == waiting.round and e.silo}
    for name in dict.fromkeys([*awaited, *came, *refused, *members]):
        if name in came:
            took = _bounded(came[name].at_unix - waiting.opened_unix)
            width = round(100 * min(took / passed, 1.0), 2)
            yield Bar(name, State("good", "received"), f"after {format_duration(took)}", width, came[name].bytes)
        elif name in awaited:
            yield _awaited(awaited[name])
        elif name in refused:
            yield Bar(name, State("bad", "refused"), refused[name])
        else:
            yield Bar(name, State("off", "excluded" if name in info.excluded else "not awaited"), "")


def _awaited(silo: pb.AwaitedSilo) -> Bar:
    alone = f"no other hospital has {', '.join(silo.classes)}" if silo.classes else ""
    left = f"{format_duration(_bounded(silo.left_s))} left"
    if silo.online:
        return Bar(silo.name, State("wait", "pending"), left, 100.0, alone=alone)
    return Bar(
        silo.name,
        State("bad", "pending, offline"),
        f"{left}, offline for {format_duration(_bounded(silo.offline_s))}",
        100.0,
        alone=alone,
    )


def _bounded(seconds: float) -> float:
    """Limit a duration to a printable range; negative values and NaN become 0."""
    return min(seconds, _MAX_S) if seconds > 0 else 0.0
