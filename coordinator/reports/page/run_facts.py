"""What the page of a run shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from coordinator import console
from coordinator.api import accuracy
from coordinator.reports.curves import Curve, text
from coordinator.reports.page.open_round import OpenRound, open_round
from coordinator.reports.page.overview import RunRow, away, run_row
from coordinator.reports.page.run_record import MOST_ROUNDS, TITLES, RunRecord
from coordinator.reports.page.service_watch import FollowedRun
from fl_core.converter import ConversionError, parse_json
from fl_core.types.records import judgements
from privacy.reports.uncertainty import NOTHING
from protos.consilium.v1 import federation_pb2 as pb
from protos.console import span

_TROUBLE = ("refused", "lost", "cut", "forgetting", "waiting", "warning", "excluded", "extended", "ended")
_MOST_TROUBLE, _MOST_HOSPITALS = 50, 200


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
class RunFacts:
    """A run as its page shows it. info: the newest of it   scores: measure, final, best, mean of the last rounds."""

    info: pb.RunInfo
    row: RunRow
    record: RunRecord
    headline: str
    below: str
    privacy: str
    open: OpenRound | None
    scores: tuple[tuple[str, str, str, str], ...]
    aggregator: str
    rounds_left_out: int
    hospitals: tuple[HospitalRow, ...]
    hospitals_left_out: int
    trouble: tuple[Trouble, ...]


def run_facts(info: pb.RunInfo, followed: FollowedRun, now: float) -> RunFacts:
    """Collect what is known of a run. info: the newest; raises ProtocolError (E-WIRE-06) as `RunRecord`."""
    record = followed.record
    curves, members = record.compared.curves, record.compared.members
    head, below = headline(info, curves.get("accuracy"))
    hospitals = _hospitals(members, record.detail, info)
    return RunFacts(
        info=info,
        row=run_row(info),
        record=record,
        headline=head,
        below=below,
        privacy=_privacy(record.detail.manifest_json),
        open=open_round(info, members, followed.events, now),
        scores=tuple(
            (TITLES[n], text(n, c.scores.final), text(n, c.scores.best), text(n, c.scores.last))
            for n, c in curves.items()
        ),
        aggregator=_sentence(console.aggregator_text(record.detail.aggregator, judgements(record.detail.rounds))),
        rounds_left_out=max(0, len(record.detail.rounds) - MOST_ROUNDS),
        hospitals=tuple(hospitals[:_MOST_HOSPITALS]),
        hospitals_left_out=max(0, len(hospitals) - _MOST_HOSPITALS),
        trouble=_trouble(followed.events, info.rounds),
    )


def headline(info: pb.RunInfo, curve: Curve | None) -> tuple[str, str]:
    """Say how the run stands: in one sentence, and what explains it."""
    newest = accuracy.newest(info)
    reached = "" if newest == NOTHING else f"Newest accuracy: {newest.text()}."
    if info.state == "finished":
        if newest.withheld:
            return "Finished", f"How good the model is, is withheld: {newest.withheld}."
        if newest.point is None:
            return "Finished", "Nothing was measured of the model."
        best = "" if curve is None else f" Best over rounds: {curve.scores.best.text()}."
        return (
            f"Finished: {newest.text()}",
            f"of all hospitals' test images are classified correctly by the shared model.{best}",
        )
    if info.state in ("paused", "failed", "aborted"):
        after = f"{info.state.capitalize()} after {info.closed} of {info.rounds} rounds"
        return after, f"{info.reason or 'No reason was given.'} {reached}"
    if away(info):
        closes = f"{info.waiting.there} updates are there, {info.waiting.needed} close it."
        return f"Round {info.waiting.round + 1} of {info.rounds} waits for {away(info)}", f"{closes} {reached}"
    if info.state == "running":
        return f"{info.closed} of {info.rounds} rounds are done", reached
    return "It waits for its turn", "It begins when the runs before it are over."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _hospitals(members: Sequence[str], detail: pb.RunDetail, info: pb.RunInfo) -> list[HospitalRow]:
    took, missed, sent = Counter[str](), Counter[str](), Counter[str]()
    seconds: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    for r in detail.rounds:
        if r.kind != pb.TRAIN:
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
