"""A finished update may leave while it goes to the disk, but nobody signs for it before it is there."""

from __future__ import annotations

import threading

import pytest

from fl_core.types.enums import TaskKind
from protos.wire.tasks import TaskKey
from service_core.storage.object_store import ObjectStore
from tests.support import until
from tests.support.fake_coordinator import Hospital

TRAINED = TaskKey("run-1", 0, TaskKind.TRAIN)


@pytest.fixture
def hospital(tmp_path):
    made = Hospital(tmp_path / "home")
    yield made
    made.end()


class Disk:
    """Holds the sync of finished updates back until it is let go, and may fail then."""

    def __init__(self, monkeypatch, error: OSError | None = None) -> None:
        self.free, self.sealing, real = threading.Event(), threading.Event(), ObjectStore.sync

        def sync(objects: ObjectStore, *digests: str) -> None:
            self.sealing.set()
            assert self.free.wait(60)
            if error is not None:
                raise error
            real(objects, *digests)

        monkeypatch.setattr(ObjectStore, "sync", sync)


def test_an_update_is_sent_while_it_goes_to_the_disk_and_committed_once_it_is_there(hospital, monkeypatch):
    disk = Disk(monkeypatch)
    service = hospital.start()
    hospital.offer()
    until(lambda: hospital.transfer.received > 0)
    assert disk.sealing.is_set()
    assert "Commit" not in hospital.transfer.calls
    assert service.store.outbox() == []  # a crash now leaves no entry: the task is done anew
    assert "staged" not in hospital.events()
    disk.free.set()
    hospital.sent()
    assert hospital.transfer.calls[-1] == "Commit"
    assert [entry.receipt is not None for entry in service.store.outbox()] == [True]
    assert [event for event in hospital.events() if event in ("staged", "sent")] == ["staged", "sent"]


def test_an_update_without_privacy_is_listed_before_a_byte_of_it_leaves(hospital, monkeypatch):
    """And so also where its sender crashes meanwhile, or its coordinator never gives a receipt."""
    disk = Disk(monkeypatch)
    service = hospital.start()
    hospital.offer()
    until(lambda: hospital.transfer.received > 0)
    assert [(u.run_id, u.splits) for u in service.store.unprotected()] == [("run-1", ("test", "train"))]
    assert service.store.outbox() == []
    disk.free.set()
    hospital.sent()
    assert len(service.store.unprotected()) == 1


def test_an_update_that_cannot_be_brought_to_the_disk_is_never_committed(hospital, monkeypatch):
    Disk(monkeypatch, OSError(28, "No space left on device")).free.set()
    service = hospital.start()
    hospital.offer()
    assert not hospital.refused().accepted
    assert "Commit" not in hospital.transfer.calls
    assert service.store.outbox() == []
    assert service.store.entry(TRAINED) is None
