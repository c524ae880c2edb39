"""Connections of nobody: half of them say nothing, half begin a handshake and stop. One that is cut is opened again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from benchmarks.load.talk import Message, attend

_ADDRESSES = 200
_HELLO = bytes.fromhex("16030101fa010001f60303") + bytes(32)
"""The beginning of a TLS ClientHello, which is announced with 506 bytes and never ends."""
_AGAIN_S = 1.0


class Strangers:
    """So many connections from many addresses, once they are let loose."""

    def __init__(self, settings: Message) -> None:
        self._port, self._number = int(settings["port"]), int(settings["strangers"])
        self._tasks: list[asyncio.Task[None]] = []
        self._open = self._most = self._cut = self._opened = 0
        self._held: list[float] = []
        self._failed: Counter[str] = Counter()

    def handle(self, message: Message) -> Message:
        if message["ask"] == "start":
            self._tasks = [asyncio.create_task(self._stay(k)) for k in range(self._number)]
        held = sorted(self._held)
        return {
            "open": self._open,
            "most_open": self._most,
            "opened": self._opened,
            "cut": self._cut,
            "held_s_median": round(held[len(held) // 2], 2) if held else None,
            "not_opened": dict(self._failed),
        }

    async def _stay(self, number: int) -> None:
        source = f"127.0.0.{2 + number % _ADDRESSES}"
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(source, 0))
            except OSError as error:
                self._failed[type(error).__name__] += 1
                await asyncio.sleep(_AGAIN_S)
                continue
            began = time.monotonic()
            self._open, self._opened = self._open + 1, self._opened + 1
            self._most = max(self._most, self._open)
            with suppress(OSError):
                if number % 2:
                    writer.write(_HELLO)
                await reader.read()
            self._open, self._cut = self._open - 1, self._cut + 1
            self._held.append(time.monotonic() - began)
            writer.close()


async def _serve(settings: Message) -> Callable[[Message], Message]:
    return Strangers(settings).handle


if __name__ == "__main__":
    asyncio.run(attend(_serve))
