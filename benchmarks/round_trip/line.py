"""A long line: a proxy whose bytes leave a while after they arrived, and arrive no faster than the line takes them.

python -m benchmarks.round_trip.line TARGET_PORT ROUND_TRIP_MS     prints its port and runs until standard input ends
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from functools import partial

BYTES_PER_S = 125_000_000
"""1 Gbit/s in each direction, shared by all connections."""
_PIECE = 128 << 10
_AHEAD_S = 0.002
"""How far the line may be filled ahead of its clock: a shorter sleep would cost more than it waits."""


class Line:
    """Both directions of one line. Bytes of a direction never overtake each other within a connection."""

    def __init__(self, target: int, round_trip_s: float, bytes_per_s: float = BYTES_PER_S) -> None:
        self._target = target
        self._delay_s = round_trip_s / 2
        self._rate = bytes_per_s
        self._busy_until = [0.0, 0.0]
        self._tasks = set[asyncio.Task[None]]()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection, both ways."""
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        for direction, (source, sink) in enumerate(((reader, there_writer), (there_reader, writer))):
            pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            for work in (self._take(direction, source, pieces), self._give(pieces, sink)):
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _take(
        self, direction: int, source: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        loop, piece = asyncio.get_running_loop(), b"-"
        while piece:
            try:
                piece = await source.read(_PIECE)
            except OSError:
                piece = b""
            arrived = max(loop.time(), self._busy_until[direction]) + len(piece) / self._rate
            self._busy_until[direction] = arrived
            pieces.put_nowait((arrived + self._delay_s, piece))
            if arrived - loop.time() > _AHEAD_S:
                await asyncio.sleep(arrived - loop.time())

    async def _give(self, pieces: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        loop, piece = asyncio.get_running_loop(), b"-"
        try:
            while piece:
                leaves, piece = await pieces.get()
                if (wait := leaves - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if piece:
                    sink.write(piece)
                    await sink.drain()
        except OSError:
            pass  # the other side has gone; what is left of this direction goes nowhere
        finally:
            sink.close()


async def serve(target: int, round_trip_s: float, ready: Callable[[int], None], ended: asyncio.Event) -> None:
    """Carry connections to a port of this machine until an event is set."""
    line = Line(target, round_trip_s)
    server = await asyncio.start_server(line.accept, "127.0.0.1", 0, limit=4 << 20)
    ready(server.sockets[0].getsockname()[1])
    await ended.wait()
    server.close()


def main() -> None:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=int)
    parser.add_argument("round_trip_ms", type=float)
    words = parser.parse_args()

    async def work() -> None:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), lambda: None if sys.stdin.read(1) else ended.set())
        await serve(words.target, words.round_trip_ms / 1e3, partial(print, flush=True), ended)

    asyncio.run(work())


if __name__ == "__main__":
    main()
