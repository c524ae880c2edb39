"""The newest facts of a service, and what is kept of them while it is away."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from consilium.pages.lead import service_watch
from consilium.pages.lead.service_watch import ServiceWatch
from fl_core.errors import UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until
from tests.support.made_up_service import MadeUpService
from tests.support.recorded_runs import detail, measured

GONE = UnavailableError("E-NET-01", "nobody listens")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def service() -> MadeUpService:
    silos = pb.SiloList(silos=[pb.SiloInfo(name="north", state="online")])
    return MadeUpService(silos, [detail("run-1", measured([0.1, 0.2]))])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(service: MadeUpService, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceWatch]:
    monkeypatch.setattr(service_watch, "REFRESH_S", 0.0)
    found = ServiceWatch(service, clock)  # type: ignore[arg-type]
    found.start()
    yield found
    found.stop()


def test_while_the_service_is_away_its_last_facts_stay_with_their_date_and_since_when(
    watch: ServiceWatch, service: MadeUpService, clock: Clock
) -> None:
    assert [silo.name for silo in watch.current().silos] == ["north"]
    service.error, clock.now = GONE, 1010.0
    first = watch.current()
    clock.now = 1020.0
    found = watch.current()
    assert first.away == found.away
    assert found.away is not None
    assert (found.at, found.away.since) == (1000.0, 1010.0)
    assert "nobody listens" in found.away.why
    assert [silo.name for silo in found.silos] == ["north"]
    service.error, clock.now = None, 1030.0
    found = watch.current()
    assert (found.at, found.away) == (1030.0, None)


def test_a_service_that_was_never_there_is_said_to_be_away(watch: ServiceWatch, service: MadeUpService) -> None:
    service.error = GONE
    found = watch.current()
    assert found.at is None
    assert found.away is not None


@pytest.mark.parametrize("error", [ValueError("nonsense"), KeyError("x"), MemoryError()])
def test_an_answer_that_is_none_ends_neither_the_page_nor_its_thread(
    watch: ServiceWatch, service: MadeUpService, error: Exception
) -> None:
    service.error = error
    assert watch.current().away is not None
    service.error = None
    assert watch.current().away is None


def test_nobody_asks_the_service_while_nobody_looks(watch: ServiceWatch, service: MadeUpService) -> None:
    watch.current()
    asked = service.asked
    assert not threading.Event().wait(0.1)
    assert service.asked == asked


def test_a_service_that_does_not_answer_holds_no_page(service: MadeUpService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_watch, "_PATIENCE_S", 0.05)
    free = threading.Event()
    monkeypatch.setattr(service, "silos", lambda: free.wait(200) and service.silo_list)
    watch = ServiceWatch(service)  # type: ignore[arg-type]
    watch.start()
    assert watch.current().at is None  # at once: the answer is still held
    free.set()
    until(lambda: watch.current().at is not None, "the answer")
    watch.stop()


def test_the_version_changes_with_the_facts_and_not_with_pulses(watch: ServiceWatch, service: MadeUpService) -> None:
    watch.current(fresh=True)
    first = watch.version()
    service.silo_list.silos[0].last_seen_unix = 5.0
    watch.current(fresh=True)
    assert watch.version() == first
    service.silo_list.silos[0].state = "offline"
    watch.current(fresh=True)
    second = watch.version()
    assert second != first
    service.details[0].info.closed = 1
    watch.current(fresh=True)
    assert watch.version() != second


def test_a_run_is_fetched_again_only_when_it_has_changed_and_its_events_from_the_last_one_on(
    watch: ServiceWatch, service: MadeUpService
) -> None:
    info = service.details[0].info
    info.state = "running"
    service.happened = [pb.Event(number=1, kind="opened")]
    _, first = watch.follow("run-1")
    assert first is not None
    service.happened = [pb.Event(number=2, kind="closed")]
    watch.current(fresh=True)
    _, second = watch.follow("run-1")
    assert second is not None
    assert second.record is first.record
    assert [event.number for event in second.events] == [1, 2]
    changed = pb.RunDetail()
    changed.CopyFrom(service.details[0])
    changed.info.closed = 2
    service.details = [changed]
    watch.current(fresh=True)
    _, third = watch.follow("run-1")
    assert third is not None
    assert third.record.detail is changed
    assert watch.follow("nothing")[1] is None
