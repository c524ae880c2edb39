"""A database that 0.1.0 wrote opens and says what it said; one that cannot be opened is left as it is.

tests/data/coordinator_v8.sql is from real runs of two hospitals: three finished, one in its first round with one update
there, one that no hospital has approved. Receipts and sealed figures are cut short; clinical metrics and one cut update
were written in by hand, and the count of its changes begins at one, as beside no file of generations.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.pki.authority import Authority
from coordinator.storage import store as stores
from coordinator.storage.records import RunState, Steering
from coordinator.storage.store import FILE, CoordinatorStore
from fl_core.errors import StateError
from service_core.pki.identity import identity_of
from tests.support.older_homes import AGES, older_file

DUMP = Path(__file__).resolve().parents[2] / "data" / "coordinator_v8.sql"
NOW = 1795581400.0
PLAIN, PERSONAL, PRIVATE, WAITS, ASKS = "plain-b6c1", "personal-4bc4", "private-1534", "waits-9e36", "asks-ca29"
BOTH = ("hospital0", "hospital1")


def written(home: Path, change: str = "") -> Path:
    with closing(sqlite3.connect(home / FILE)) as db:
        db.executescript(DUMP.read_text() + change)
    return home


def columns(home: Path) -> list[tuple[object, ...]]:
    every = "SELECT m.name, p.name, p.type, p.pk FROM sqlite_master m, pragma_table_info(m.name) p ORDER BY 1, 2"
    with closing(CoordinatorStore(home)) as store, store.database.read() as db:
        return [tuple(row) for row in db.exec_driver_sql(every)]


def test_members_runs_and_rounds_are_there(tmp_path: Path) -> None:
    with closing(CoordinatorStore(written(tmp_path), lambda: NOW)) as store:
        assert [(s.name, s.revoked, s.data.name) for s in store.members.silos()] == [(n, False, "digits") for n in BOTH]
        serial = store.members.silos()[1].certificate.serial
        assert store.members.membership_status("hospital1", serial).member
        assert [lead.name for lead in store.members.leads.all()] == ["lead"]
        assert [i.name for i in store.members.invitations()] == ["hospital2"]
        version, signed = store.members.roster() or (0, None)
        assert (version, store.members.version()) == (2, 2)
        assert signed is not None
        assert b'"consortium":"test"' in signed.document
        assert {(r.id, r.state, r.closed) for r in store.runs.all()} == {
            (PLAIN, RunState.FINISHED, 2),
            (PERSONAL, RunState.FINISHED, 1),
            (PRIVATE, RunState.FINISHED, 2),
            (WAITS, RunState.RUNNING, 0),
            (ASKS, RunState.RUNNING, 0),
        }
        run = store.runs.get(PLAIN)
        assert (run.model_digest[:16], run.best_accuracy) == ("16aa1745e92221ab", 0.5459610027855153)
        assert (run.bytes_up, run.members) == (691088, BOTH)
        first, second, last = store.runs.rounds(PLAIN)
        assert [(r.round, r.record.kind.value, r.record.included) for r in (first, second, last)] == [
            (0, "train", BOTH),
            (1, "train", BOTH),
            (2, "evaluate", BOTH),
        ]
        assert (first.record.cut, first.record.cut_rows, first.record.unbounded) == ({}, 0, True)
        assert (second.record.cut, second.record.cut_rows) == ({"hospital1": "update cut to 2x the median"}, 3)
        assert first.record.clinical is None
        assert last.record.clinical is not None
        assert last.record.clinical.confusion[0][0] == 7
        assert store.runs.rounds(PERSONAL)[0].record.personal["pa"] == 0.9165270030498505
        assert [e.number for e in store.runs.events(PLAIN, 0)] == list(range(1, 30))
        row = store.runs.round(WAITS, 0)
        assert row is not None
        assert row.is_open
        assert store.contributions.readable(row.base_digest, "hospital0") in (WAITS, ASKS)  # both begin with it
        assert len(store.contributions.referenced_digests()) == 10
        found = store.attestations.newest("hospital1")
        assert found is not None
        assert (found.ledger_seq, len(found.ledger_sealed)) == (20, 32)
        assert store.attestations.policies()["hospital1"].startswith("ff09b028")


def test_attestations_move_into_their_updates_and_the_newest_keep_what_is_sealed(tmp_path: Path) -> None:
    written(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        before = {row[0]: row[1:4] for row in db.execute("SELECT id, policy, seq, head FROM attestations")}
        assert len(before) == 17
    with closing(CoordinatorStore(tmp_path, lambda: NOW)) as store:
        for name, row in before.items():
            kept = store.attestations.of(name)
            assert kept is not None
            assert (kept.policy_digest, kept.ledger_seq, kept.ledger_head) == row
        with store.database.read() as db:
            sealed = db.exec_driver_sql("SELECT silo, seq, received FROM contributions WHERE sealed IS NOT NULL").all()
        assert sorted((row.silo, row.seq) for row in sealed) == [("hospital0", 21), ("hospital1", 20)]


def test_every_number_of_a_closed_round_is_kept_to_its_last_bit(tmp_path: Path) -> None:
    """What version 8 had in columns and three tables beside them is read off the dump by itself."""
    tables = "LEFT JOIN scores USING (run_id, round) LEFT JOIN judgements USING (run_id, round)"
    query = f"SELECT * FROM rounds {tables} LEFT JOIN clinical USING (run_id, round) WHERE is_open = 0"
    infinite = f"""UPDATE judgements SET medians = '{{"delta": Infinity}}' WHERE run_id = '{PLAIN}' AND round = 1"""
    with closing(sqlite3.connect(written(tmp_path, infinite) / FILE)) as db:
        db.row_factory = sqlite3.Row
        before = {(row["run_id"], row["round"]): dict(row) for row in db.execute(query)}
    assert len(before) > 5
    with closing(CoordinatorStore(tmp_path, lambda: NOW)) as store:
        for (run, number), old in before.items():
            row = store.runs.round(run, number)
            assert row is not None
            assert (row.opened, row.closed, row.base_size) == (old["opened"], old["closed"], old["base_size"])
            kept = json.loads(json.dumps(row.record.to_dict()))
            for name in ("correct", "examples", "included", "missing", "personal", "cut", "medians"):
                assert kept[name] == json.loads(old[name] or "{}"), name
            assert (kept["clipped"], kept["cut_rows"]) == (old["clipped"], old["cut_rows"] or 0)
            assert (kept["unbounded"], kept["kind"]) == (bool(old["unbounded"]), old["kind"])
            clinical = json.loads(old["metrics"] or "null")
            assert kept["clinical"] == (clinical and clinical | {"labels": []}), "which no run of version 8 had"


@pytest.mark.parametrize("age", AGES)
def test_a_home_of_any_0_1_0_opens_with_members_runs_and_rounds(tmp_path: Path, age: str) -> None:
    older_file(age, "coordinator", tmp_path / FILE)
    first, silos = ("plain", 2) if age == "first" else ("masked", 3)
    for _ in range(2):
        with closing(CoordinatorStore(tmp_path)) as store:
            members = store.members.silos()
            assert [(s.name, s.revoked, s.data.name) for s in members] == [
                (f"h{k}", False, "digits") for k in range(silos)
            ]
            assert all(store.members.membership_status(s.name, s.certificate.serial).member for s in members)
            runs = {run.name: run for run in store.runs.all()}
            assert {name: (run.state, run.closed) for name, run in runs.items()} == dict.fromkeys(
                (first, "private"), (RunState.FINISHED, 2)
            )
            closed = store.runs.rounds(runs[first].id)
            assert [(r.round, r.record.kind.value, len(r.record.included)) for r in closed] == [
                (0, "train", silos),
                (1, "train", silos),
                (2, "evaluate", silos),
            ]
            assert sum(closed[-1].record.correct) > 0
            stated = store.attestations.newest("h0")
            assert stated is not None
            assert stated.ledger_seq == 20


@pytest.mark.parametrize("age", AGES)
def test_a_home_of_any_0_1_0_gets_the_tables_of_a_new_one(tmp_path: Path, age: str) -> None:
    (tmp_path / "new").mkdir()
    older_file(age, "coordinator", tmp_path / FILE)
    assert columns(tmp_path) == columns(tmp_path / "new")


def test_a_lead_from_before_the_list_of_leads_keeps_working(tmp_path: Path) -> None:
    ca = Authority.create(tmp_path, "test", ["127.0.0.1:8443"])
    elsewhere = identity_of(ca.make_lead("elsewhere").cert_pem)  # whose file is on a lead's own machine
    older_file("first", "coordinator", tmp_path / FILE)
    with closing(CoordinatorStore(tmp_path)) as store:
        assert store.members.leads.status(elsewhere).member
        again = identity_of(ca.make_lead("elsewhere").cert_pem)
        assert not store.members.leads.status(again).member  # a second one under that name
    with closing(CoordinatorStore(tmp_path)) as store:
        assert [lead.name for lead in store.members.leads.all()] == ["elsewhere"]


def test_a_crash_while_it_is_migrated_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(db: sqlite3.Connection) -> None:
        db.execute("DROP TABLE silos")
        raise KeyboardInterrupt

    before = older_file("first", "coordinator", tmp_path / FILE).read_bytes()
    monkeypatch.setattr(stores, "MIGRATIONS", (*stores.MIGRATIONS[:-1], killed))
    with pytest.raises(KeyboardInterrupt):
        CoordinatorStore(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / FILE).read_bytes() == before
    with closing(CoordinatorStore(tmp_path)) as store:
        assert len(store.members.silos()) == 2


def test_a_run_under_way_goes_on(tmp_path: Path) -> None:
    with closing(CoordinatorStore(written(tmp_path), lambda: NOW)) as store:
        store.runs.end(WAITS, RunState.PAUSED, "too few")
        store.steering.exclude(WAITS, "hospital1", readmit=False)
        assert store.runs.resume(WAITS, quorum=1).state is RunState.WAITING
        store.steering.extend(WAITS, 0, 60.0)
        store.runs.event(WAITS, "opened")
        assert [e.number for e in store.runs.events(WAITS, 10)] == [11, 12, 13]
    with closing(CoordinatorStore(tmp_path, lambda: NOW)) as store:
        assert store.steering.of(WAITS) == Steering(WAITS, 1, 1, ("hospital1",), 0, 60.0)


def test_it_has_the_tables_of_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert columns(written(tmp_path)) == columns(tmp_path / "new")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("PRAGMA user_version = 99", "has version 99.*use the newer version"),
        ("DROP TABLE silos", ".version 8. is not a database.*: restore the database from a backup"),
    ],
)
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, made: str, said: str) -> None:
    before = (written(tmp_path, made) / FILE).read_bytes()
    with pytest.raises(StateError, match=f"E-STATE-22.*{said}"):
        CoordinatorStore(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("age", AGES)
def test_receipts_which_are_signed_again_when_asked_for_leave_the_rows_of_updates(tmp_path: Path, age: str) -> None:
    older_file(age, "coordinator", tmp_path / FILE)
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        before = db.execute("SELECT id, received FROM contributions ORDER BY id").fetchall()
    with closing(CoordinatorStore(tmp_path)) as store:
        for id, received in before:
            contribution = store.contributions.contribution(id)
            assert contribution is not None
            assert contribution.received == received is not None
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(contributions)")]
        assert "receipt" not in columns
        sizes = [sum(len(str(value)) for value in row) for row in db.execute("SELECT * FROM contributions")]
    assert max(sizes) < 500
