"""Limits the memory of all streams together: which uploads and downloads may run now.

gRPC buffers a whole window of a stream before it is read. So the number of windows is limited, not their size: an
upload gets a slot when it is opened, a download waits for its turn. Both are leases: after `LEASE_S` seconds, a stream
must yield if another one waits, and continues later from the byte where it stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from fl_core.errors import UnavailableError
from protos.wire.chunks import CHUNK_BYTES

PER_SILO = 2
LEASE_S = 120.0
LINE_S = 45.0
"""How long a download waits for its turn; a silo gives up a stream in which nothing moves for a minute."""
PAUSE_S, HELD_S = 0.5, 2.0
_UNUSED_S = 15.0
"""How long a slot is reserved before its stream begins."""


@dataclass(slots=True)
class Slot:
    """Memory for the window of one upload. streams: that use it; two while a newer one takes over."""

    silo: str
    room: int
    left: int
    since: float
    streams: int = 0
    opened_again: bool = False


class UploadSlots:
    """The slots of all uploads; used on the event loop only.

    budget: bytes of memory for all uploads   window: bytes that an upload may be ahead of its reader.
    """

    def __init__(self, budget: int, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget, self._window = budget, window
        self._clock = clock
        self._slots: dict[str, Slot] = {}
        self._wanted = -LEASE_S

    @property
    def room(self) -> int:
        """The bytes of memory that all slots may use now."""
        return sum(slot.room for slot in self._slots.values())

    @property
    def left(self) -> int:
        """The bytes that all slots may still write to the disk."""
        return sum(slot.left for slot in self._slots.values())

    def open(self, contribution: str, silo: str, left: int) -> None:
        """Give an upload a slot; raises UnavailableError (E-NET-12) if none is free. left: remaining bytes."""
        now = self._clock()
        open_slot = self._slots.get(contribution)
        if open_slot is not None and open_slot.streams:  # left by a connection that may have been cut
            open_slot.opened_again = True
            return
        self._slots = {
            name: slot
            for name, slot in self._slots.items()
            if slot.streams or (name != contribution and now - slot.since < _UNUSED_S)
        }
        room = min(self._window, left) + min(CHUNK_BYTES, left)
        if sum(slot.silo == silo for slot in self._slots.values()) >= PER_SILO:
            raise UnavailableError("E-NET-12", f"{silo!r} has the maximum of {PER_SILO} uploads at once: try again")
        if self._slots and self.room + room > self._budget:
            self._wanted = now
            raise UnavailableError("E-NET-12", f"all {len(self._slots)} upload slots are in use: try again")
        self._slots[contribution] = Slot(silo, room, left, now)

    def require(self, silo: str) -> None:
        """Raise UnavailableError (E-NET-12) unless this silo has a slot; called before a stream is read."""
        if not any(slot.silo == silo for slot in self._slots.values()):
            raise UnavailableError("E-NET-12", "this hospital has no open upload: open it, then send")

    @contextmanager
    def using(self, contribution: str, silo: str) -> Iterator[Slot]:
        """Use an upload's slot and return it at the end; raises UnavailableError (E-NET-12) without one."""
        slot = self._slots.get(contribution)
        if slot is None or slot.silo != silo or slot.streams > 1:
            raise UnavailableError("E-NET-12", "this upload is not open: open it, then send")
        slot.streams += 1
        slot.since, slot.opened_again = self._clock(), False
        try:
            yield slot
        finally:
            slot.streams -= 1
            if not slot.streams and not slot.opened_again:
                self._slots.pop(contribution, None)

    def yield_to_others(self, slot: Slot) -> None:
        """Raise UnavailableError (E-NET-12) if the lease of a slot is over and another upload waits."""
        now = self._clock()
        if now - slot.since > LEASE_S and now - self._wanted < LEASE_S:
            raise UnavailableError("E-NET-12", "other uploads are waiting: continue in a moment")


class LeadsFirst:
    """Makes uploads wait, between two chunks, for the calls of leads; used on the event loop only.

    Guarantees: an upload waits at most `PAUSE_S` seconds per chunk, and a call delays uploads for at most `HELD_S`
    seconds after it began.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: dict[object, float] = {}
        self._quiet = asyncio.Event()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Make uploads wait while the block runs."""
        key = object()
        self._calls[key] = self._clock()
        self._quiet.clear()
        try:
            yield
        finally:
            del self._calls[key]
            if not self._calls:
                self._quiet.set()

    async def give_way(self) -> None:
        """Wait until no lead's call is under way."""
        if self._calls and self._clock() - max(self._calls.values()) < HELD_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self._quiet.wait()


class DownloadTurns:
    """The turns of all downloads; used on the event loop only. waiting: length of the queue."""

    def __init__(self, most: int, each: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = asyncio.Semaphore(most)
        self._each = each
        self._clock = clock
        self.waiting = 0
        self._under_way: dict[str, int] = {}

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[Callable[[], None]]:
        """Wait in the queue, without a thread, and hold a turn; yields a function that raises when others wait.

        Raises UnavailableError (E-NET-12) if the turn does not come, or if this caller has too many downloads.
        """
        if self._under_way.get(who, 0) >= self._each:
            raise UnavailableError("E-NET-12", f"one caller may have at most {self._each} downloads at once: try again")
        self._under_way[who] = self._under_way.get(who, 0) + 1
        try:
            await self._wait()
            try:
                since = self._clock()
                yield lambda: self._yield_to_others(since)
            finally:
                self._free.release()
        finally:
            self._under_way[who] -= 1
            if not self._under_way[who]:
                del self._under_way[who]

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(LINE_S):
                await self._free.acquire()
        except TimeoutError:
            raise UnavailableError("E-NET-12", "too many downloads are under way: try again") from None
        finally:
            self.waiting -= 1

    def _yield_to_others(self, since: float) -> None:
        if self.waiting and self._clock() - since > LEASE_S:
            raise UnavailableError("E-NET-12", "other downloads are waiting: continue in a moment")
