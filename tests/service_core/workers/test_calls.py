"""Calls over a pair of pipes, whatever either side answers, and errors in their lines."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

import pytest

from fl_core.errors import RefusedError
from service_core.workers.calls import MOST_THREADS, Calls, Later, OtherSideEndedError
from service_core.workers.lines import ErrorLines, Line, UnforeseenError, encoded
from tests.support import until


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    (a, b), (c, d) = os.pipe(), os.pipe()
    one, other = Line(os.fdopen(a, "rb"), os.fdopen(d, "wb")), Line(os.fdopen(c, "rb"), os.fdopen(b, "wb"))
    yield one, other
    for file in (one.outgoing, other.outgoing, one.incoming, other.incoming):
        file.close()


def test_both_sides_call_at_once_and_errors_keep_their_codes(ends: tuple[Line, Line]) -> None:
    def refuse() -> None:
        raise RefusedError("E-RUN-14", "no")

    one = Calls(ends[0], {"half": lambda n: n / 2}, ErrorLines())
    other = Calls(ends[1], {"twice": lambda n: 2 * one_asks(n), "refuse": refuse, "fail": lambda: 1 / 0}, ErrorLines())
    one_asks = lambda n: other.call("half", n) + n / 2  # noqa: E731
    for calls in (one, other):
        threading.Thread(target=calls.listen, daemon=True).start()
    assert one.call("twice", 21.0) == 42.0
    with pytest.raises(RefusedError, match="E-RUN-14: no"):
        one.call("refuse")
    with pytest.raises(UnforeseenError, match="ZeroDivisionError"):
        one.call("fail")
    with pytest.raises(UnforeseenError, match="KeyError"):
        one.call("unknown")


def test_a_call_that_is_too_long_raises_and_leaves_nothing_open(ends: tuple[Line, Line]) -> None:
    calls = Calls(ends[0], {}, ErrorLines())
    with pytest.raises(ValueError, match="at most"):
        calls.begin("anything", "x" * (1 << 25))
    assert not calls._open


@pytest.mark.fault("a worker", "ends, or sends nonsense", "no call of its service hangs")
@pytest.mark.parametrize(
    "said",
    [b"", b"nothing\n", b'{"returned": [5, 1]}\n', b'{"returned": 7}\n', b'{"call": []}\n', b'{"raised": [0, 1]}\n'],
)
def test_whatever_the_other_side_says_or_when_it_ends_no_call_waits_for_ever(
    ends: tuple[Line, Line], said: bytes
) -> None:
    calls, raised = Calls(ends[0], {}, ErrorLines()), threading.Event()

    def ask() -> None:
        with pytest.raises(OtherSideEndedError):
            calls.call("anything")
        raised.set()

    threading.Thread(target=ask, daemon=True).start()
    ends[1].incoming.readline()
    ends[1].outgoing.write(said)
    ends[1].outgoing.close()
    calls.listen()
    assert raised.wait(30)
    with pytest.raises(OtherSideEndedError):
        calls.call("anything")


@pytest.mark.parametrize("answer", [lambda: sys.exit(0), object, lambda: "x" * (1 << 24)])
def test_a_call_whose_answer_cannot_be_sent_raises(ends: tuple[Line, Line], answer: Callable[[], object]) -> None:
    one, other = Calls(ends[0], {}, ErrorLines()), Calls(ends[1], {"ask": answer}, ErrorLines())
    for calls in (one, other):
        threading.Thread(target=calls.listen, daemon=True).start()
    with pytest.raises(UnforeseenError):
        one.call("ask")


def test_no_call_waits_for_a_side_that_can_start_no_thread(
    ends: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one, other = Calls(ends[0], {}, ErrorLines()), Calls(ends[1], {"ask": lambda: 1}, ErrorLines())
    threading.Thread(target=one.listen, daemon=True).start()
    asked = threading.Thread(target=lambda: suppressed(one), daemon=True)
    asked.start()
    monkeypatch.setattr(threading.Thread, "start", start)
    other.listen()
    ends[1].outgoing.close()
    asked.join(30)
    assert not asked.is_alive()
    with pytest.raises(OtherSideEndedError):
        other.call("anything")


def suppressed(calls: Calls) -> None:
    with suppress(OtherSideEndedError):
        calls.call("ask")


def test_settle_waits_for_the_answers_of_a_side_that_has_ended(ends: tuple[Line, Line]) -> None:
    begun, gate, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(30)
        done.set()

    calls = Calls(ends[0], {"work": work}, ErrorLines())
    ends[1].send(call=[0, "work", []])
    ends[1].outgoing.close()
    calls.listen()
    assert begun.wait(30)
    threading.Timer(0.1, gate.set).start()
    calls.settle()
    assert done.is_set()


def test_a_thousand_answers_that_come_later_hold_no_threads_and_keep_their_errors(ends: tuple[Line, Line]) -> None:
    event, asked = Future[None](), list[int]()

    def ask(n: int) -> Later[int]:
        asked.append(n)
        return Later(event, lambda: read(n))

    def read(n: int) -> int:
        if n == 7:
            raise RefusedError("E-RUN-14", "no")
        return 2 * n

    one, other = Calls(ends[0], {}, ErrorLines()), Calls(ends[1], {"ask": ask}, ErrorLines())
    for calls in (one, other):
        threading.Thread(target=calls.listen, daemon=True).start()
    before = threading.active_count()
    answers = [one.begin("ask", n) for n in range(1000)]
    until(lambda: len(asked) == 1000, "all questions")
    until(lambda: threading.active_count() <= before, "the end of their threads")
    assert not any(answer.done() for answer in answers)
    event.set_result(None)
    assert [answer.result(60) for answer in answers if answer is not answers[7]] == [
        2 * n for n in range(1000) if n != 7
    ]
    with pytest.raises(RefusedError, match="E-RUN-14: no"):
        answers[7].result(60)


def test_calls_that_take_long_are_answered_by_a_bounded_number_of_threads(ends: tuple[Line, Line]) -> None:
    gate, begun = threading.Event(), list[int]()

    def wait(n: int) -> None:
        begun.append(n)
        gate.wait(60)

    one, other = Calls(ends[0], {}, ErrorLines()), Calls(ends[1], {"wait": wait}, ErrorLines())
    for calls in (one, other):
        threading.Thread(target=calls.listen, daemon=True).start()
    before = threading.active_count()
    answers = [one.begin("wait", n) for n in range(100)]
    until(lambda: len(begun) == MOST_THREADS, "as many as are answered at once")
    assert threading.active_count() - before == MOST_THREADS
    gate.set()
    for answer in answers:
        answer.result(60)
    assert sorted(begun) == list(range(100))


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("character", ["\x01", "\u00e9", "\U0001f600"])
def test_an_error_of_any_length_and_characters_fits_a_line(character: str) -> None:
    errors = ErrorLines()
    for error in (RefusedError("E-RUN-14", character * (1 << 24)), ValueError(character * (1 << 24))):
        assert type(errors.read(json.loads(encoded(raised=errors.write(error)))["raised"])) in (
            RefusedError,
            UnforeseenError,
        )


@pytest.mark.parametrize(
    "raw",
    [
        {"kind": "RefusedError", "code": ["E-RUN-14"], "message": "no"},
        {"kind": "RefusedError", "code": "E-RUN-14", "message": 5},
        {"kind": "Any", "code": "E-RUN-14", "message": "no"},
        {"kind": "RefusedError"},
    ],
)
def test_what_is_no_error_is_not_read_as_one(raw: dict[str, str]) -> None:
    with pytest.raises((TypeError, LookupError)):
        ErrorLines().read(raw)


def test_an_error_with_the_name_of_a_file_that_is_no_text_can_be_told() -> None:
    named = RefusedError("E-RUN-14", os.fsdecode(b"caf\xe9.png"))
    read = ErrorLines().read(json.loads(encoded(raised=ErrorLines().write(named)))["raised"])
    assert str(read) == "E-RUN-14: caf?.png"
    str(read).encode()
