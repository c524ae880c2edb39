"""One event loop for all calls, and bounded pools of threads for the work that blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class EventLoop:
    """An asyncio loop on a thread of its own, from `start` until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result. Never call it from the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """Cancel the remaining work and end the thread."""
        with suppress(TimeoutError):
            self.run(self._cancel_rest(), 10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._loop.is_running():
            self._loop.close()

    async def _cancel_rest(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=5.0)


class Workers:
    """A bounded pool of threads. The calls in progress limit its queue."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work on a thread.

        Guarantees: if the caller is cancelled, work that has begun finishes before the cancellation continues, so that
        nothing that it uses is released too early.
        """
        return await self._finished(self._pool.submit(work, *args, **kwargs), may_be_left_out=True)

    async def always(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work on a thread that must be done, such as cleaning up.

        Guarantees: it is done even if the caller is cancelled before it begins.
        """
        return await self._finished(self._pool.submit(work, *args, **kwargs), may_be_left_out=False)

    async def _finished(self, future: Future[T], may_be_left_out: bool) -> T:
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not (may_be_left_out and future.cancel()):
                while not waiting.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([waiting])
                waiting.exception()  # no caller is left to handle it
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def waker(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event from any thread; it does nothing once the running loop is closed."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return wake


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, with a time limit, and clear it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    event.clear()
