"""Light members: each holds a session as a silo's service does, and does nothing else.

Pulses both ways, an answer to each offer, a session that is replaced when it is due, and back-off after a lost one.
"""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import asyncio  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402

import grpc  # noqa: E402
from google.protobuf.json_format import MessageToDict  # noqa: E402

from benchmarks.load import home  # noqa: E402
from benchmarks.load.talk import Message, attend, reason_of, say  # noqa: E402
from protos.consilium.v1 import federation_pb2 as pb  # noqa: E402
from protos.consilium.v1 import federation_pb2_grpc as rpc  # noqa: E402
from service_core.storage.private_files import Credentials  # noqa: E402
from service_core.version import PROTOCOL, software  # noqa: E402
from silo.connection.retry import Backoff  # noqa: E402
from silo.connection.session import MISSED_PULSES  # noqa: E402

_OPENING = 50
"""Sessions that are opened at once by members without one: a thousand hospitals do not start in one second."""
_WELCOME_S = 60.0
_LOOK_S = 0.05


@dataclass
class Tally:
    """What happened since the last report. gap_s: the longest that a session heard nothing, between two messages."""

    lost: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    pulses: int = 0
    offers: int = 0
    gap_s: float = 0.0
    lag_s: float = 0.0


class _EndedError(Exception):
    """A session ended. Its text: the code, or what this side noticed."""


class Session:
    """One stream, from `open` to its end."""

    def __init__(self, stub: rpc.ControlStub, tally: Callable[[], Tally], on_offer: Callable[[pb.Offer], None]) -> None:
        self._call = stub.Session()
        self._tally, self._on_offer = tally, on_offer
        self._writing = asyncio.Lock()  # gRPC ends a call in which two messages are written at once
        self.heard = time.monotonic()

    async def open(self, hello: pb.Hello) -> pb.Welcome:
        try:
            async with asyncio.timeout(_WELCOME_S):
                await self._call.write(pb.SiloMessage(hello=hello))
                first = await self._read()
        except TimeoutError:
            self.leave()
            raise _EndedError("no welcome in time") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise _EndedError(await self._why()) from None
        self.heard = time.monotonic()
        return first.welcome

    async def _read(self) -> pb.CoordinatorMessage:
        message = await self._call.read()
        if message is grpc.aio.EOF:
            raise _EndedError(await self._why())
        return message

    async def _why(self) -> str:
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return "ended without a reason"
        return reason_of(grpc.aio.AioRpcError(code, None, None, details=await self._call.details()))[0]

    async def keep(self, pulse_s: float) -> None:
        """Pulse and answer until the session ends; raises _EndedError, always."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pulse(pulse_s))
            both.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            try:
                message = await self._read()
            except grpc.aio.AioRpcError:
                raise _EndedError(await self._why()) from None
            now, tally = time.monotonic(), self._tally()
            tally.gap_s, self.heard = max(tally.gap_s, now - self.heard), now
            kind = message.WhichOneof("body")
            if kind == "pulse":
                tally.pulses += 1
            elif kind == "offer":
                offer = message.offer
                tally.offers += 1
                self._on_offer(offer)
                answer = pb.Answer(run_id=offer.run_id, round=offer.round, kind=offer.kind, accepted=True)
                await self._send(pb.SiloMessage(answer=answer))
            elif kind == "preflight":
                about = {"run_id": message.preflight.run_id, "manifest_digest": message.preflight.manifest_digest}
                await self._send(pb.SiloMessage(preflight=pb.PreflightAnswer(**about, ready=True)))
            elif kind == "round_closed":
                over = message.round_closed
                settled = pb.Settled(run_id=over.run_id, round=over.round, kind=over.kind)
                await self._send(pb.SiloMessage(settled=settled))

    async def _pulse(self, pulse_s: float) -> None:
        while True:
            if time.monotonic() - self.heard > MISSED_PULSES * pulse_s:
                raise _EndedError("the coordinator was silent")
            await self._send(pb.SiloMessage(pulse=pb.Pulse(activity=pb.IDLE)))
            await asyncio.sleep(pulse_s)

    async def _send(self, message: pb.SiloMessage) -> None:
        try:
            async with self._writing:
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise _EndedError(await self._why()) from None

    def leave(self) -> None:
        self._call.cancel()


class Member:
    """One hospital that stays connected."""

    def __init__(self, crowd: Crowd, name: str, own: Credentials) -> None:
        self._crowd = crowd
        self._stub = rpc.ControlStub(home.channel(crowd.port, own))
        self._hello = pb.Hello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            software=software(),
            data=crowd.data,
            roster_version=crowd.roster_version,
            instance=name,
        )
        self.session: Session | None = None

    async def live(self, opening: asyncio.Semaphore) -> None:
        backoff = Backoff(1.0, 15.0)
        while True:
            try:
                async with opening if self.session is None else nullcontext():
                    session = Session(self._stub, lambda: self._crowd.tally, self._crowd.offered)
                    welcome = await session.open(self._hello)
            except _EndedError as error:
                self._crowd.tally.failed[str(error)] += 1
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            old, self.session = self.session, session
            if old is not None:
                old.leave()
                self._crowd.tally.replaced += 1
            await self._stay(session, welcome)
            if self.session is None:
                await asyncio.sleep(backoff.next())

    async def _stay(self, session: Session, welcome: pb.Welcome) -> None:
        """Keep a session until it is due to be replaced, or is lost."""
        keeping = asyncio.create_task(session.keep(welcome.pulse_seconds))
        await asyncio.wait([keeping], timeout=welcome.recycle_seconds)
        if keeping.done():
            ended = keeping.exception()
            assert isinstance(ended, ExceptionGroup)
            if unforeseen := ended.split(_EndedError)[1]:
                raise unforeseen
            self._crowd.tally.lost[str(ended.exceptions[0])] += 1
            self.session = None
            session.leave()
        else:
            self._crowd.keep_until_replaced(keeping)


class Crowd:
    """All light members of this process, and what happened to them."""

    def __init__(self, settings: Message) -> None:
        self.port, self.roster_version = int(settings["port"]), int(settings["roster_version"])
        self.data = pb.DataOffer(**settings["data"])
        self.tally = Tally()
        self._told: tuple[str, int] | None = None
        everybody = home.members_of(Path(settings["home"]))
        self._members = [Member(self, name, everybody[name]) for name in settings["names"]]
        self._tasks = set[asyncio.Task[None]]()

    def start(self) -> None:
        opening = asyncio.Semaphore(_OPENING)
        for work in (self._watch_loop(), *(member.live(opening) for member in self._members)):
            self._tasks.add(asyncio.create_task(work))

    def keep_until_replaced(self, keeping: asyncio.Task[None]) -> None:
        """Let a session go on that ends when its successor is there, and ask nothing of its end."""
        self._tasks.add(keeping)
        keeping.add_done_callback(lambda task: (task.cancelled() or task.exception(), self._tasks.discard(task)))

    def offered(self, offer: pb.Offer) -> None:
        """Tell the benchmark of a new round, once."""
        if self._told != (offer.run_id, offer.round):
            self._told = (offer.run_id, offer.round)
            say(offer=MessageToDict(offer, preserving_proto_field_name=True, use_integers_for_enums=True))

    async def _watch_loop(self) -> None:
        """Note by how much this process itself is late, which its members then are as well."""
        while True:
            due = time.monotonic() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self.tally.lag_s = max(self.tally.lag_s, time.monotonic() - due)

    def handle(self, message: Message) -> Message:
        if message["ask"] == "online":
            return {"online": self._online(), "offers": self.tally.offers, "failed": dict(self.tally.failed)}
        if dead := [task for task in self._tasks if task.done() and not task.cancelled()]:
            raise dead[0].exception() or RuntimeError("a light member has ended")
        over, self.tally, now = self.tally, Tally(), time.monotonic()
        silent = [now - m.session.heard for m in self._members if m.session is not None]
        return {
            "online": self._online(),
            "lost": dict(over.lost),
            "not_opened": dict(over.failed),
            "replaced": over.replaced,
            "pulses": over.pulses,
            "longest_silence_s": round(max(over.gap_s, *silent, 0.0), 3),
            "own_delay_max_s": round(over.lag_s, 3),
        }

    def _online(self) -> int:
        return sum(member.session is not None for member in self._members)


async def _serve(settings: Message) -> Callable[[Message], Message]:
    crowd = Crowd(settings)
    crowd.start()
    return crowd.handle


if __name__ == "__main__":
    asyncio.run(attend(_serve))
