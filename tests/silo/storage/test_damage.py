"""What a hospital's disk loses or damages is noticed, and made or fetched again where that is possible."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from fl_core.errors import StateError
from service_core.storage.object_store import count_objects
from silo.cli import operations
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.hospital import TRAINED, opened, stage


def flip(file) -> None:
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.fault("a disk or an operator", "loses a hospital's database", "no update or state is deleted: E-STATE-23")
@pytest.mark.parametrize("names", [("silo.db",), ("silo.db", "silo.db.generation")])
def test_a_database_that_is_missing_is_noticed_before_anything_is_deleted(tmp_path, names):
    outbox = opened(tmp_path)
    stage(outbox)
    outbox.store.close_database()
    for name in names:
        (tmp_path / name).unlink()
    with pytest.raises(StateError, match=r"E-STATE-23.*--accept-loss"):
        SiloStore(tmp_path / "silo.db")
    assert count_objects(tmp_path / "objects") == 2
    operations.restore(accept_loss=True, home=tmp_path, as_json=True)
    again = opened(tmp_path)
    assert again.store.outbox() == []
    again.sweep()
    assert count_objects(tmp_path / "objects") == 0


@pytest.mark.fault("a disk", "damages a row of a hospital's database", "E-STATE-22 names the file")
@pytest.mark.parametrize("damage", ["attested = '{'", "attested = '7'", "kind = 'none'"])
def test_a_damaged_row_is_said_as_such(tmp_path, damage):
    outbox = opened(tmp_path)
    stage(outbox)
    outbox.store.close_database()
    with closing(sqlite3.connect(tmp_path / "silo.db")) as db, db:
        db.execute(f"UPDATE tasks SET {damage}")
    with pytest.raises(StateError, match=r"E-STATE-22.*damaged.*from a backup"):
        opened(tmp_path).store.outbox()


@pytest.mark.fault("a disk", "changes a byte of a file that a hospital fetched", "it is fetched again")
@pytest.mark.parametrize("what", ["base_digest", "manifest_digest"])
def test_a_damaged_base_or_manifest_is_fetched_again(make, what):
    hospital = make()
    service = hospital.start()
    hospital.train()
    digest = getattr(service.store.entry(TRAINED), what)
    hospital.settle()
    hospital.stop()
    flip(hospital.folder / "objects" / digest)
    hospital.start()
    hospital.offer(1)
    hospital.sent(2)
    assert hospital.transfer.calls.count("Get") == 3


@pytest.mark.fault(
    "a disk", "changes a byte of an update that a hospital has not sent", "detected; the update is made again"
)
def test_a_damaged_update_is_made_again(make):
    hospital = make()
    service = hospital.start()
    hospital.train()
    made = service.store.entry(TRAINED).object_digest
    hospital.stop()
    hospital.transfer.forget()
    lose_receipt_and_update(hospital, made)
    hospital.start()
    hospital.offer()
    hospital.sent(2)
    assert "damaged" in hospital.events()
    assert hospital.events().count("training") == 2
    assert hospital.transfer.opened.popitem()[1].object_digest == made  # the same round gives the same update


@pytest.mark.fault(
    "a disk",
    "changes a byte of an update whose receipt was lost",
    "the hospital asks for the receipt; nothing is repeated",
)
def test_a_damaged_update_that_the_coordinator_has_is_not_made_again(make):
    hospital = make()
    service = hospital.start()
    hospital.train()
    made = service.store.entry(TRAINED).object_digest
    hospital.stop()
    lose_receipt_and_update(hospital, made)
    service = hospital.start()
    hospital.offer()
    until(lambda: "taken" in hospital.events())
    assert hospital.events().count("training") == 1
    assert [entry.receipt is not None for entry in service.store.outbox()] == [True]
    hospital.settle()
    assert service.store.committed("run-1") is not None


def lose_receipt_and_update(hospital, made):
    with closing(sqlite3.connect(hospital.folder / "silo.db")) as db, db:
        db.execute("UPDATE tasks SET receipt = NULL")
    flip(hospital.folder / "objects" / made)
