"""When an answer of a private run leaves: at a moment that was planned, whatever the records and the coordinator do."""

from __future__ import annotations

import math
import threading

import pytest

from fl_core.errors import ConfigError
from fl_core.rounds.silo_round import run_silo_round
from protos.consilium.v1 import federation_pb2 as pb
from silo.cancellation import CancelledError, CancelToken
from silo.service.task_runner import ResponseTiming
from tests.support import until
from tests.support.fake_coordinator import Hospital, manifest
from tests.support.privacy import hospital_level, private

pytestmark = pytest.mark.integration

RUNS = pytest.mark.parametrize("run", [private, hospital_level], ids=["records", "hospital"])
HELD_S = 1000.0


class Clock:
    """A clock that a test moves, and the stop whose waits move it."""

    def __init__(self) -> None:
        self.now = 50.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def stop(self, reason: str = "") -> CancelToken:
        clock = self

        class Moved(CancelToken):
            def wait(self, seconds: float) -> bool:
                clock.waits.append(seconds)
                clock.now += seconds
                return self.is_cancelled

        stop = Moved()
        if reason:
            stop.cancel(reason)
        return stop


@pytest.mark.parametrize(("took", "left_at"), [(0.0, 5), (0.3, 5), (4.99, 5), (5.0, 5), (5.01, 10), (14.2, 15)])
def test_an_answer_leaves_at_a_multiple_of_the_planned_time(took, left_at) -> None:
    clock = Clock()
    timing = ResponseTiming(5.0, clock=clock)
    timing.begin("task", private=True)
    clock.now += took
    timing.hold("task", clock.stop())
    assert clock.now == pytest.approx(50 + left_at)
    assert not timing.holds("task")


def test_no_hurry_of_the_coordinator_moves_it() -> None:
    """Given up and offered again, a task that is done waits for the moment that was set, no sooner and no later."""
    clock = Clock()
    timing = ResponseTiming(5.0, clock=clock)
    timing.begin("task", private=True)
    clock.now += 2
    assert timing.holds("task")
    with pytest.raises(CancelledError):
        timing.hold("task", clock.stop("another was offered"))
    clock.now = 53.0
    timing.hold("task", clock.stop())
    assert clock.now == 55
    clock.now = 58.0
    timing.hold("task", clock.stop())
    assert clock.now == 58


def test_what_an_earlier_process_made_is_held_too_and_plain_runs_are_not() -> None:
    clock = Clock()
    timing = ResponseTiming(5.0, clock=clock)
    timing.hold("made before the restart", clock.stop())
    assert clock.now == 55
    timing.begin("plain", private=False)
    timing.hold("plain", clock.stop())
    ResponseTiming(clock=clock).hold("none planned", clock.stop())
    assert clock.now == 55
    assert clock.waits == [5.0]


@pytest.mark.parametrize("after", [math.nan, math.inf, -1.0, 1e9])
def test_a_pace_that_is_none_is_refused(after) -> None:
    with pytest.raises(ConfigError, match="E-CFG-02"):
        ResponseTiming(after)
    with pytest.raises(ConfigError, match="E-CFG-02"):
        ResponseTiming(pulse_floor=after)


def held(serving, run, run_round=run_silo_round) -> tuple[Hospital, Clock]:
    """Start a hospital that holds its answers, under a clock of the test's."""
    clock = Clock()
    hospital = serving(run, run_round, clock=clock, answer_after=HELD_S)
    clock.now += HELD_S  # since the start
    return hospital, clock


def later(hospital: Hospital, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    hospital.service._queue.retry_now()


@RUNS
def test_a_finished_update_is_no_news_before_its_time(serving, run) -> None:
    hospital, clock = held(serving, run())
    hospital.offer()
    until(hospital.service.store.outbox)
    later(hospital, clock, HELD_S - 1)
    assert hospital.service.pulse() == pb.Pulse(activity=pb.TRAINING, run_id="run-1", round=0)
    assert list(hospital.service._hello().staged) == []
    assert hospital.transfer.opened == {}
    later(hospital, clock, 1)
    hospital.sent()
    assert [r.run_id for r in hospital.service._hello().staged] == ["run-1"]


def test_a_finished_update_that_is_asked_for_again_does_not_come_sooner(serving, monkeypatch) -> None:
    """Another base in between makes the hospital give the update up; the first base then finds it done."""
    begun, holds = [], []

    def do(runtime, msg, state, data, context, kind):
        begun.append(kind)
        while len(begun) > 1:  # the second task: until it is given up
            data._data._progress(1, 5)  # behind what the policy withholds
            threading.Event().wait(0.002)
        return run_silo_round(runtime, msg, state, data, context, kind)

    def hold(timing, task, stop):
        holds.append(task)
        plain(timing, task, stop)

    plain = ResponseTiming.hold
    monkeypatch.setattr(ResponseTiming, "hold", hold)
    hospital, clock = held(serving, private(), do)
    first = hospital.offer()
    until(lambda: len(holds) >= 1)
    hospital.offer(state={"w": {n: v + 1 for n, v in hospital.server["w"].items()}})
    until(lambda: len(begun) >= 2)
    hospital.control.last.send(offer=first)
    until(lambda: len(holds) >= 2)
    assert holds[0] == holds[1]
    later(hospital, clock, HELD_S - 1)
    assert hospital.transfer.opened == {}
    later(hospital, clock, 1)
    hospital.sent()
    assert len(begun) == 2


def test_a_failure_is_told_when_an_update_would_have_been(serving, monkeypatch) -> None:
    def fails(*_):
        raise OSError("one broken image")

    def hold(timing, task, stop):
        holds.append(task)
        plain(timing, task, stop)

    holds, plain = [], ResponseTiming.hold
    monkeypatch.setattr(ResponseTiming, "hold", hold)
    hospital, clock = held(serving, private(), fails)
    hospital.offer()
    until(lambda: len(holds) >= 1)
    later(hospital, clock, HELD_S - 1)
    assert all(a.accepted for a in hospital.answers())
    later(hospital, clock, 1)
    assert hospital.refused().code == "E-RUN-31"


def test_a_held_update_keeps_no_service_from_ending_and_is_kept(serving) -> None:
    hospital, _ = held(serving, private())
    hospital.offer()
    until(hospital.service.store.outbox)
    service = hospital.service
    service.leave("over")
    assert service.settled(20)
    assert len(service.store.outbox()) == 1


def test_a_plain_run_is_not_held(serving) -> None:
    hospital, _ = held(serving, manifest())
    hospital.train()
