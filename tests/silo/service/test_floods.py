"""A coordinator that talks without end fills neither the memory nor the disk of a hospital."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_core.errors import ProtocolError
from protos.consilium.v1 import federation_pb2 as pb
from silo.connection import session
from silo.connection.retry import Pace
from silo.connection.session import Session
from silo.events import SiloEvent
from silo.service import task_queue
from silo.service.task_queue import TaskQueue
from silo.storage.store import SiloStore

MANY = 30


class Asked:
    """A queue of tasks whose bounds are small, and all that comes out of it."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[pb.SiloMessage] = []
        self.said: list[SiloEvent] = []
        self.store = SiloStore(folder / "silo.db")
        self.queue = TaskQueue(self.store, self.sent.append, self.said.append)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(task_queue, "_MAX_TASKS", 10)
    made = Asked(tmp_path)
    yield made
    made.store.close_database()


def offer(number: int, round: int = 0) -> pb.Offer:
    return pb.Offer(run_id=f"run-{number}", round=round, kind=pb.TRAIN, base_digest="b" * 64)


@pytest.mark.fault("a coordinator", "offers tasks for any number of runs", "a few wait, the others are refused")
def test_tasks_beyond_a_bound_are_left_out(asked: Asked) -> None:
    for number in range(10):
        asked.queue.offer(offer(number))
        asked.queue.preflight(pb.Preflight(run_id=f"run-{number}"))
    for number in range(10, MANY):
        with pytest.raises(ProtocolError, match="E-WIRE-06"):
            asked.queue.offer(offer(number))
        with pytest.raises(ProtocolError, match="E-WIRE-06"):
            asked.queue.preflight(pb.Preflight(run_id=f"run-{number}"))
    asked.queue.offer(offer(3, round=1))  # the next round of a run takes the place of the last
    while (task := asked.queue.take(0)) is not None:
        asked.queue.refuse(task, ProtocolError("E-WIRE-06", "not what was agreed"))
        asked.queue.finish(task)
    asked.queue.offer(offer(MANY))


def test_refusals_beyond_a_bound_are_forgotten(asked: Asked) -> None:
    for number in range(MANY):
        asked.queue.offer(offer(number))
        task = asked.queue.take(0)
        assert task is not None
        asked.queue.refuse(task, ProtocolError("E-WIRE-06", "not what was agreed"))
        asked.queue.finish(task)
    assert len(asked.queue._refused) == 10


@pytest.mark.fault("a coordinator", "closes and ends runs that do not exist", "no log line, no database row")
def test_what_never_began_leaves_nothing_when_it_ends(asked: Asked) -> None:
    for number in range(MANY):
        name = f"run-{number}"
        asked.queue.round_closed(pb.RoundClosed(run_id=name, kind=pb.TRAIN, included=True, reason="EVIL"))
        asked.queue.run_ended(pb.RunEnded(run_id=name, state="failed", reason="EVIL"))
    assert not asked.said
    assert not asked.store.history()
    asked.queue.preflight(pb.Preflight(run_id="run-1"))
    asked.queue.run_ended(pb.RunEnded(run_id="run-1", state="failed", reason="E-RUN-36: not all are ready"))
    assert [found.event for found in asked.said] == ["ended"]  # of a run that it was asked for


def test_messages_are_read_at_a_pace_once_a_burst_is_over() -> None:
    now = [0.0]
    pace = Pace(50.0, 5000.0, lambda: now[0])
    assert {pace.wait() for _ in range(5000)} == {0.0}
    for _ in range(1000):
        wait = pace.wait()
        assert wait == pytest.approx(1 / 50.0)
        now[0] += wait
    now[0] += 3600
    assert pace.wait() == 0.0


class _Silent:
    """A coordinator that says and reads nothing."""

    cancelled = False

    def Session(self, messages: object) -> _Silent:  # noqa: N802
        return self

    def __iter__(self) -> Iterator[pb.CoordinatorMessage]:
        yield pb.CoordinatorMessage(welcome=pb.Welcome(pulse_seconds=3600.0))
        while not self.cancelled:
            yield pb.CoordinatorMessage()

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.fault("a coordinator", "does not read a hospital's answers", "its session ends with E-NET-12")
def test_answers_that_nobody_reads_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MAX_UNREAD", 50)
    stub = _Silent()
    line = Session(stub, Asking(), lambda: None, lambda _: None)
    line.open(pb.Hello(), 10.0)
    for _ in range(100):
        line.send(pb.SiloMessage())
    assert line.ended.wait(10)
    assert line.error is not None
    assert line.error.code == "E-NET-12"


class Asking:
    """A handler that is only asked for its pulse."""

    def pulse(self) -> pb.Pulse:
        return pb.Pulse()
