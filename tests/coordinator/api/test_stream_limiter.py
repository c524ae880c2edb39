"""Turns bound how many messages are in memory, and nobody waits long for one."""

from __future__ import annotations

import threading
import time

import pytest

from coordinator.api.stream_limiter import Turns


def test_so_many_streams_have_a_turn_at_once_and_no_more_while_turns_are_short() -> None:
    turns, lock, inside, most = Turns(3, patience_s=30.0), threading.Lock(), 0, 0
    full = threading.Barrier(3)

    def stream(waits: bool) -> None:
        nonlocal inside, most
        for step in range(20):
            with turns.turn():
                with lock:
                    inside += 1
                    most = max(most, inside)
                if waits and step == 0:
                    full.wait(20)  # three are inside together
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=stream, args=(k < 3,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert most == 3


def test_a_stream_that_keeps_its_turn_holds_no_other_back() -> None:
    turns = Turns(1, patience_s=0.01)
    with turns.turn():
        begun = time.monotonic()
        with turns.turn():
            assert time.monotonic() - begun < 5  # seconds; without patience it would wait for ever
    with turns.turn():  # what was not had is not given back
        assert not turns._free.acquire(blocking=False)


def spin(until: float) -> None:
    """Be busy, so that no other thread runs unless it is let."""
    while time.monotonic() < until:
        pass


@pytest.mark.parametrize("attempt", range(5))
def test_a_turn_that_another_takes_at_the_last_moment_is_waited_for_no_longer_than_patience(attempt: int) -> None:
    """SimpleQueue of Python 3.11 waits for ever here: it asks for the time that is left, and that is less than none."""
    del attempt
    patience, close = 0.1, 0.0015  # seconds; so short before the end that the one who waits wakes after it
    turns, inside, had, begun = Turns(1, patience), threading.Event(), threading.Event(), [0.0]

    def stream() -> None:
        begun[0] = time.monotonic()
        inside.set()
        with turns.turn():
            had.set()

    thread = threading.Thread(target=stream)
    with turns.turn():
        thread.start()
        assert inside.wait(20)
        spin(begun[0] + patience - close)
    spin(time.monotonic() + 2 * close)
    with turns.turn():
        assert had.wait(5), "it still waits"
    thread.join(20)


def test_a_turn_that_ends_in_an_error_is_given_back() -> None:
    turns = Turns(1, patience_s=0.0)
    with pytest.raises(ValueError, match="cut"), turns.turn():
        raise ValueError("cut")
    assert turns._free.acquire(blocking=False)
