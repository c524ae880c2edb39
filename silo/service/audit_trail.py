"""The hospital's audit log: what its service was asked and did, and the ends of both logs that cross with an update.

Lines are made of facts, never of an event's text: no measurement, path or reason of the hospital is in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_core.errors import FederationError, StateError
from protos.audit_log.heads import SignedHead
from protos.audit_log.lines import ALLOWED, REFUSED, Entry
from protos.audit_log.log import FOLDER, AuditLog
from protos.audit_log.recorder import Recorder
from protos.consilium.v1 import federation_pb2 as pb
from protos.pki.identity import Identity, Kind
from silo.events import EmitEvent, Event, error_event
from silo.identity.identity import SiloIdentity

_ASKED = frozenset({"training", "refused", "ready", "approval", "closed", "ended", "stopped", "roster", "held"})
"""Events that the coordinator's word led to; all others are the silo's own."""
_UNRECORDED = frozenset({"serving", "privacy", "metrics"})
"""What is said at each start."""
_SHOWN = ("run", "round", "kind", "entry", "silo", "address", "state", "included")


@dataclass(frozen=True, slots=True)
class AuditTrail:
    """Records one hospital's service."""

    recorder: Recorder
    identity: SiloIdentity
    coordinator: str

    @classmethod
    def of(cls, home: Path, identity: SiloIdentity) -> AuditTrail:
        own = identity.load().identity
        coordinator = Identity(Kind.COORDINATOR, own.consortium).uri
        return cls(Recorder(AuditLog(home / FOLDER), own.uri), identity, coordinator)

    def recording(self, emit: EmitEvent) -> EmitEvent:
        """Return what emits an event and records it."""

        def both(event: Event) -> None:
            if event.event not in _UNRECORDED:
                self.recorder.record(self._entry(event))
            emit(event)

        return both

    def head(self) -> pb.LogHead | None:
        """Return the end of this log, signed, for the coordinator to keep."""
        head = self.recorder.signed_head(self.identity.current_credentials())
        return None if head is None else head.message()

    def keep(self, receipt: bytes, emit: EmitEvent) -> None:
        """Keep the end of the coordinator's log that came with a receipt; emit what is wrong with it."""
        message = pb.Receipt.FromString(receipt)
        if not message.HasField("log_head"):
            return  # of a coordinator of an earlier version
        try:
            head = SignedHead.of_message(message.log_head, self.coordinator, self.identity.authority_pem())
            if wrong := self.recorder.keep(head):
                raise StateError("E-STATE-80", wrong)
        except FederationError as error:
            emit(error_event(error))

    def _entry(self, event: Event) -> Entry:
        facts = event.facts
        shown = {name: facts[name] for name in _SHOWN if facts.get(name) is not None}
        if isinstance(number := shown.get("round"), int):
            shown["round"] = number + 1
        code, size = str(facts.get("code") or ""), facts.get("bytes")
        return Entry(
            self.coordinator if event.event in _ASKED else self.recorder.own,
            event.event,
            " ".join(f"{name}={value}" for name, value in shown.items()),
            REFUSED if code else ALLOWED,
            code,
            bytes=size if isinstance(size, int) else 0,
        )
