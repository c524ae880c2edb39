"""The line between a hospital and the coordinator, which fails on demand."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_BLOCK = 1 << 16
_PIECE = 1 << 12
_TICK_S = 0.02
_RESET = struct.pack("ii", 1, 0)
"""Makes a close a reset."""


@dataclass(eq=False)
class _Link:
    """One connection: the writers of both ends. lost: nothing passes any more, and nobody is told."""

    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    lost: bool = False

    def abort(self) -> None:
        for writer in self.writers:
            if not writer.transport.is_closing():
                end = writer.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class Proxy:
    """Passes TCP connections on to a port of this machine. Its methods may be called from any thread."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._links: set[_Link] = set()
        self._waiting: dict[bool, tuple[str, int]] = {}  # by direction: what happens after so many bytes
        self._delay = self._rate = 0.0
        self._delayed_until = self._throttled_until = self._hole_until = 0.0
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="proxy", daemon=True)
        self._thread.start()
        started.wait(10)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        started.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def stop(self) -> None:
        def end() -> None:
            self._server.close()
            for link in list(self._links):
                link.abort()
            self._loop.stop()

        self._do(end)
        self._thread.join(10)

    def _do(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Reset every connection."""
        self._do(lambda: [link.abort() for link in list(self._links)] and None)

    def truncate(self, after: int, upward: bool) -> None:
        """Reset the connection that carries a direction's next bytes, when so many of them have passed."""
        self._do(lambda: self._waiting.update({upward: ("truncate", after)}))

    def flip(self, after: int, upward: bool) -> None:
        """Invert the byte that comes after so many of a direction."""
        self._do(lambda: self._waiting.update({upward: ("flip", after)}))

    def delay(self, seconds: float, lasts: float) -> None:
        self._delay, self._delayed_until = seconds, time.monotonic() + lasts

    def throttle(self, bytes_per_s: float, lasts: float) -> None:
        self._rate, self._throttled_until = bytes_per_s, time.monotonic() + lasts

    def black_hole(self, lasts: float) -> None:
        """Lose every connection without a word, and answer no new one for a while."""
        self._hole_until = time.monotonic() + lasts

        def lose() -> None:
            for link in self._links:
                link.lost = True

        self._do(lose)

    def calm(self) -> None:
        """Forget every fault that has not happened yet."""
        self._delayed_until = self._throttled_until = self._hole_until = 0.0
        self._do(self._waiting.clear)

    # ---- connections ------------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link([writer])
        self._links.add(link)
        try:
            while time.monotonic() < self._hole_until:
                await asyncio.sleep(_TICK_S)
            out_reader, out_writer = await asyncio.open_connection("127.0.0.1", self._target)
            link.writers.append(out_writer)
            pumps = [self._pump(link, reader, out_writer, True), self._pump(link, out_reader, writer, False)]
            await asyncio.gather(*pumps)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            link.abort()
            self._links.discard(link)

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upward: bool
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        forward = asyncio.create_task(self._forward(link, queue, writer, upward))
        try:
            while data := await reader.read(_BLOCK):
                now = time.monotonic()
                await queue.put((now + self._delay if now < self._delayed_until else now, data))
        except OSError:
            pass
        finally:
            await queue.put((0.0, b""))
            await forward
            if not link.lost:
                link.abort()

    async def _forward(
        self, link: _Link, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, upward: bool
    ) -> None:
        while True:
            due, data = await queue.get()
            if not data:
                return
            while (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            for start in range(0, len(data), _PIECE):
                if link.lost or writer.transport.is_closing():
                    break
                piece = self._spoil(link, data[start : start + _PIECE], writer, upward)
                try:
                    writer.write(piece)
                    await writer.drain()
                except OSError:
                    break
                if time.monotonic() < self._throttled_until:
                    await asyncio.sleep(len(piece) / self._rate)

    def _spoil(self, link: _Link, piece: bytes, writer: asyncio.StreamWriter, upward: bool) -> bytes:
        if upward not in self._waiting:
            return piece
        kind, left = self._waiting[upward]
        if len(piece) <= left:
            self._waiting[upward] = kind, left - len(piece)
            return piece
        del self._waiting[upward]
        if kind == "flip":
            return piece[:left] + bytes([piece[left] ^ 0xFF]) + piece[left + 1 :]
        writer.write(piece[:left])
        self._loop.call_later(_TICK_S, link.abort)  # when these bytes are gone
        return b""
