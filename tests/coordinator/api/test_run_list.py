"""`Lead.Runs`: pages of runs, newest first; what one says of a run is what is said of it alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event

from coordinator.api import messages
from coordinator.lead.client import LeadClient
from coordinator.storage.store import FILE, CoordinatorStore
from protos.consilium.v1 import federation_pb2 as pb
from tests.support.coordinator import World
from tests.support.older_homes import older_file

COPIES = 120


def fill(home: Path, copies: int = COPIES) -> None:
    """Copy the two runs of a real home, several at one time: one masked, one with noisy evaluations."""
    for file in home.glob(f"{FILE}*"):
        file.unlink()
    older_file("last", "coordinator", home / FILE)
    CoordinatorStore(home).close()
    with closing(sqlite3.connect(home / FILE)) as db, db:
        for table, id in (("runs", "id"), ("rounds", "run_id")):
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            values = {
                id: f"{id} || '-' || n.value",
                "request_id": "request_id || '-' || n.value",
                "created": "created + n.value / 3",
            }
            columns = ", ".join(values.get(name, name) for name in names)
            db.execute(
                f"INSERT INTO {table} SELECT {columns} FROM {table}, "  # names of our own schema
                f"(WITH RECURSIVE c(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM c WHERE value < {copies}) "
                "SELECT value FROM c) n"
            )
        db.execute("INSERT INTO steering SELECT id, 0, 0, '[\"h1\"]', 0, 0, '{}' FROM runs WHERE name = 'masked'")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World.create(tmp_path / "home", ["north"])
    yield made
    made.stop()


def test_what_a_list_says_of_a_run_is_what_is_said_of_it_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    fill(tmp_path, 5)
    with closing(CoordinatorStore(tmp_path)) as store:
        runs = store.runs.all()
        listed = messages.run_infos(runs, store)
        assert listed == [messages.run_info(run, store) for run in runs]
        private = [info for info in listed if info.name == "private"]
        masked = [info for info in listed if info.name == "masked"]
        assert len(private) == len(masked) == 6
        assert all(info.HasField("accuracy_estimate") for info in private)
        assert all(list(info.excluded) == ["h1"] and info.balanced_accuracy.point > 0.5 for info in masked)


def test_many_runs_take_as_many_statements_as_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    fill(tmp_path)
    counted: list[int] = []
    with closing(CoordinatorStore(tmp_path)) as store:
        statements = []
        event.listen(store.database._engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        for size in (2, 200):
            statements.clear()
            messages.run_infos(store.runs.page("", size), store)
            counted.append(len(statements))
        plan = " ".join(
            str(row)
            for row in sqlite3.connect(tmp_path / FILE).execute(
                "EXPLAIN QUERY PLAN SELECT id FROM runs ORDER BY created DESC, id LIMIT 50"
            )
        )
    assert counted[0] == counted[1]
    assert "runs_newest_first" in plan
    assert "TEMP B-TREE" not in plan


def test_pages_hold_every_run_once_newest_first_and_a_lead_without_pages_gets_all(world: World) -> None:
    fill_members(world)
    world.start()
    stub = world.lead()
    whole = [info.run_id for info in stub.Runs(pb.RunsRequest(), timeout=60).runs]
    assert len(whole) == len(set(whole)) == 2 * (COPIES + 1)
    paged: list[str] = []
    token, pages = "", 0
    while pages == 0 or token:
        page = stub.Runs(pb.RunsRequest(page_size=50, page_token=token), timeout=60)
        assert len(page.runs) <= 50
        paged += [info.run_id for info in page.runs]
        token, pages = page.next_page_token, pages + 1
    assert (paged, pages) == (whole, 5)
    with closing(LeadClient.open(world.home)) as client:
        assert [info.run_id for info in client.runs()] == whole


def fill_members(world: World) -> None:
    """Give the world's own database the runs, so that its lead stays listed."""
    copy = world.home.parent / "runs"
    copy.mkdir(mode=0o700)
    fill(copy)
    with closing(sqlite3.connect(world.home / FILE)) as db, db:
        db.execute("ATTACH ? AS other", (str(copy / FILE),))
        for table in ("runs", "rounds"):
            db.execute(f"INSERT INTO main.{table} SELECT * FROM other.{table}")  # our own names
