"""Data of the first page: hospitals, runs, certificates, and a headline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consilium.pages.lead.service_watch import ServiceSnapshot
from consilium.web.rendering import moment
from coordinator.lead.tables import received_text
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import format_duration

DAY_S = 86400.0
SOON_S = 14 * DAY_S
"""Certificates that expire within this time are highlighted."""
_STATES = {
    "waiting": ("wait", "queued"),
    "running": ("wait", "running"),
    "paused": ("bad", "paused"),
    "finished": ("good", "finished"),
    "aborted": ("off", "aborted"),
    "failed": ("bad", "failed"),
}
MAX_ROWS = 200
"""Maximum number of rows in a table; the commands list all."""


@dataclass(frozen=True, slots=True)
class State:
    """The kind of a symbol, and the word next to it."""

    kind: str
    word: str


@dataclass(frozen=True, slots=True)
class ExpiringCertificate:
    """A certificate and its expiry. renewal: how to renew it, "" if not needed soon."""

    whose: str
    until: float
    state: State
    renewal: str


@dataclass(frozen=True, slots=True)
class OwnCertificates:
    """When the lead's certificate and the authority's certificate expire."""

    lead: str
    lead_until: float
    authority_until: float


def run_state(state: str) -> State:
    """Return a run's state. A state unknown to this version is shown as received."""
    return State(*_STATES.get(state, ("off", state or "unknown")))


def hospital_state(info: pb.SiloInfo) -> State:
    kind = {"online": "good", "offline": "off", "revoked": "off"}.get(info.state, "off")
    return State("bad", "key in doubt") if info.alarm else State(kind, info.state)


def declared_size(info: pb.SiloInfo) -> str:
    return f"{info.data.nominal_size:.0f}" if 0 < info.data.nominal_size < 2**53 else ""


def waits_for(info: pb.RunInfo) -> str:
    """Return the names of the hospitals that a run's open round waits for; "" if there are none."""
    return _names([silo.name for silo in info.waiting.silos])


def away(info: pb.RunInfo) -> str:
    """Return the names of the hospitals that a run's open round waits for and that are offline."""
    return _names([silo.name for silo in info.waiting.silos if not silo.online])


def certificates(silos: Sequence[pb.SiloInfo], own: OwnCertificates, now: float) -> list[ExpiringCertificate]:
    """Return all certificates, sorted by expiry."""
    renewal = "renewed automatically in its last 30 days; once it has expired: coordinator invite NAME --again"
    expiring = [
        _certificate(s.name, s.certificate_until_unix, renewal, now)
        for s in silos
        if s.state != "revoked" and s.certificate_until_unix
    ]
    expiring.append(_certificate(f"{own.lead} (you)", own.lead_until, f"coordinator leads renew {own.lead}", now))
    expiring.append(
        _certificate("the authority", own.authority_until, "create a new consortium well before that day", now)
    )
    return sorted(expiring, key=lambda c: c.until)


def _certificate(whose: str, until: float, renewal: str, now: float) -> ExpiringCertificate:
    left = until - now
    if not left > 0:
        return ExpiringCertificate(whose, until, State("bad", "expired"), renewal)
    if left < SOON_S:
        return ExpiringCertificate(whose, until, State("wait", f"{left / DAY_S:.0f} days left"), renewal)
    return ExpiringCertificate(whose, until, State("good", f"{left / DAY_S:.0f} days left"), "")


def headline(found: ServiceSnapshot, now: float) -> tuple[str, str]:
    """Return a headline on the consortium's state, and the text below it."""
    if found.away is not None and found.at is None:
        return "The coordinator does not answer", found.away.why
    if found.away is not None:
        return f"The coordinator has not answered since {moment(found.away.since)}", found.away.why
    if alarmed := [s.name for s in found.silos if s.alarm]:
        return f"Somebody else may have the key of {_names(alarmed)}", "See the list of hospitals."
    members = [s for s in found.silos if s.state != "revoked"]
    here = sum(s.state == "online" for s in members)
    present = f"{here} of {len(members)} hospitals are online."
    under_way = [r for r in found.runs if r.state in ("waiting", "running")]
    if (waiting_run := next((r for r in under_way if away(r)), None)) is not None:
        text = f"Round {waiting_run.waiting.round + 1} of {waiting_run.run_id} waits for {away(waiting_run)}"
        return text, f"{received_text(waiting_run.waiting).capitalize()}. {present}"
    if halted := next((r for r in found.runs[:1] if r.state in ("paused", "failed")), None):
        return f"{halted.run_id} is {run_state(halted.state).word}", halted.reason or "There is no recorded reason."
    if under_way:
        first = under_way[-1]
        if not first.rounds:
            return f"The model of {first.run_id} is being evaluated", present
        return f"{first.run_id} is in round {min(first.closed + 1, first.rounds)} of {first.rounds}", present
    if not members:
        return "No hospital has joined yet", "Invite one: coordinator invite NAME"
    if found.runs:
        newest = found.runs[0]
        ended = f"ended {format_duration(max(0.0, now - newest.ended_unix))} ago" if newest.ended_unix else "is over"
        return "No run is under way", f"{newest.run_id} {ended}. {present}"
    return "No run yet", f"{present} Start one: coordinator run method=fedmr ..."


def _names(names: Sequence[str], most: int = 3) -> str:
    others = f" and {len(names) - most} others" if len(names) > most else ""
    return ", ".join(names[:most]) + others
