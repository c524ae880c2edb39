"""Which tasks a silo hears of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.runs import dispatcher as dispatcher_module
from coordinator.runs import tasks as tasks_module
from coordinator.runs.dispatcher import Dispatcher, SiloSession
from coordinator.runs.tasks import RoundTask, RunInterrupted, RunTasks
from coordinator.storage.records import Contribution, StoredRun
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import UnavailableError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from service_core.version import software
from tests.support.coordinator import session

TASK = RoundTask("run", 3, TaskKind.TRAIN, "north", "m" * 64, "b" * 64, 100, 1, time.monotonic() + 1000)


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[Dispatcher]:
    found = Dispatcher(CoordinatorStore(tmp_path), 1.0)
    yield found
    found.store.close()


@pytest.fixture
def tasks(dispatcher: Dispatcher) -> RunTasks:
    return dispatcher.add_run("run")


def offered(here: SiloSession) -> list[int]:
    """The rounds of the offers that are queued for a silo."""
    taken = list(iter(lambda: here.next(), None))
    assert all(message.WhichOneof("body") == "offer" for message in taken)
    return [message.offer.round for message in taken]


def test_an_open_task_is_offered_now_and_on_every_new_session(dispatcher: Dispatcher, tasks: RunTasks) -> None:
    first, second = session(), session()
    dispatcher.attach(first)
    with tasks.pending_task(TASK) as pending:
        tasks.offer(pending)
        assert offered(first) == [3]
        dispatcher.attach(second)
        dispatcher.catch_up(second, pb.Hello(), time.time())
        assert offered(second) == [3]


def test_a_task_that_was_not_offered_yet_is_offered_on_no_new_session(dispatcher: Dispatcher, tasks: RunTasks) -> None:
    """Its update may be here: a silo that made it again would pay for it again."""
    here, later = session(), session()
    dispatcher.attach(here)
    with tasks.pending_task(TASK) as pending:
        dispatcher.catch_up(here, pb.Hello(), time.time())
        assert offered(here) == []
        tasks.offer(pending)
        assert offered(here) == [3]
        dispatcher.attach(later)
        dispatcher.catch_up(later, pb.Hello(), time.time())
        assert offered(later) == [3]


def test_a_task_whose_update_came_before_its_offer_is_not_offered(dispatcher: Dispatcher, tasks: RunTasks) -> None:
    here = session()
    dispatcher.attach(here)
    with tasks.pending_task(TASK) as pending:
        dispatcher.delivered(Contribution("c", "run", 3, TaskKind.TRAIN, "north", "m" * 64, "b" * 64, "d" * 64, 1))
        tasks.offer(pending)
        dispatcher.catch_up(here, pb.Hello(), time.time())
        assert offered(here) == []
        assert pending.wait() == "d" * 64


def test_a_task_of_a_run_that_was_interrupted_is_offered_to_nobody(dispatcher: Dispatcher, tasks: RunTasks) -> None:
    """Also when it is interrupted between a port's look for an update and its offer."""
    here = session()
    dispatcher.attach(here)
    with tasks.pending_task(TASK) as pending:
        tasks.interrupt()
        tasks.offer(pending)
        dispatcher.catch_up(here, pb.Hello(), time.time())
        assert offered(here) == []
        with pytest.raises(RunInterrupted):
            pending.wait()
    with pytest.raises(RunInterrupted), tasks.pending_task(TASK):
        pass
    tasks = dispatcher.add_run("run")  # it was resumed
    with tasks.pending_task(TASK) as pending:
        tasks.offer(pending)
    assert offered(here) == [3]


def test_members_of_a_fixed_set_are_asked_nothing_once_their_run_was_interrupted(
    dispatcher: Dispatcher, tasks: RunTasks
) -> None:
    here, later = session(), session()
    dispatcher.attach(here)
    asked = pb.CoordinatorMessage(secagg_seal=pb.SecaggSeal(run_id="run"))
    fixed = SimpleNamespace(messages_for=lambda silo: [asked], interrupt=lambda: None)
    with tasks.asking(fixed):  # type: ignore[arg-type]
        tasks.ask_members(fixed, ["north"])  # type: ignore[arg-type]
        assert here.next() == asked
        tasks.interrupt()
        tasks.ask_members(fixed, ["north"])  # type: ignore[arg-type]
        dispatcher.attach(later)
        dispatcher.catch_up(later, pb.Hello(), time.time())
        assert offered(here) == offered(later) == []


def test_silos_that_leave_together_are_one_change_of_the_database(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[set[str]] = []
    monkeypatch.setattr(dispatcher.store.members, "mark_connected", lambda names: stored.append(set(names)))
    here = [session(f"silo{number}") for number in range(20)]
    for each in here:
        dispatcher.attach(each)
    for each in here[1:]:
        dispatcher.detach(each)
    assert stored == []
    dispatcher.store_last_seen()
    dispatcher.store_last_seen()
    assert stored == [{each.name for each in here[1:]}]


def test_silos_that_stay_are_seen_once_a_minute(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a silo that stays for a year is told at each new session of all runs that ended in it."""
    stored: list[set[str]] = []
    monkeypatch.setattr(dispatcher.store.members, "mark_connected", lambda names: stored.append(set(names)))
    dispatcher.attach(session("north"))
    began = time.monotonic()
    for now in (0.0, 61.0, 62.0, 121.9, 122.5):
        monkeypatch.setattr(dispatcher_module, "time", SimpleNamespace(monotonic=lambda now=now: began + now))
        dispatcher.store_last_seen()
    assert stored == [{"north"}, {"north"}]


def test_who_left_is_stored_once_the_disk_takes_it(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[set[str]] = []

    def full(names: set[str]) -> None:
        raise UnavailableError("E-STATE-63", "full")

    north = session("north")
    dispatcher.attach(north)
    dispatcher.detach(north)
    monkeypatch.setattr(dispatcher.store.members, "mark_connected", full)
    with pytest.raises(UnavailableError):
        dispatcher.store_last_seen()
    monkeypatch.setattr(dispatcher.store.members, "mark_connected", lambda names: stored.append(set(names)))
    dispatcher.store_last_seen()
    assert stored == [{"north"}]


def with_software(name: str, text: str) -> SiloSession:
    found = session(name)
    found.receive_hello(pb.Hello(software=text))
    return found


def noted(dispatcher: Dispatcher, kind: str, after: int = 0) -> list[tuple[str, str]]:
    return [(e.silo, e.text) for e in dispatcher.store.runs.events("run", after) if e.kind == kind]


def note_software(dispatcher: Dispatcher, names: list[str]) -> None:
    tasks = dispatcher.tasks_of("run") or dispatcher.add_run("run")
    tasks.note_software(dispatcher.software_of(names))


def test_a_run_keeps_the_software_of_each_side_once_and_warns_of_another_build(dispatcher: Dispatcher) -> None:
    dispatcher.store.runs.add(
        StoredRun("run", "run", "request", "{}", "{}", "m" * 64, "fedavg", "made-up", 3, ("north",)), 1
    )
    for silo in (with_software("north", software()), with_software("south", "older"), with_software("east", "")):
        dispatcher.attach(silo)
    for _ in range(3):
        note_software(dispatcher, ["north", "south", "east", "away"])
    assert dispatcher.store.runs.software("run") == {"": software(), "north": software(), "south": "older", "east": ""}
    assert len(noted(dispatcher, "software")) == 4
    ((_, warning),) = noted(dispatcher, "warning")
    assert f"expected {software()} on all sides, found east (no version given), south (older)" in warning
    dispatcher.attach(with_software("south", "x" * 10_000))
    note_software(dispatcher, ["south"])
    assert dispatcher.store.runs.software("run")["south"] == "x" * 80
    assert len(noted(dispatcher, "warning")) == 2


def test_a_coordinator_of_another_build_goes_on_with_a_run_and_holds_each_silo_against_its_own(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher.store.runs.add(
        StoredRun("run", "run", "request", "{}", "{}", "m" * 64, "fedavg", "made-up", 3, ("north",)), 1
    )
    dispatcher.attach(with_software("north", software()))
    note_software(dispatcher, ["north"])
    assert noted(dispatcher, "warning") == []
    before = len(dispatcher.store.runs.events("run", 0))
    restarted = Dispatcher(dispatcher.store, 1.0)
    note_software(restarted, ["north"])
    assert len(dispatcher.store.runs.events("run", 0)) == before
    monkeypatch.setattr(tasks_module, "software", lambda: "newer")
    upgraded = Dispatcher(dispatcher.store, 1.0)
    note_software(upgraded, ["north"])
    assert noted(upgraded, "software", before) == [("", "newer")]
    upgraded.attach(with_software("north", software()))
    note_software(upgraded, ["north"])
    ((_, warning),) = noted(upgraded, "warning")
    assert f"expected newer on all sides, found north ({software()})" in warning
    upgraded.attach(with_software("north", "newer"))
    note_software(upgraded, ["north"])
    assert upgraded.store.runs.software("run") == {"": "newer", "north": "newer"}
    assert len(noted(upgraded, "warning")) == 1
