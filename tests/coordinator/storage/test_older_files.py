"""Databases of earlier versions open and say what they said; what cannot be opened is left as it is.

tests/data/coordinator_v1.sql is what version 1 held after real runs of two hospitals, one finished, one aborted and one
in its first round with one update there; receipts and sealed figures are cut short. coordinator_v2.sql and _v4.sql are
the same file as versions 2 and 4 left it, _v5.sql to _v7.sql as versions 5 to 7 did.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from coordinator.storage import store as stores
from coordinator.storage.records import RunState, Steering
from coordinator.storage.schema import MIGRATIONS
from coordinator.storage.store import FILE, Store
from fl_core.errors import StateError
from protos.consilium.v1 import federation_pb2 as pb

DATA = Path(__file__).resolve().parents[2] / "data"
DUMP = DATA / "coordinator_v1.sql"
NOW = 1795461400.0
FINISHED, ABORTED, RUNNING = "fedavg-digits-efab", "asks-dfe5", "waits-d1ea"
BEFORE_SEALED = "ALTER TABLE attestations DROP COLUMN sealed; ALTER TABLE attestations DROP COLUMN restored;"
BEFORE_ATTESTATIONS = "DROP TABLE attestations; DROP TABLE policies; DROP TABLE scores;"


def older(home: Path, change: str = "", dump: Path = DUMP) -> Path:
    with closing(sqlite3.connect(home / FILE)) as db:
        db.executescript(dump.read_text() + change)
    return home


@contextmanager
def opened(home: Path) -> Iterator[Store]:
    with closing(Store(home, lambda: NOW)) as store:
        yield store


@pytest.mark.parametrize(
    ("change", "dump"),
    [
        ("", DUMP),
        (BEFORE_SEALED, DUMP),
        (BEFORE_ATTESTATIONS, DUMP),
        *(("", DATA / f"coordinator_v{n}.sql") for n in (2, 4, 5, 6, 7)),
    ],
)
def test_members_runs_and_rounds_of_a_file_of_any_version_are_there(tmp_path: Path, change: str, dump: Path) -> None:
    older(tmp_path, change, dump)
    for _ in range(2):
        with opened(tmp_path) as store:
            assert [(s.name, s.revoked, s.data.name) for s in store.members.silos()] == [
                ("hospital0", False, "digits"),
                ("hospital1", False, "digits"),
            ]
            serial = store.members.silos()[1].certificate.serial
            assert store.members.membership_status("hospital1", serial).member
            assert [i.name for i in store.members.invitations()] == ["hospital2"]
            version, signed = store.members.roster() or (0, None)
            assert (version, store.members.version()) == (2, 2)
            assert signed is not None
            assert b'"consortium":"test"' in signed.document
            assert [(r.id, r.state, r.closed) for r in store.runs.all()] == [
                (RUNNING, RunState.RUNNING, 0),
                (ABORTED, RunState.ABORTED, 0),
                (FINISHED, RunState.FINISHED, 2),
            ]
            run = store.runs.get(FINISHED)
            assert run.model_digest.startswith("34f81820bf9598f2")
            assert (run.best_accuracy, run.bytes_up, run.members) == (
                0.6351305701298646,
                621664,
                ("hospital0", "hospital1"),
            )
            closed = store.runs.rounds(FINISHED)
            assert [(r.round, r.kind.value, r.included) for r in closed] == [
                (0, "train", run.members),
                (1, "train", run.members),
                (2, "evaluate", run.members),
            ]
            assert [e.number for e in store.runs.events(FINISHED, 0)] == list(range(1, 24))
            row = store.runs.round(RUNNING, 0)
            assert row is not None
            assert row.is_open
            assert store.contributions.readable(row.base_digest, "hospital0") == RUNNING
            assert len(store.contributions.referenced_digests()) == 7


def test_what_hospitals_stated_is_there(tmp_path: Path) -> None:
    with opened(older(tmp_path)) as store:
        found = store.attestations.newest("hospital1")
        assert found is not None
        assert (found.ledger_seq, len(found.ledger_sealed)) == (21, 32)
        assert store.attestations.policies()["hospital1"].startswith("ff09b028")
    (tmp_path / "sealed").mkdir()
    with opened(older(tmp_path / "sealed", BEFORE_SEALED)) as store:
        assert store.attestations.newest("hospital1") == pb.Attestation(
            policy_digest=found.policy_digest, ledger_seq=21, ledger_head=found.ledger_head
        )


def test_a_run_of_an_older_file_goes_on(tmp_path: Path) -> None:
    with opened(older(tmp_path, BEFORE_ATTESTATIONS)) as store:
        store.runs.end(RUNNING, RunState.FAILED, "too few", [RunState.RUNNING])
        assert store.runs.resume(RUNNING).state is RunState.WAITING
        store.runs.event(RUNNING, "opened")
        assert [e.number for e in store.runs.events(RUNNING, 4)] == [5, 6, 7]
        assert store.attestations.newest("hospital1") is None
        store.attestations.keep_policy("hospital1", "d" * 64)
        assert store.attestations.policies()["hospital1"] == "d" * 64


def test_a_migrated_file_has_the_tables_of_a_new_one(tmp_path: Path) -> None:
    def columns(home: Path) -> list[tuple[object, ...]]:
        with opened(home) as store, store.database.read() as db:
            every = (
                "SELECT m.name, p.name, p.type, p.pk FROM sqlite_master m, pragma_table_info(m.name) p ORDER BY 1, 2"
            )
            return [tuple(row) for row in db.exec_driver_sql(every)]

    (tmp_path / "new").mkdir()
    assert columns(older(tmp_path, BEFORE_ATTESTATIONS)) == columns(tmp_path / "new")


def test_a_crash_while_it_is_migrated_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(db: sqlite3.Connection) -> None:
        db.execute("DROP TABLE silos")
        raise KeyboardInterrupt

    before = (older(tmp_path) / FILE).read_bytes()
    monkeypatch.setattr(stores, "MIGRATIONS", (killed,))
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / FILE).read_bytes() == before
    with opened(tmp_path) as store:
        assert len(store.members.silos()) == 2


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("PRAGMA user_version = 99", f"of version {len(MIGRATIONS) + 1} or older, found version 99.*use that one"),
        ("DROP TABLE silos", "found another file .version 1.: restore the one that was there from a backup"),
    ],
)
def test_a_newer_file_or_another_one_is_refused_with_what_to_do(tmp_path: Path, made: str, said: str) -> None:
    before = (older(tmp_path, made) / FILE).read_bytes()
    with pytest.raises(StateError, match=f"E-STATE-22.*{said}"):
        Store(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_run_of_an_older_file_can_be_steered(tmp_path: Path) -> None:
    with opened(older(tmp_path, dump=DATA / "coordinator_v4.sql")) as store:
        assert store.steering.of(RUNNING) == Steering(RUNNING)
        store.runs.end(RUNNING, RunState.PAUSED, "too few", [RunState.RUNNING])
        store.steering.exclude(RUNNING, "hospital1", readmit=False)
        store.runs.resume(RUNNING, quorum=1)
        store.steering.extend(RUNNING, 0, 60.0)
        store.steering.extend(RUNNING, 0, 60.0)
    with opened(tmp_path) as store:
        assert store.steering.of(RUNNING) == Steering(RUNNING, 1, 1, ("hospital1",), 0, 120.0)


def test_a_round_that_an_older_version_judged_has_its_cuts_and_counts_no_rows(tmp_path: Path) -> None:
    cut = '{"hospital1": "update cut to 2x the median"}'
    judged = f"INSERT INTO judgements VALUES ('{FINISHED}', 1, '{cut}', '{{}}');"
    with opened(older(tmp_path, judged, DATA / "coordinator_v7.sql")) as store:
        row = store.runs.rounds(FINISHED)[1]
        assert row.cut == {"hospital1": "update cut to 2x the median"}
        assert (row.cut_rows, row.unbounded) == (0, False)
