"""Control: one stream per silo for pulses, offers and answers."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError

from coordinator.api.authorization import Authorizer, Context
from coordinator.api.event_loop import Workers, wait_for, waker
from coordinator.api.limits import Bucket, Limits, require_known_fields
from coordinator.api.open_streams import OpenStreams
from coordinator.pki.membership import Membership
from coordinator.runs.dispatcher import MISSED_PULSES, Dispatcher, SiloSession, negotiate
from coordinator.storage.records import DataOffer
from fl_core.errors import FederationError, ProtocolError, UnavailableError
from fl_core.types.clinical import METRICS_KINDS
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from service_core.version import PROTOCOL

log = logging.getLogger(__name__)
_METHOD = "/consilium.v1.Control/Session"
_LAST_WORD_S = 1.0
"""Time limit for sending queued messages before a refusal, and for the refusal itself."""
_MAX_TEXT = 200
_MAX_CLASSES = 10_000
_MAX_OFFER = 128 << 10
"""Size limit of a silo's data declaration in bytes, since a lead gets those of all silos in one message."""
_MAX_SIZE = 2.0**53
_MAX_DIMENSIONS = 8
_MAX_STAGED = 1000
_SOONEST = 0.75
"""Sessions that began together, as after a restart, are replaced over the last quarter of their lifetime."""
_PER_SESSION_S = 1.0
_MAX_S = 3600.0
"""The longest session time that silos accept."""


class ControlService(rpc.ControlServicer):
    """One stream per silo."""

    def __init__(
        self,
        authorizer: Authorizer,
        dispatcher: Dispatcher,
        membership: Membership,
        workers: Workers,
        limits: Limits,
        welcome: pb.Welcome,
        streams: OpenStreams,
    ) -> None:
        """Set up the service. welcome: the fields that are the same for every silo."""
        self._streams = streams
        self._authorizer = authorizer
        self._dispatcher = dispatcher
        self._membership = membership
        self._workers = workers
        self._limits = limits
        self._common = welcome

    async def Session(  # type: ignore[override]  # noqa: N802 - the stub knows generators alone
        self,
        request_iterator: object,  # noqa: ARG002
        context: Context,
    ) -> None:
        """Run a silo's session until one side ends it; see docs/protocol.md."""
        changed = asyncio.Event()
        session = SiloSession(self._authorizer.caller(context), on_change=waker(changed))
        receiving = asyncio.create_task(self._receive(session, context))
        refused: list[FederationError] = []
        try:
            async with asyncio.timeout(None) as scope:

                def end(error: FederationError) -> None:
                    refused.append(error)
                    session.finish(error)
                    scope.reschedule(asyncio.get_running_loop().time() + _LAST_WORD_S)

                with self._streams.watching(session.peer, _METHOD, context.peer(), end):
                    await self._send(session, changed, context)
        except TimeoutError:  # the silo reads nothing, so it would not read a refusal either
            raise refused[0] from None
        except FederationError as error:
            session.finish(error)
            if not isinstance(error, UnavailableError):
                with suppress(UnavailableError):
                    refusal = pb.CoordinatorMessage(refusal=_refusal(error))
                    await self._write(refusal, context, min(_LAST_WORD_S, self._limits.hello_s))
            raise
        finally:
            session.finish()
            receiving.cancel()
            await self._workers.always(self._dispatcher.detach, session)

    async def _send(self, session: SiloSession, changed: asyncio.Event, context: Context) -> None:
        pulse = self._dispatcher.pulse_s
        hello_due = time.monotonic() + self._limits.hello_s
        while session.hello is None and not session.over and (remaining := hello_due - time.monotonic()) > 0:
            await wait_for(changed, remaining)
        if session.over and session.error is not None:
            raise session.error
        if session.hello is None:
            raise UnavailableError(
                "E-NET-12", "a session must begin with a Hello, and none came in time: connect again"
            )
        await self._write(await self._workers.run(self._welcome, session, session.hello), context)
        due = time.monotonic()
        while not session.over:
            if message := session.next():
                await self._write(message, context)
            elif time.monotonic() < due:
                await wait_for(changed, due - time.monotonic())
            else:
                if (silent := session.silent_s) > MISSED_PULSES * pulse:
                    raise UnavailableError(
                        "E-NET-12", f"no heartbeat for {silent:.0f} s: session closed, connect again"
                    )
                await self._write(pb.CoordinatorMessage(pulse=pb.Pulse()), context)
                due = time.monotonic() + pulse
        if session.error is not None:
            raise session.error

    async def _write(self, message: pb.CoordinatorMessage, context: Context, seconds: float | None = None) -> None:
        """Send a message; raises UnavailableError (E-NET-12) if the other side does not read."""
        try:
            async with asyncio.timeout(self._limits.hello_s if seconds is None else seconds):
                await context.write(message)
        except TimeoutError:
            raise UnavailableError("E-NET-12", "the coordinator no longer reads this session: connect again") from None

    def _welcome(self, session: SiloSession, hello: pb.Hello) -> pb.CoordinatorMessage:
        """Check the first message, attach the session and queue the welcome with the messages that the silo missed."""
        negotiate(hello, PROTOCOL)
        if len(hello.staged) > _MAX_STAGED:
            raise ProtocolError(
                "E-WIRE-06", f"expected at most {_MAX_STAGED} staged rounds in a Hello, found {len(hello.staged)}"
            )
        members, name = self._dispatcher.store.members, session.name
        before = members.silo(name)
        self._dispatcher.attach(session)
        members.introduce(name, hello.software[:_MAX_TEXT], data_offer(hello.data))
        self._dispatcher.store.attestations.keep_policy(name, hello.policy_digest[:_MAX_TEXT])
        self._dispatcher.catch_up(session, hello, 0.0 if before is None else before.last_seen)
        welcome = pb.Welcome(
            signed_roster=self._membership.roster(hello.roster_version),
            attested=self._dispatcher.store.attestations.newest(name),
            masked_answers=self._dispatcher.store.secagg.note_answers(name, hello.masked_answers),
        )
        welcome.MergeFrom(self._common)
        welcome.recycle_seconds = session_seconds(welcome.recycle_seconds, len(self._dispatcher.connected()))
        return pb.CoordinatorMessage(welcome=welcome)

    async def _receive(self, session: SiloSession, context: Context) -> None:
        """Process the silo's messages until the stream ends."""
        bucket = Bucket(self._limits.messages)
        try:
            while (message := await context.read()) is not grpc.aio.EOF and not session.over:
                with session.hear():
                    if bucket.take():
                        raise UnavailableError("E-NET-12", "too many messages in one session: connect again")
                    require_known_fields(message)
                    await self._process(session, message)
        except FederationError as error:
            session.finish(error)
        except DecodeError as error:
            session.finish(ProtocolError("E-WIRE-06", f"the received bytes are not a message of a session: {error}"))
        except Exception:
            if not (context.done() or context.cancelled()):  # otherwise the connection was cut; the silo opens another
                log.exception("unexpected error in a session of %s", session.name)
        finally:
            session.finish()

    async def _process(self, session: SiloSession, message: pb.SiloMessage) -> None:
        kind = message.WhichOneof("body")
        if (kind == "hello") is not (session.hello is None):
            raise ProtocolError("E-WIRE-06", f"expected one Hello, at the start of a session, found {kind}")
        if kind == "hello":
            session.receive_hello(message.hello)
        elif kind == "pulse":
            self._dispatcher.pulse(session, message.pulse)
        elif kind in ("answer", "preflight", "secagg_confirm", "secagg_shares", "secagg_refusal"):
            await self._workers.run(self._dispatcher.hear, session, getattr(message, kind))
        elif kind != "settled":  # `settled` needs no reply: the next Hello names what is staged
            raise ProtocolError("E-WIRE-06", "this version does not know the received message: upgrade the coordinator")


def _refusal(error: FederationError) -> pb.Refusal:
    return pb.Refusal(code=error.code, reason=error.message)


def session_seconds(limit: float, sessions: int) -> float:
    """Draw the seconds that a session lasts until its silo replaces it. limit: with few sessions; 0: no limit.

    Guarantees: with up to 3600 sessions, at most about one per second is replaced; none lasts longer than an hour.
    """
    longest = min(max(limit, _PER_SESSION_S * sessions), _MAX_S) if limit else 0.0
    return longest * secrets.SystemRandom().uniform(_SOONEST, 1.0)


def data_offer(data: pb.DataOffer) -> DataOffer:
    """Read a silo's data declaration; raises ProtocolError (E-WIRE-06) on impossible sizes."""
    if (
        max(len(data.classes), len(data.holds)) > _MAX_CLASSES
        or any(len(c) > _MAX_TEXT for c in (*data.classes, *data.holds))
        or len(data.shape) > _MAX_DIMENSIONS
    ):
        raise ProtocolError(
            "E-WIRE-06",
            f"expected at most {_MAX_CLASSES} classes with names of at most {_MAX_TEXT} characters and at most "
            f"{_MAX_DIMENSIONS} dimensions, found {len(data.classes)} classes and {len(data.shape)} dimensions",
        )
    if (length := data.ByteSize()) > _MAX_OFFER:
        raise ProtocolError(
            "E-WIRE-06", f"expected at most {_MAX_OFFER} bytes of names and numbers about data, found {length}: shorten"
        )
    if not re.fullmatch("([0-9a-f]{64})?", data.labels_digest):
        raise ProtocolError(
            "E-WIRE-06", f"expected a label digest of 64 hex digits or none, found {data.labels_digest[:80]!r}"
        )
    if not re.fullmatch("((table|query):[0-9a-f]{16})?", data.label_source):
        raise ProtocolError(
            "E-WIRE-06", f"expected table: or query: followed by 16 hex digits, found {data.label_source[:80]!r}"
        )
    for size in (data.nominal_size, data.train_examples, data.test_examples):
        if not 0 <= size < _MAX_SIZE:
            raise ProtocolError("E-WIRE-06", f"expected a nominal size of 0 or more and below 2**53, found {size:g}")
    return DataOffer(
        data.name[:_MAX_TEXT],
        tuple(data.shape),
        tuple(data.classes),
        data.nominal_size,
        tuple(data.holds),
        data.train_examples,
        data.test_examples,
        tuple(kind for kind in METRICS_KINDS if kind in data.metrics),
        data.masks,
        data.labels_digest,
        data.coarse_labels,
        data.validation_only,
        data.label_source,
    )
