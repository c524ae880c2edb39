"""The coordinator's audit log: each call, allowed or refused, and the exchange of log ends with an update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.pki.server_certificate import ServerCertificate
from fl_core.errors import FederationError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import log_heads
from protos.wire.chunks import Chunk
from service_core.audit_log.lines import ALLOWED, REFUSED, LogEntry
from service_core.audit_log.log import FOLDER, AuditLog
from service_core.audit_log.recorder import Recorder
from service_core.pki.identity import CertificateRole, Identity, peer_of

log = logging.getLogger(__name__)
_SHOWN = ("run_id", "round", "silo", "contribution_id", "object_digest", "digest", "request_id", "preview")
_STANDARD = "/grpc."
"""Health and reflection read no stored data; only their refusals are logged."""
Count = Callable[[int], None]


def _ignore(_: int) -> None:
    pass


class CountingContext:
    """A call's context that counts the bytes of sent chunks; otherwise unchanged.

    on_sent, on_received: called with the bytes of each chunk.
    """

    def __init__(self, context: Any, on_sent: Count = _ignore, on_received: Count = _ignore) -> None:  # noqa: ANN401
        self._context = context
        self._on_sent = on_sent
        self._on_received = on_received
        self.sent = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._context, name)

    async def write(self, chunk: Chunk) -> None:
        await self._context.write(chunk)
        self.sent += len(chunk.data)
        self._on_sent(len(chunk.data))

    async def read(self) -> Any:  # noqa: ANN401
        chunk = await self._context.read()
        if isinstance(chunk, Chunk):
            self._on_received(len(chunk.data))
        return chunk


@dataclass(frozen=True, slots=True)
class CallAuditTrail:
    """Records the calls of one service. It never refuses one: if the disk fails, the log records the gap."""

    recorder: Recorder
    certificate: ServerCertificate

    @classmethod
    def of(cls, home: Path, consortium: str) -> CallAuditTrail:
        uri = Identity(CertificateRole.COORDINATOR, consortium).uri
        return cls(Recorder(AuditLog(home / FOLDER), uri), ServerCertificate(home))

    @contextmanager
    def call(self, method: str, context: Any, request: object) -> Iterator[None]:  # noqa: ANN401
        """Record a call at its end, with the refusal raised inside the block."""
        outcome, code = ALLOWED, ""
        try:
            yield
        except FederationError as error:
            outcome, code = REFUSED, error.code
            raise
        except BaseException as error:
            outcome, code = "cut", type(error).__name__
            raise
        finally:
            if outcome == REFUSED or not method.startswith(_STANDARD):
                entry = _entry(method, context, request)
                self.recorder.record(replace(entry, outcome=outcome, code=code, bytes=getattr(context, "sent", 0)))

    def cross(self, context: Any, request: object, reply: object) -> None:  # noqa: ANN401
        """Keep the end of a silo's log that came with an announcement; send the end of this log with a receipt."""
        if isinstance(request, pb.OpenRequest) and request.HasField("log_head"):
            who = peer_of(context.auth_context()).identity.uri
            try:
                head = log_heads.of_message(request.log_head, who, self.certificate.current().ca_pem)
                if wrong := self.recorder.keep(head):
                    log.warning("E-STATE-80: %s", wrong)
            except FederationError as error:
                self.recorder.record(LogEntry(who, "head", outcome=REFUSED, code=error.code))
        receipt = reply.receipt if isinstance(reply, pb.OpenReply) and reply.HasField("receipt") else reply
        if isinstance(receipt, pb.Receipt):
            if (signed := self.recorder.signed_head(self.certificate.current())) is not None:
                receipt.log_head.CopyFrom(log_heads.to_message(signed))
            self.recorder.record(
                LogEntry(
                    receipt.silo, "update taken", f"run={receipt.run_id} round={receipt.round + 1}", bytes=receipt.size
                )
            )


def _entry(method: str, context: Any, request: object) -> LogEntry:  # noqa: ANN401
    what = method.removeprefix("/consilium.v1.")
    try:
        peer = peer_of(context.auth_context())
        who, serial = peer.identity.uri, peer.serial
    except FederationError:
        who = serial = ""
    names = getattr(getattr(request, "DESCRIPTOR", None), "fields_by_name", ())
    shown = {name: getattr(request, name) for name in _SHOWN if name in names}
    if "round" in shown:
        shown["round"] += 1
    about = " ".join(f"{name}={str(value)[:64]}" for name, value in shown.items() if value)
    return LogEntry(who, what, about, serial=serial, address=str(context.peer()))
