"""Members who send the update of an open round, so many at once, one member after the other.

Each goes through Open, Put and Commit as a silo does and checks its receipt; what may be tried again is tried again.
"""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import asyncio  # noqa: E402
import time  # noqa: E402
from collections import Counter, deque  # noqa: E402
from collections.abc import AsyncIterator, Callable, Sequence  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402

import grpc  # noqa: E402
from google.protobuf.json_format import ParseDict  # noqa: E402

from benchmarks.load import home  # noqa: E402
from benchmarks.load.talk import Message, attend, reason_of  # noqa: E402
from fl_core.errors import UnavailableError  # noqa: E402
from protos.consilium.v1 import federation_pb2 as pb  # noqa: E402
from protos.consilium.v1 import federation_pb2_grpc as rpc  # noqa: E402
from protos.wire import receipts  # noqa: E402
from protos.wire.chunks import read_chunks  # noqa: E402
from protos.wire.tasks import FROM_WIRE, contribution_id  # noqa: E402
from service_core.storage.digests import file_digest  # noqa: E402
from service_core.storage.private_files import Credentials  # noqa: E402
from silo.connection.retry import Backoff  # noqa: E402

_CALL_S = 60.0


@dataclass
class Tally:
    """What happened since the last report. bytes: sent in streams that were taken whole."""

    since: float = field(default_factory=time.monotonic)
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)


class Senders:
    """So many uploads at once. Each sender has an update of its own, which every member that it acts for sends."""

    def __init__(self, settings: Message) -> None:
        self._port, self._home = int(settings["port"]), Path(settings["home"])
        self._members = home.members_of(self._home)
        self._files = [(Path(file), file_digest(Path(file))) for file in settings["files"]]
        self._offer: pb.Offer | None = None
        self._waiting: deque[str] = deque()
        self._changed = asyncio.Condition()
        self._tally = Tally()
        self._under_way = 0
        self._tasks: Sequence[asyncio.Task[None]] = ()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._send_on(file, digest)) for file, digest in self._files]

    def handle(self, message: Message) -> Message | None:
        if "offer" in message:
            self._offer = ParseDict(message["offer"], pb.Offer())
            self._waiting = deque(self._members)
            self._wake = asyncio.create_task(self._notify())
            return None
        if dead := [task for task in self._tasks if task.done()]:
            raise dead[0].exception() or RuntimeError("a sender has ended")
        if message["ask"] == "taken":
            return {"taken": len(self._tally.seconds), "given_up": dict(self._tally.given_up)}
        over, self._tally = self._tally, Tally()
        took = time.monotonic() - over.since
        return {
            "taken": len(over.seconds),
            "under_way": self._under_way,
            "bytes": over.bytes,
            "mb_per_s": round(over.bytes / 1e6 / took, 1),
            "seconds_each": [round(s, 3) for s in over.seconds],
            "refused": dict(over.refused),
            "given_up": dict(over.given_up),
        }

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _send_on(self, file: Path, digest: str) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting)
                name, offer = self._waiting.popleft(), self._offer
            assert offer is not None
            self._under_way += 1
            began = time.monotonic()
            try:
                if await self._send(name, offer, file, digest):
                    self._tally.seconds.append(time.monotonic() - began)
            finally:
                self._under_way -= 1

    async def _send(self, name: str, offer: pb.Offer, file: Path, digest: str) -> bool:
        """Send one update; return whether it was taken."""
        own, backoff = self._members[name], Backoff(1.0, 60.0)
        async with home.channel(self._port, own) as channel:
            stub = rpc.TransferStub(channel)
            while True:
                try:
                    await self._attempt(stub, name, own, offer, file, digest)
                except grpc.aio.AioRpcError as error:
                    code, found = reason_of(error)
                    if not isinstance(found, UnavailableError):
                        self._tally.given_up[code] += 1
                        return False
                    self._tally.refused[code] += 1
                    await asyncio.sleep(backoff.next())
                else:
                    return True

    async def _attempt(
        self, stub: rpc.TransferStub, name: str, own: Credentials, offer: pb.Offer, file: Path, digest: str
    ) -> None:
        kind = FROM_WIRE[offer.kind]
        request = pb.OpenRequest(
            contribution_id=contribution_id(offer.run_id, offer.round, kind, name, offer.base_digest),
            run_id=offer.run_id,
            round=offer.round,
            kind=offer.kind,
            manifest_digest=offer.manifest_digest,
            base_digest=offer.base_digest,
            object_digest=digest,
            size=file.stat().st_size,
        )
        reply = await stub.Open(request, timeout=_CALL_S)
        if reply.HasField("receipt"):
            receipt = reply.receipt
        else:
            if reply.have < request.size:
                await stub.Put(_chunks(file, request.contribution_id, reply.have))
                self._tally.bytes += request.size - reply.have
            receipt = await stub.Commit(pb.CommitRequest(contribution_id=request.contribution_id), timeout=_CALL_S)
        receipts.verify(receipt, own.ca_pem, home.CONSORTIUM)
        if (receipt.silo, receipt.object_digest) != (name, digest):
            raise RuntimeError(f"expected a receipt for {digest} of {name}, found {receipt}")


async def _chunks(file: Path, name: str, offset: int) -> AsyncIterator[pb.Chunk]:
    for chunk in read_chunks(file, name, offset):
        yield pb.Chunk.FromString(chunk.message)


async def _serve(settings: Message) -> Callable[[Message], Message | None]:
    senders = Senders(settings)
    senders.start()
    return senders.handle


if __name__ == "__main__":
    asyncio.run(attend(_serve))
