"""Work on threads for callers that may be cancelled at any moment."""

from __future__ import annotations

import asyncio
import threading

import pytest

from coordinator.api.event_loop import Workers


@pytest.mark.parametrize("kind", ["run", "always"])
def test_what_a_cancelled_caller_must_tidy_up_is_done_although_no_thread_was_free(kind: str) -> None:
    """Before, a session whose end found all threads busy stayed attached: its hospital was shown as connected."""
    done, busy = threading.Event(), threading.Event()

    async def cancelled() -> None:
        workers = Workers(1, "one")
        try:
            before = asyncio.create_task(workers.run(busy.wait))
            await asyncio.sleep(0)
            caller = asyncio.create_task(getattr(workers, kind)(done.set))
            await asyncio.sleep(0)
            caller.cancel()
            await asyncio.sleep(0)
            busy.set()
            with pytest.raises(asyncio.CancelledError):
                await caller
            await before
            if kind == "always":
                assert done.is_set(), "it was done before the cancellation went on"
        finally:
            workers.close()

    asyncio.run(cancelled())
    assert done.is_set() is (kind == "always")
