"""A lead who asks ten times a second, whether or not earlier questions were answered, and how long each answer took."""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import asyncio  # noqa: E402
import time  # noqa: E402
from collections.abc import Awaitable, Callable, Mapping  # noqa: E402
from itertools import cycle  # noqa: E402
from pathlib import Path  # noqa: E402

import grpc  # noqa: E402

from benchmarks.load import home  # noqa: E402
from benchmarks.load.talk import Message, attend, reason_of  # noqa: E402
from coordinator.pki.authority import Authority  # noqa: E402
from protos.consilium.v1 import federation_pb2 as pb  # noqa: E402
from protos.consilium.v1 import federation_pb2_grpc as rpc  # noqa: E402

_EVERY_S = 0.1
_DEADLINE_S = 60.0
_AT_ONCE = 32
"""Questions without an answer at which the next ones are left out, and counted: the service takes 64 at once."""


class Lead:
    """The questions of one lead. A time runs from the moment when a question was due."""

    def __init__(self, questions: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
        self._questions = questions
        self._answered: list[tuple[str, float, str]] = []
        self._left_out = 0
        self._under_way = set[asyncio.Task[None]]()

    def start(self) -> None:
        self._asking = asyncio.create_task(self._ask_on())

    async def _ask_on(self) -> None:
        due = time.monotonic()
        for name in cycle(self._questions):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(self._under_way) < _AT_ONCE:
                task = asyncio.create_task(self._ask(name, due))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            else:
                self._left_out += 1
            due += _EVERY_S

    async def _ask(self, name: str, due: float) -> None:
        code = ""
        try:
            await self._questions[name]()
        except grpc.aio.AioRpcError as error:
            code = reason_of(error)[0]
        self._answered.append((name, time.monotonic() - due, code))

    def handle(self, message: Message) -> Message:
        del message
        if self._asking.done():
            raise self._asking.exception() or RuntimeError("the lead has ended")
        answered, left_out = self._answered, self._left_out
        self._answered, self._left_out = [], 0
        return {"answered": answered, "left_out": left_out, "under_way": len(self._under_way)}


async def _serve(settings: Message) -> Callable[[Message], Message]:
    credentials = Authority.open(Path(settings["home"])).lead_credentials("lead")
    stub = rpc.LeadStub(home.channel(int(settings["port"]), credentials))
    lead = Lead(
        {
            "runs": lambda: stub.Runs(pb.RunsRequest(page_size=50), timeout=_DEADLINE_S),
            "silos": lambda: stub.Silos(pb.SilosRequest(), timeout=_DEADLINE_S),
            "show": lambda: stub.Show(pb.RunQuery(run_id="latest"), timeout=_DEADLINE_S),
        }
    )
    lead.start()
    return lead.handle


if __name__ == "__main__":
    asyncio.run(attend(_serve))
