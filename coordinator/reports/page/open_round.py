"""The open round of a run: who is awaited, how long, and which classes depend on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.reports.page.overview import State
from protos.consilium.v1 import federation_pb2 as pb
from protos.console import span

MOST_BARS = 200
_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class Bar:
    """A hospital in the open round.

    width: of its bar, in percent of the time that is shown   alone: the classes that depend on it, as a sentence.
    """

    name: str
    state: State
    when: str
    width: float = 0.0
    size: int = 0
    alone: str = ""


@dataclass(frozen=True, slots=True)
class OpenRound:
    """The open round. rule: how many updates close it   left_out: hospitals that are not shown."""

    number: int
    since: float
    rule: str
    bars: tuple[Bar, ...]
    left_out: int


def open_round(info: pb.RunInfo, members: Sequence[str], events: Sequence[pb.Event], now: float) -> OpenRound | None:
    """Describe the open round, hospital by hospital, those that are awaited first; None between rounds."""
    if not info.HasField("waiting"):
        return None
    waiting = info.waiting
    passed = _bounded(now - waiting.opened_unix) if waiting.opened_unix else 0.0
    bars = list(_bars(info, members, events, max(passed, 1.0)))
    rule = f"{waiting.there} updates are there, {waiting.needed} close it"
    shown = tuple(bars[:MOST_BARS])
    return OpenRound(waiting.round + 1, waiting.opened_unix, rule, shown, len(bars) - len(shown))


def _bars(info: pb.RunInfo, members: Sequence[str], events: Sequence[pb.Event], passed: float) -> Iterator[Bar]:
    waiting = info.waiting
    came = {a.silo: a for a in waiting.arrivals}
    awaited = {s.name: s for s in waiting.silos}
    refused = {e.silo: e.text for e in events if e.kind == "refused" and e.round == waiting.round and e.silo}
    for name in dict.fromkeys([*awaited, *came, *refused, *members]):
        if name in came:
            took = _bounded(came[name].at_unix - waiting.opened_unix)
            width = round(100 * min(took / passed, 1.0), 2)
            yield Bar(name, State("good", "update is there"), f"after {span(took)}", width, came[name].bytes)
        elif name in awaited:
            yield _awaited(awaited[name])
        elif name in refused:
            yield Bar(name, State("bad", "refused"), refused[name])
        else:
            yield Bar(name, State("off", "excluded" if name in info.excluded else "not awaited"), "")


def _awaited(silo: pb.AwaitedSilo) -> Bar:
    alone = f"nobody else holds {', '.join(silo.classes)}" if silo.classes else ""
    left = f"{span(_bounded(silo.left_s))} more"
    if silo.online:
        return Bar(silo.name, State("wait", "awaited"), left, 100.0, alone=alone)
    return Bar(
        silo.name, State("bad", "awaited, away"), f"{left}, away {span(_bounded(silo.offline_s))}", 100.0, alone=alone
    )


def _bounded(seconds: float) -> float:
    """Return a duration that can be written; what is none is 0."""
    return min(seconds, _LONGEST_S) if seconds > 0 else 0.0
