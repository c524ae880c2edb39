"""Backups that are half, damaged, hostile or of something else are refused, and a backup is never half."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import stat
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.cli import consortium as consortium_cli
from coordinator.cli import operations as coordinator_cli
from coordinator.pki.authority import Authority
from coordinator.storage.records import ObjectKind
from coordinator.storage.runs import note_object
from coordinator.storage.store import FILE, OBJECTS, CoordinatorStore
from fl_core.errors import ConfigError, FederationError, StateError, UnavailableError
from privacy.ledger.ledger import Ledger
from service_core.storage import backup as backup_module
from service_core.storage import unfinished
from service_core.storage.backup import FILE as CONTENTS
from service_core.storage.object_store import ObjectStore
from silo.cli import operations as silo_cli
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home
from silo.storage.store import SiloStore
from tests.support.fake_coordinator import enrolled
from tests.support.hospital import B, key, opened, stage


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A coordinator's home with keys, an object that is needed and one that is not."""
    place = tmp_path / "home"
    (place / "pki").mkdir(parents=True, mode=0o700)
    for name in ("ca.key", "ca.crt", "server.pem"):
        (place / "pki" / name).write_bytes(name.encode())
    objects = ObjectStore(place / OBJECTS, sharded=True)
    with closing(CoordinatorStore(place)) as store, store.database.write() as db:
        db.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        texts = "'r','r','q','{}','{}','m','fedavg','d',1,'[]','aborted',''"
        db.exec_driver_sql(f"INSERT INTO runs VALUES ({texts},0,NULL,'',0,0,0,0,0,0,NULL,NULL)")
        note_object(db, objects.put(b"a model"), "r", ObjectKind.STATE, 0, 7)
    objects.put(b"not needed")
    (place / OBJECTS / ".half.part").write_bytes(b"ha")
    return place


def took(home: Path, target: Path, **options: bool) -> Path:
    coordinator_cli.backup(target, home=home, as_json=True, **options)
    return target


def test_a_backup_holds_what_is_needed_for_its_owner_alone(home: Path, tmp_path: Path) -> None:
    target = took(home, tmp_path / "backup")
    found = sorted(str(f.relative_to(target)) for f in target.rglob("*") if f.is_file())
    (model,) = [name for name in found if name.startswith(OBJECTS)]
    assert (target / model).read_bytes() == b"a model"
    assert found == sorted([CONTENTS, FILE, model, "pki/ca.crt", "pki/server.pem"])
    modes = {stat.S_IMODE(f.stat().st_mode) for f in (target, *target.rglob("*")) if f.is_dir()}
    assert modes == {0o700}
    assert {stat.S_IMODE(f.stat().st_mode) for f in target.rglob("*") if f.is_file()} == {0o600}
    assert not list(home.glob(".backup*"))
    assert "pki/ca.key" in json.loads((took(home, tmp_path / "b", authority_key=True) / CONTENTS).read_text())["files"]
    with pytest.raises(ConfigError, match=r"E-CFG-02.*new or empty"):
        took(home, target)


def test_a_restored_home_is_the_one_that_was_backed_up_in_another_incarnation(home: Path, tmp_path: Path) -> None:
    coordinator_cli.restore(took(home, tmp_path / "backup"), home=tmp_path / "new", as_json=True)
    with closing(CoordinatorStore(home)) as before, closing(CoordinatorStore(tmp_path / "new")) as after:
        assert [r.id for r in after.runs.all()] == [r.id for r in before.runs.all()] == ["r"]
        assert after.database.incarnation != before.database.incarnation
        (digest,) = after.contributions.referenced_digests()
        assert ObjectStore(tmp_path / "new" / OBJECTS, sharded=True).holds(digest)
    with pytest.raises(ConfigError, match=r"E-CFG-02.*new or empty"):
        coordinator_cli.restore(tmp_path / "backup", home=home)


@pytest.mark.fault("a disk", "damages an object before a backup", "the backup stops with E-STATE-63")
@pytest.mark.parametrize("lost", [True, False])
def test_a_damaged_object_is_found_when_it_is_backed_up(home: Path, tmp_path: Path, lost: bool) -> None:
    with closing(CoordinatorStore(home)) as store:
        (digest,) = store.contributions.referenced_digests()
    file = ObjectStore(home / OBJECTS, sharded=True).path(digest)
    if lost:
        file.unlink()
    else:
        file.write_bytes(b"a mode1")
    with pytest.raises(StateError, match="E-STATE-63"):
        took(home, tmp_path / "backup")
    with pytest.raises(StateError, match="E-STATE-25"):
        coordinator_cli.restore(tmp_path / "backup", home=tmp_path / "new")


def change(backup: Path, how: str) -> None:
    contents = json.loads((backup / CONTENTS).read_text())
    if how == "unfinished":
        (backup / CONTENTS).unlink()
    elif how == "cut":
        (backup / CONTENTS).write_text((backup / CONTENTS).read_text()[:-9])
    elif how == "flipped":
        (backup / "pki" / "server.pem").write_bytes(b"server.peM")
    elif how == "missing":
        (backup / FILE).unlink()
    elif how == "newer":
        (backup / CONTENTS).write_text(json.dumps(contents | {"format": 2}))
    elif how == "timeless":
        (backup / CONTENTS).write_text(json.dumps(contents | {"at": 1e300}))
    elif how == "endless":
        (backup / CONTENTS).unlink()
        (backup / CONTENTS).symlink_to("/dev/zero")
    elif how == "deep":
        (backup / CONTENTS).write_text("[" * 100_000)
    else:
        (backup.parent / "outside").write_bytes(b"")
        files = {"../outside": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"}
        (backup / CONTENTS).write_text(json.dumps(contents | {"files": contents["files"] | files}))


@pytest.mark.fault("an attacker with disk access", "damages, cuts or rewrites a backup", "not restored: E-STATE-25")
@pytest.mark.parametrize(
    "how", ["unfinished", "cut", "flipped", "missing", "newer", "timeless", "endless", "deep", "traversal"]
)
def test_a_backup_that_was_changed_is_not_restored(home: Path, tmp_path: Path, how: str) -> None:
    change(took(home, tmp_path / "a" / "backup"), how)
    with pytest.raises(StateError, match="E-STATE-25"):
        coordinator_cli.restore(tmp_path / "a" / "backup", home=tmp_path / "new")
    assert not (tmp_path / "new" / FILE).exists()
    assert not (tmp_path / "outside").exists()


def test_a_damaged_backup_is_refused_before_a_byte_of_it_is_in_the_home(home: Path, tmp_path: Path) -> None:
    backup = took(home, tmp_path / "backup")
    (backup / FILE).write_bytes(b"damaged")
    with pytest.raises(StateError, match="E-STATE-25"):
        coordinator_cli.restore(backup, home=tmp_path / "new")
    assert not list((tmp_path / "new").rglob("*"))


def halved(backup: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore until the database's turn, as a process does that is killed there."""
    copied = backup_module._copy

    def copy(source: Path, target: Path) -> str:
        if source.name == FILE:
            raise KeyboardInterrupt
        return copied(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(backup_module, "_copy", copy)
        with pytest.raises(KeyboardInterrupt):
            coordinator_cli.restore(backup, home=new)


@pytest.mark.fault(
    "a power cut", "comes while a home is restored", "the home is refused until the restore is run again and completes"
)
def test_a_home_that_was_restored_by_half_is_refused_until_the_same_command_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, new = took(home, tmp_path / "backup"), tmp_path / "new"
    halved(backup, new, monkeypatch)
    goes_on = rf"E-STATE-26.*coordinator restore {backup} --home {new}"
    for refused in (
        lambda: CoordinatorStore(new),
        lambda: consortium_cli.serve(home=new),
        lambda: consortium_cli.invite("north", home=new),
        lambda: consortium_cli.init("other", ["127.0.0.1:1"], home=new),
        lambda: coordinator_cli.backup(tmp_path / "second", home=new),
        lambda: coordinator_cli.restore(accept_loss=True, home=new),
        lambda: coordinator_cli.restore(took(home, tmp_path / "later"), home=new),
        lambda: silo_cli.restore(tmp_path / "backup", home=new),
        lambda: SiloStore(new / "silo.db"),
        lambda: Ledger(new / "ledger.db"),
    ):
        shutil.rmtree(tmp_path / "later", ignore_errors=True)
        with pytest.raises(FederationError, match=r"E-STATE-2[56]") as said:
            refused()
        assert said.value.code == "E-STATE-25" or re.search(goes_on, str(said.value))
    (new / "pki" / "ca.key").write_bytes(b"put here meanwhile")
    coordinator_cli.restore(backup, home=new, as_json=True)
    assert (new / "pki" / "ca.key").read_bytes() == b"put here meanwhile"
    with closing(CoordinatorStore(new)) as store:
        assert [r.id for r in store.runs.all()] == ["r"]
    assert not (new / unfinished.FILE).exists()


def test_an_interrupted_backup_is_none_and_is_made_anew_by_the_same_command(home: Path, tmp_path: Path) -> None:
    target = took(home, tmp_path / "backup")
    marker = unfinished.UnfinishedMarker("coordinator backup", f"coordinator backup {target}")
    (target / unfinished.FILE).write_text(json.dumps(dataclasses.asdict(marker)))
    with pytest.raises(StateError, match=r"E-STATE-25.*coordinator backup"):
        coordinator_cli.restore(target, home=tmp_path / "new")
    (target / "pki" / "server.pem").unlink()
    took(home, target)
    coordinator_cli.restore(target, home=tmp_path / "new", as_json=True)


def test_a_folder_that_another_command_fills_now_is_left_to_it(home: Path, tmp_path: Path) -> None:
    marker = unfinished.UnfinishedMarker("coordinator backup", "coordinator backup TO")
    target = tmp_path / "backup"
    target.mkdir(mode=0o700)
    with unfinished.filling(target, marker):
        (target / "of the first").touch()
        with pytest.raises(StateError, match="E-STATE-20"):
            took(home, target)
        assert (target / "of the first").exists()


def test_init_that_was_interrupted_begins_anew_and_no_whole_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(consortium_cli.shutil, "rmtree", lambda *_, **__: None)  # a killed process takes nothing back
        patch.setattr(unfinished.private_files, "remove", lambda _: None)
        patch.setattr(Authority, "issue_lead", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            consortium_cli.init("test", ["127.0.0.1:1"], home=place)
    with pytest.raises(StateError, match=r"E-STATE-26.*coordinator init test --address 127.0.0.1:1"):
        consortium_cli.invite("north", home=place)
    consortium_cli.init("test", ["127.0.0.1:1"], home=place, as_json=True)
    assert Authority.open(place).lead_credentials("lead")
    with pytest.raises(StateError, match="E-STATE-44"):
        consortium_cli.init("test", ["127.0.0.1:1"], home=place)
    consortium_cli.invite("north", home=place)  # and what is there goes on


def test_a_side_does_not_restore_the_other_ones_backup(home: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"E-STATE-25.*a coordinator"):
        silo_cli.restore(took(home, tmp_path / "backup"), home=tmp_path / "new")


def test_a_hospitals_outbox_is_in_its_backup_and_the_ledgers_key_is_not(tmp_path: Path) -> None:
    outbox = opened(tmp_path / "home")
    entry = stage(outbox)
    (tmp_path / "home" / "ledger.key").write_bytes(b"secret")
    (tmp_path / "home" / "features").mkdir(mode=0o700)
    (tmp_path / "home" / "features" / "of-records.rows").write_bytes(b"rows")
    silo_cli.backup(tmp_path / "backup", home=tmp_path / "home", as_json=True)
    outbox.store.close_database()
    assert not (tmp_path / "backup" / "ledger.key").exists()
    assert not list((tmp_path / "backup").rglob("features*"))
    silo_cli.restore(tmp_path / "backup", home=tmp_path / "new", as_json=True)
    again = opened(tmp_path / "new")
    assert again.find(key(), B).object_digest == entry.object_digest
    assert again.bundle(entry).exists()
    again.sweep()
    assert again.bundle(entry).exists()


def test_a_hospital_that_has_joined_and_never_served_is_backed_up_and_goes_on_elsewhere(tmp_path: Path) -> None:
    joined = enrolled(tmp_path / "home")
    own = SiloIdentity(joined.path).current_credentials()
    assert not joined.database.exists()
    silo_cli.backup(tmp_path / "backup", home=joined.path, as_json=True)
    silo_cli.restore(tmp_path / "backup", home=tmp_path / "new", as_json=True)
    restored = Home(tmp_path / "new")
    assert SiloIdentity(restored.path).current_credentials() == own
    assert restored.addresses() == joined.addresses()
    store = SiloStore(restored.database)
    store.record_run("run-1", "first", "a" * 64)
    store.close_database()
    # Only a home in which nothing was ever remembered gets an empty database: one that lost its own is no backup.
    SiloStore(joined.database).close_database()
    joined.database.unlink()
    with pytest.raises(FederationError, match="E-STATE-23"):
        silo_cli.backup(tmp_path / "second", home=joined.path, as_json=True)


def test_a_home_that_is_none_is_not_backed_up(tmp_path: Path) -> None:
    for command in (coordinator_cli.backup, silo_cli.backup):
        with pytest.raises(FederationError, match="E-STATE-44"):
            command(tmp_path / "backup", home=tmp_path / "home")


def test_a_backup_that_fails_leaves_its_folder_empty_so_that_the_command_can_be_repeated(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "backup"
    with monkeypatch.context() as patch:
        patch.setattr("service_core.storage.backup._copy", full)
        with pytest.raises(UnavailableError, match="E-STATE-63"):
            took(home, target)
    assert not list(target.iterdir())
    assert (took(home, target) / CONTENTS).exists()
