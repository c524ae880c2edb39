"""A silo that is killed: each transition survives a crash at every write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection

from service_core.storage import digests
from silo.storage.store import SiloStore
from tests.support.hospital import B, key, opened, stage, value


class Snapshots:
    """Copies the home at every moment at which something reaches the disk: what a kill at that moment leaves."""

    def __init__(self, home: Path, into: Path, store: SiloStore, patch: pytest.MonkeyPatch) -> None:
        self.home, self.into, self.taken = home, into, []
        fsync, replace = os.fsync, Path.replace
        patch.setattr(os, "fsync", lambda fd: (self.take("before fsync"), fsync(fd), self.take("after fsync")))
        patch.setattr(
            Path, "replace", lambda a, b: (self.take("before rename"), replace(a, b), self.take("renamed"))[1]
        )
        write = store.database.write

        @contextmanager
        def watched() -> Iterator[Connection]:
            with write() as db:
                yield db
                self.take("before commit")

        patch.setattr(store.database, "write", watched)

    def take(self, what: str) -> None:
        target = self.into / f"{len(self.taken)}"
        shutil.copytree(self.home, target)
        self.taken.append(what)

    def homes(self):
        self.take("at the end")
        return [(what, self.into / str(n)) for n, what in enumerate(self.taken)]


def crash_points(tmp_path, patch, prepare, step):
    """Run `step` after `prepare` and give the home as a kill at each write would leave it."""
    outbox = opened(tmp_path / "home")
    prepare(outbox)
    with patch.context() as inner:
        snapshots = Snapshots(tmp_path / "home", tmp_path / "copies", outbox.store, inner)
        step(outbox)
        homes = snapshots.homes()
    outbox.store.close_database()
    return homes


def test_a_crash_while_staging_loses_the_update_whole_or_not_at_all(tmp_path, monkeypatch):
    homes = crash_points(tmp_path, monkeypatch, lambda o: None, stage)
    found = []
    for what, home in homes:
        again = opened(home)
        entry = again.find(key(), B)
        found.append(entry is not None)
        if entry is not None:
            assert digests.file_digest(again.bundle(entry)) == entry.object_digest, what
        again.sweep()
        assert {p.name for p in (home / "objects").iterdir()} == again.store.referenced(), what
        assert stage(again).object_digest, what  # and the work can be done again
        assert again.store.close(key(), included=True)
        assert value(again) == 1.0
    assert len(homes) > 8
    assert found == sorted(found)
    assert found[-1]
    assert not found[0]


def test_a_crash_while_committing_leaves_the_old_state_or_the_new_one(tmp_path, monkeypatch):
    def prepare(outbox):
        stage(outbox, 0, 1.0)
        outbox.store.close(key(0), included=True)
        stage(outbox, 1, 2.0)

    homes = crash_points(tmp_path, monkeypatch, prepare, lambda o: o.store.close(key(1), included=True))
    for what, home in homes:
        again = opened(home)
        assert (value(again), again.find(key(1), B) is None) in [(1.0, False), (2.0, True)], what
        again.store.close(key(1), included=True)  # the coordinator names the round again in the next session
        assert value(again) == 2.0, what
    assert value(opened(homes[0][1])) == 2.0


def test_a_crash_while_discarding_never_commits(tmp_path, monkeypatch):
    def prepare(outbox):
        stage(outbox, 0, 1.0)
        outbox.store.close(key(0), included=True)
        stage(outbox, 1, 2.0)

    for what, home in crash_points(tmp_path, monkeypatch, prepare, lambda o: o.store.close(key(1), included=False)):
        again = opened(home)
        assert value(again) == 1.0, what
        again.store.close(key(1), included=False)
        assert value(again) == 1.0, what
        assert again.store.outbox() == []


def test_a_crash_while_keeping_a_receipt_leaves_the_entry_in_the_outbox(tmp_path, monkeypatch):
    homes = crash_points(tmp_path, monkeypatch, stage, lambda o: o.store.deliver(key(), b"receipt"))
    for what, home in homes:
        entry = opened(home).find(key(), B)
        assert entry is not None, what
        assert entry.receipt in (None, b"receipt"), what
