"""A database that is missing, empty, older or another's is noticed before anything is deleted or answered."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.cli import operations
from coordinator.storage.store import FILE, OBJECTS, CoordinatorStore
from fl_core.errors import StateError, UnavailableError
from service_core.storage.object_store import ObjectStore, count_objects
from tests.support.coordinator import World, running
from tests.support.federations import NAMES, manifest

DUMP = Path(__file__).resolve().parents[2] / "data" / "coordinator_v8.sql"
GENERATION = f"{FILE}.generation"


def work(home: Path, times: int = 3, begin: int = 0) -> None:
    with closing(CoordinatorStore(home)) as store:
        for number in range(begin, begin + times):
            store.attestations.keep_policy("north", f"{number:064x}")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with an older copy of its database beside it, and an object."""
    place = tmp_path / "home"
    work(place)
    shutil.copy(place / FILE, tmp_path / "older")
    work(place, begin=3)
    ObjectStore(place / OBJECTS, sharded=True).put(b"a model")
    work(tmp_path / "another")
    return place


def log_lost(home: Path) -> None:
    """Change something with the log kept by a reader, and lose the log as a cut of the power might."""
    with closing(CoordinatorStore(home)) as store, closing(sqlite3.connect(home / FILE)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM policies").fetchall()
        store.attestations.keep_policy("north", "f" * 64)
        shutil.copytree(home, home.with_name("copy"))
    shutil.rmtree(home)
    home.with_name("copy").rename(home)
    (home / f"{FILE}-wal").unlink()
    (home / f"{FILE}-shm").unlink(missing_ok=True)


def newer_log(home: Path) -> None:
    """Put an older file beside the newest log."""
    with closing(CoordinatorStore(home)) as store:
        store.attestations.keep_policy("north", "f" * 64)
        shutil.copytree(home, home.with_name("copy"))
    shutil.rmtree(home)
    home.with_name("copy").rename(home)
    assert (home / f"{FILE}-wal").stat().st_size
    shutil.copy(home.with_name("older"), home / FILE)


LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda home: (home / FILE).unlink(), "missing or empty, but .* records its generation 7"),
    "missing with its count": (
        lambda home: [(home / name).unlink() for name in (FILE, GENERATION)],
        "missing or empty, but its home has 1 stored files",
    ),
    "empty": (lambda home: (home / FILE).write_bytes(b""), "missing or empty"),
    "older": (lambda home: shutil.copy(home.with_name("older"), home / FILE), "lacks the last 3 changes"),
    "another home's": (
        lambda home: shutil.copy(home.with_name("another") / FILE, home / FILE),
        "belongs to another home",
    ),
    "without its count": (lambda home: (home / GENERATION).unlink(), "but there is no"),
    "with a damaged count": (lambda home: (home / GENERATION).write_bytes(b"{}"), "generation is damaged"),
    "without its log": (log_lost, "lacks the last 1 changes"),
    "older beside a newer log": (newer_log, "lacks the last 4 changes"),
}


@pytest.mark.fault(
    "a disk or an operator",
    "loses the coordinator's database or log, or restores an older or a foreign one",
    "nothing is deleted and no call is answered: E-STATE-23",
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_database_that_is_behind_is_noticed_before_anything_is_deleted(home: Path, loss: str) -> None:
    lose, said = LOSSES[loss]
    lose(home)
    before = (home / FILE).read_bytes() if (home / FILE).exists() else None
    with pytest.raises(StateError, match=f"E-STATE-23.*{said}.*--accept-loss"):
        CoordinatorStore(home)
    assert count_objects(home / OBJECTS) == 1
    assert before == ((home / FILE).read_bytes() if (home / FILE).exists() else None)
    operations.restore(accept_loss=True, home=home, as_json=True)
    work(home, begin=9)


def test_the_service_does_not_start_on_a_database_that_is_behind(tmp_path: Path) -> None:
    world = World.create(tmp_path / "home", NAMES)
    with closing(CoordinatorStore(world.home)) as store:
        state = ObjectStore(world.home / OBJECTS, sharded=True).put(b"a model")
        before = store.database.incarnation
    (world.home / FILE).unlink()
    with pytest.raises(StateError, match="E-STATE-23"):
        world.start()
    assert ObjectStore(world.home / OBJECTS, sharded=True).holds(state)
    operations.restore(accept_loss=True, home=world.home, as_json=True)
    with closing(CoordinatorStore(world.home)) as store:
        assert store.database.incarnation != before


def test_a_crash_between_a_change_and_its_count_is_no_loss(tmp_path: Path) -> None:
    work(tmp_path)
    before = (tmp_path / GENERATION).read_bytes()
    work(tmp_path, begin=3)
    (tmp_path / GENERATION).write_bytes(before)
    work(tmp_path, begin=6)
    (tmp_path / GENERATION).write_bytes(before)
    work(tmp_path, begin=9)


def test_the_file_itself_has_what_was_said_when_a_round_is_closed(tmp_path: Path) -> None:
    with running(tmp_path / "home", NAMES) as world:
        run = world.submit(manifest(rounds=1))
        world.server.store.database.checkpoint()
        shutil.copy(world.home / FILE, tmp_path / "alone")
        with closing(sqlite3.connect(tmp_path / "alone")) as db:
            assert db.execute("SELECT id FROM runs").fetchall() == [(run.id,)]


@pytest.mark.fault("a disk", "damages a row of the coordinator's database", "E-STATE-22 names the file")
@pytest.mark.parametrize("damage", ["members = 'no JSON'", "state = 'no state'", "members = '7'", "members = x'ff'"])
def test_a_damaged_row_is_said_as_such(tmp_path: Path, damage: str) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.executescript(DUMP.read_text() + f"UPDATE runs SET {damage}")
    with (
        closing(CoordinatorStore(tmp_path)) as store,
        pytest.raises(StateError, match=r"E-STATE-22.*damaged.*from a backup"),
    ):
        store.runs.all()


@pytest.mark.fault(
    "a disk", "is full or read-only", "E-STATE-63 names the disk and what to free; the write is tried again"
)
@pytest.mark.parametrize(
    ("pragma", "said"),
    [
        ("max_page_count = 1", "is full.*free some space"),
        ("query_only = 1", "cannot write in.*READONLY.*read-only"),
    ],
)
def test_a_full_or_read_only_disk_is_said_as_such(tmp_path: Path, pragma: str, said: str) -> None:
    with closing(CoordinatorStore(tmp_path)) as store:
        with store.database.read() as db:
            db.exec_driver_sql(f"PRAGMA {pragma}")
        with pytest.raises(UnavailableError, match=f"E-STATE-63.*{said}"):
            store.attestations.keep_policy("north" * 100_000, "0" * 64)
        assert store.runs.all() == []
