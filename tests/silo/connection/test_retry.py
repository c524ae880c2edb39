"""How a silo waits: backoff with jitter, persistence, stops, nudges, and a watch over a stream that stands still."""

from __future__ import annotations

import statistics
import threading

import pytest

from fl_core.errors import RefusedError, UnavailableError
from fl_core.rng import numpy_stream
from silo.cancellation import CancelledError, CancelToken
from silo.connection.retry import Backoff, IdleWatch, retry_until
from tests.support import until


def test_a_nudge_ends_a_sleep_and_is_no_stop():
    stop, woken = CancelToken(), []
    sleeper = threading.Thread(target=lambda: woken.append(stop.wait(60.0)))
    sleeper.start()

    def nudged_awake() -> bool:
        stop.wake()  # one that comes before the sleep begins ends no sleep
        sleeper.join(0.01)
        return not sleeper.is_alive()

    until(nudged_awake)
    assert woken == [False]
    assert not stop.is_cancelled


def test_full_jitter_is_uniform_below_a_ceiling_that_doubles():
    draw = numpy_stream(7, "jitter")
    waits = []
    for _ in range(4000):
        backoff = Backoff(1.0, 60.0, draw.random)
        waits.append([backoff.next() for _ in range(9)])
    for n, ceiling in enumerate([1, 2, 4, 8, 16, 32, 60, 60, 60]):
        column = sorted(w[n] for w in waits)
        assert 0 <= column[0] <= column[-1] <= ceiling
        assert statistics.fmean(column) == pytest.approx(ceiling / 2, rel=0.05)
        worst = max(abs((i + 1) / len(column) - v / ceiling) for i, v in enumerate(column))
        assert worst < 2.23 / len(column) ** 0.5  # Kolmogorov-Smirnov at 1e-4, for nine tests


def test_backoff_never_ends_and_begins_anew_after_progress():
    backoff = Backoff(1.0, 60.0, lambda: 1.0)
    assert [backoff.next() for _ in range(2000)][-1] == 60.0
    backoff.reset()
    assert backoff.next() == 1.0


def test_persist_repeats_what_is_unavailable_and_nothing_else():
    answers = iter([UnavailableError("E-NET-01", "away"), UnavailableError("E-NET-01", "away"), 5])
    told = []

    def attempt():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retry_until(attempt, Backoff(0.0, 0.0), CancelToken(), told.append) == 5
    assert len(told) == 2

    def refused():
        raise RefusedError("E-ID-12", "revoked")

    with pytest.raises(RefusedError):
        retry_until(refused, Backoff(0.0, 0.0), CancelToken(), told.append)


def test_a_stop_wakes_a_wait_and_reaches_calls_that_begin_too_late():
    stop, cancelled = CancelToken(), []
    waiter = threading.Thread(target=lambda: cancelled.append(stop.wait(60)))
    waiter.start()
    stop.cancel("enough")
    waiter.join(10)
    with stop.on_cancel(lambda: cancelled.append("late")):
        pass
    assert cancelled == [True, "late"]
    with pytest.raises(CancelledError, match="enough"):
        stop.raise_if_cancelled()


def test_an_idle_watch_counts_from_the_last_movement():
    now, cancelled = [0.0], threading.Event()

    class Call:
        def cancel(self):
            cancelled.set()

    with IdleWatch(Call(), 0.05, lambda: now[0]) as watch:
        now[0] = 0.04
        watch.touch()
        now[0] = 0.08
        assert not cancelled.wait(0.12)
        now[0] = 0.10
        assert cancelled.wait(10)
    assert watch.expired
