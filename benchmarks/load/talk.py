"""Between the benchmark and its processes: one line of JSON each way. A process ends when its standard input does."""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from benchmarks.round_trip.processes import Processes
from fl_core.errors import FederationError
from protos.wire import status

Message = dict[str, Any]
ANSWER_S = 300.0


class Child:
    """A process that was started, at the benchmark's side. on_told: called with what it says without being asked."""

    def __init__(
        self, started: Processes, module: str, settings: Message, on_told: Callable[[Message], None] = lambda _: None
    ) -> None:
        self._started, self._module, self._on_told = started, module, on_told
        self._process = started.start([f"benchmarks.load.{module}"], talks=True)
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"read-{module}", daemon=True).start()
        self.tell(settings)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "answer" in message:
                self._answers.put(message["answer"])
            else:
                self._on_told(message)
        self._answers.put(None)

    def tell(self, message: Message) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def ask(self, what: str) -> Message:
        """Return the answer to a question; raises UnavailableError (E-RUN-99) when the process has ended."""
        self.tell({"ask": what})
        try:
            answer = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            answer = None
        if answer is None:
            raise self._started.failure(f"the process {self._module} did not answer {what!r}")
        return answer


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


async def attend(serve: Callable[[Message], Awaitable[Callable[[Message], Message | None]]]) -> None:
    """Be such a process: hand the settings to `serve`, and every later message to the function that it returns.

    What that function returns is the answer; a question of its own always gets one.
    """
    reader = await _lines()
    handle = await serve(json.loads(await reader.readline()))
    while line := await reader.readline():
        if (answer := handle(json.loads(line))) is not None:
            say(answer=answer)


def reason_of(error: grpc.aio.AioRpcError) -> tuple[str, FederationError]:
    """Return the code that a call was refused with, and the error; where gRPC says it, what it says."""
    name, details = error.code().name, error.details() or ""
    found = status.from_status(name, details)
    return (found.code if details.startswith(found.code) else f"no answer ({name}: {details[:80]})"), found
