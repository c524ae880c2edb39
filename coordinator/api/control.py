"""Control: one stream per silo for heartbeats, offers and answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc

from coordinator.api.authorization import Authorizer
from coordinator.pki.membership import Membership
from coordinator.runs.dispatcher import MISSED_PULSES, Dispatcher, negotiate
from coordinator.runs.session import SiloSession
from coordinator.storage.records import DataOffer
from fl_core.errors import FederationError, ProtocolError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.version import PROTOCOL

_MAX_TEXT = 200
_MAX_CLASSES = 10_000
_MAX_SIZE = 2.0**53
_MAX_DIMENSIONS = 8


class ControlService(rpc.ControlServicer):
    """One stream per silo."""

    def __init__(
        self, authorizer: Authorizer, dispatcher: Dispatcher, membership: Membership, software: str, recycle_s: float
    ) -> None:
        self._authorizer = authorizer
        self._dispatcher = dispatcher
        self._membership = membership
        self._software = software
        self._recycle_s = recycle_s

    def Session(  # noqa: N802
        self, request_iterator: Iterator[pb.SiloMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.CoordinatorMessage]:
        """Run a silo's session until one side ends it; see docs/protocol.md."""
        session = SiloSession(self._authorizer.caller(context))
        context.add_callback(session.finish)
        threading.Thread(
            target=self._receive, args=(session, request_iterator), name=f"session-{session.name}", daemon=True
        ).start()
        try:
            yield from self._send(session)
        except FederationError as error:
            session.finish(error)
            if not isinstance(error, UnavailableError):
                yield pb.CoordinatorMessage(refusal=pb.Refusal(code=error.code, reason=error.message))
            raise
        finally:
            session.finish()
            self._dispatcher.detach(session)

    def _send(self, session: SiloSession) -> Iterator[pb.CoordinatorMessage]:
        pulse = self._dispatcher.pulse_s
        hello = session.wait_for_hello(MISSED_PULSES * pulse)
        if hello is None:
            raise session.error or ProtocolError("E-WIRE-06", "expected a Hello first in a session, found none")
        yield self._welcome(session, hello)
        due = time.monotonic()
        while not session.over:
            if message := session.next(due):
                yield message
            elif not session.over and time.monotonic() >= due:
                self._authorizer.authorize_peer(session.peer)
                if (silent := time.monotonic() - session.last_heard) > MISSED_PULSES * pulse:
                    raise UnavailableError(
                        "E-NET-12", f"no pulse for {silent:.0f} s: the session is dropped, connect again"
                    )
                yield pb.CoordinatorMessage(pulse=pb.Pulse())
                due = time.monotonic() + pulse
        if session.error is not None:
            raise session.error

    def _welcome(self, session: SiloSession, hello: pb.Hello) -> pb.CoordinatorMessage:
        """Check the first message, attach the session and queue what the silo missed behind the welcome."""
        negotiate(hello, PROTOCOL)
        members, name = self._dispatcher.store.members, session.name
        before = members.silo(name)
        self._dispatcher.attach(session)
        members.introduce(name, hello.software[:_MAX_TEXT], data_offer(hello.data))
        self._dispatcher.store.attestations.keep_policy(name, hello.policy_digest[:_MAX_TEXT])
        self._dispatcher.catch_up(session, hello, 0.0 if before is None else before.last_seen)
        return pb.CoordinatorMessage(
            welcome=pb.Welcome(
                protocol=PROTOCOL,
                software=self._software,
                pulse_seconds=self._dispatcher.pulse_s,
                recycle_seconds=self._recycle_s,
                signed_roster=self._membership.roster(hello.roster_version),
                attested=self._dispatcher.store.attestations.newest(name),
            )
        )

    def _receive(self, session: SiloSession, messages: Iterator[pb.SiloMessage]) -> None:
        """Process the silo's messages, on a thread of its own, until the stream ends."""
        try:
            for message in messages:
                session.last_heard = time.monotonic()
                self._process(session, message)
        except FederationError as error:
            session.finish(error)
        except grpc.RpcError:
            pass  # the connection was cut; the silo opens another session
        finally:
            session.finish()

    def _process(self, session: SiloSession, message: pb.SiloMessage) -> None:
        kind = message.WhichOneof("body")
        if (kind == "hello") is not (session.hello is None):
            raise ProtocolError("E-WIRE-06", f"expected a Hello first and once in a session, found {kind}")
        if kind == "hello":
            session.receive_hello(message.hello)
        elif kind == "pulse":
            self._authorizer.authorize_peer(session.peer)
            self._dispatcher.pulse(session, message.pulse)
        elif kind == "answer":
            self._dispatcher.answer(session, message.answer)
        elif kind == "preflight":
            self._dispatcher.preflight(session, message.preflight)
        elif kind != "settled":  # `settled` needs nothing: what is staged is named in the next Hello
            raise ProtocolError("E-WIRE-06", "found a message that this version does not know: upgrade the coordinator")


def data_offer(data: pb.DataOffer) -> DataOffer:
    """Read what a silo declares; raises ProtocolError (E-WIRE-06) on sizes that no data has."""
    if (
        len(data.classes) > _MAX_CLASSES
        or any(len(c) > _MAX_TEXT for c in data.classes)
        or len(data.shape) > _MAX_DIMENSIONS
    ):
        raise ProtocolError(
            "E-WIRE-06",
            f"expected at most {_MAX_CLASSES} classes with names of at most {_MAX_TEXT} characters and at most "
            f"{_MAX_DIMENSIONS} dimensions, found {len(data.classes)} classes and {len(data.shape)} dimensions",
        )
    if not 0 <= data.nominal_size < _MAX_SIZE:
        raise ProtocolError(
            "E-WIRE-06", f"expected a nominal size of 0 or more and below 2**53, found {data.nominal_size:g}"
        )
    return DataOffer(data.name[:_MAX_TEXT], tuple(data.shape), tuple(data.classes), data.nominal_size)
