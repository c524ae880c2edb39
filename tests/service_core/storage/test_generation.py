"""A home that SQLite finds whole is opened whatever a checkpoint left half done, and one that is behind or damaged not.

A checkpoint writes the pages of the log into the file one after the other. So it is known what files a kill can leave:
the pages up to some place are new, the others old, and of one page perhaps half.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, LargeBinary, MetaData, Table, func, insert, select, text

import coordinator.storage.store as coordinators
from fl_core.errors import StateError, UnavailableError
from service_core.operations import checks
from service_core.operations.checks import FindingLevel
from service_core.storage.generation import incarnation_table
from service_core.storage.sqlite import LOG_BYTES, Database
from silo.storage import store as silos

PAGE = 4096
metadata = MetaData()
incarnation_table(metadata)
stored = Table("stored", metadata, Column("id", Integer, primary_key=True), Column("value", LargeBinary, index=True))


def opened(path: Path) -> Database:
    return Database(path, metadata, ())


def fill(database: Database, rows: int = 30, size: int = 400) -> None:
    """Change all rows that there are and add some, in one transaction: pages everywhere differ."""
    with database.write() as db:
        db.execute(text("UPDATE stored SET value = randomblob(length(value))"))
        db.execute(insert(stored), [{"value": bytes([k]) * size} for k in range(rows)])


def rows(database: Database) -> int:
    with database.read() as db:
        return db.scalar(select(func.count()).select_from(stored)) or 0


def files(database: Path) -> list[Path]:
    return [database.with_name(f"{database.name}{end}") for end in ("", "-wal", ".generation")]


def copied(database: Path, into: Path) -> Path:
    """Copy a database with its log and its count into a new folder."""
    into.mkdir()
    for file in files(database):
        if file.exists():
            shutil.copy(file, into / file.name)
    return into / database.name


def half_done(before: bytes, after: bytes, torn: bool) -> Iterator[bytes]:
    """Yield the file as it is before each page that a checkpoint changes; torn: with half of that page."""
    done = bytearray(before)
    for at in range(0, len(after), PAGE):
        if (new := after[at : at + PAGE]) != before[at : at + PAGE]:
            if torn:
                yield bytes(done[:at]) + new[: PAGE // 2] + bytes(done[at + PAGE // 2 :])
            else:
                yield bytes(done)
            done[at : at + PAGE] = new


def interrupted(database: Database, folder: Path, torn: bool) -> Iterator[Path]:
    """Copy a database as it is at each moment of a checkpoint, one folder after the other."""
    place = copied(database.path, folder / "begun")
    database.checkpoint()
    for number, content in enumerate(half_done(place.read_bytes(), database.path.read_bytes(), torn)):
        found = copied(place, folder / f"{number}")
        found.write_bytes(content)
        yield found


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Database]:
    """A database with a log that is in no checkpoint yet; its file has grown since the last one."""
    with closing(opened(tmp_path / "db")) as database:
        fill(database)
        database.checkpoint()
        fill(database)
        fill(database)
        yield database


@pytest.mark.fault(
    "a power cut", "comes at any moment of a checkpoint, even within a page", "the home opens with all data"
)
@pytest.mark.parametrize("torn", [False, True])
def test_a_home_opens_with_all_that_was_written_wherever_a_checkpoint_was_interrupted(
    made: Database, tmp_path: Path, torn: bool
) -> None:
    number = 0
    for place in interrupted(made, tmp_path, torn):
        number += 1
        assert [f.level for f in checks.database(place, list)] == [FindingLevel.OK]
        with closing(opened(place)) as again:
            assert rows(again) == 90
            if number % 8 == 1:  # and it goes on
                fill(again)
                assert rows(again) == 120
    assert number > 20


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("side", ["coordinator", "silo"])
def test_both_services_homes_open_wherever_a_checkpoint_was_interrupted(tmp_path: Path, side: str, torn: bool) -> None:
    home, at = tmp_path / "home", tmp_path / "at"
    home.mkdir()
    at.mkdir()

    @contextmanager
    def service(home: Path) -> Iterator[Database]:
        if side == "coordinator":
            with closing(coordinators.CoordinatorStore(home)) as store:
                yield store.database
        else:
            place = silos.SiloStore(home / "silo.db")
            yield place.database
            place.close_database()

    def note(database: Database) -> None:
        with database.write() as db:
            db.execute(text("CREATE TABLE more (x)"))  # the first page changes as well
            db.execute(text("INSERT INTO more SELECT randomblob(2000) FROM (VALUES (1), (2), (3), (4), (5), (6))"))

    with service(home) as database:
        note(database)
        places = list(interrupted(database, at, torn))
    assert len(places) > 5
    for place in places:
        with service(place.parent) as again, again.read() as db:
            assert db.scalar(text("SELECT count(*) FROM more")) == 6


def test_a_command_opens_the_home_in_the_middle_of_a_services_checkpoint(made: Database, tmp_path: Path) -> None:
    """The log is open in another process, and the file half done: what `invite` or `backup` meets."""
    for place in list(interrupted(made, tmp_path, torn=False))[5::7]:
        reader = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('BEGIN'); "
        reader += "print(db.execute('SELECT count(*) FROM stored').fetchone()[0], flush=True); sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", reader, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as service:
            assert service.stdout is not None
            assert service.stdout.readline() == "90\n"
            with closing(opened(place)) as command:
                assert rows(command) == 90


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: -5 * PAGE])


def first_page_overwritten(file: Path) -> None:
    file.write_bytes(b"\0" * PAGE + file.read_bytes()[PAGE:])


@pytest.mark.fault("a disk", "damages a database, and its log lacks the lost pages", "E-STATE-22; nothing is changed")
@pytest.mark.parametrize("damage", [cut_short, first_page_overwritten])
def test_a_file_that_is_damaged_beyond_what_its_log_holds_is_refused(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with closing(opened(tmp_path / "db")) as database:
        for _ in range(3):
            fill(database)
        database.checkpoint()
        with database.write() as db:
            db.execute(text("UPDATE incarnation SET id = id"))  # one page, and not the first
        place = copied(database.path, tmp_path / "copy")
    damage(place)
    before = [file.read_bytes() for file in files(place)]
    with pytest.raises(StateError, match=r"E-STATE-22.*restore it from a backup"):
        opened(place)
    assert [file.read_bytes() for file in files(place)] == before
    assert [f.level for f in checks.database(place, list)] == [FindingLevel.PROBLEM]


def test_a_damaged_file_is_refused_where_a_checkpoint_left_it_half_done_too(made: Database, tmp_path: Path) -> None:
    made.checkpoint()
    before = made.path.read_bytes()
    with made.write() as db:
        db.execute(insert(stored).values(value=bytes(20 * PAGE)))
    place = list(interrupted(made, tmp_path, torn=False))[1]  # its first page counts pages that are not there yet
    after = made.path.read_bytes()
    at = next(at for at in range(PAGE, len(before), PAGE) if before[at : at + PAGE] == after[at : at + PAGE])
    content = place.read_bytes()
    place.write_bytes(content[:at] + b"\xff" * PAGE + content[at + PAGE :])
    with pytest.raises(StateError, match=r"E-STATE-22.*with its log.*from a backup"):
        opened(place)


@pytest.mark.fault(
    "a disk", "loses the log in the middle of a checkpoint", "E-STATE-22 or E-STATE-23; nothing is mixed"
)
def test_a_file_that_lost_its_log_in_the_middle_of_a_checkpoint_is_refused(made: Database, tmp_path: Path) -> None:
    for place in interrupted(made, tmp_path, torn=False):
        files(place)[1].unlink()
        with pytest.raises(StateError, match=r"E-STATE-2[23]"):
            opened(place)


@pytest.mark.fault("an operator", "puts an older database next to a newer log", "E-STATE-23; nothing is changed")
def test_an_older_file_in_the_middle_of_its_own_checkpoint_is_noticed_beside_a_newer_log(
    made: Database, tmp_path: Path
) -> None:
    older = [place.read_bytes() for place in interrupted(made, tmp_path, torn=False)]
    fill(made)
    made.checkpoint()
    with made.write() as db:
        db.execute(text("UPDATE stored SET id = 1000 WHERE id = 1"))
    for number, content in enumerate(older):
        place = copied(made.path, tmp_path / f"put back {number}")
        place.write_bytes(content)
        with pytest.raises(StateError, match=r"E-STATE-23.*lacks the last \d changes"):
            opened(place)
        assert place.read_bytes() == content


def test_an_older_file_is_noticed_beside_a_log_that_began_anew_because_it_was_long(
    made: Database, tmp_path: Path
) -> None:
    older = made.path.read_bytes()
    with made.write() as db:
        db.execute(insert(stored).values(value=bytes(LOG_BYTES)))  # so long that it is brought into the file
    for _ in range(2):  # and begins anew
        with made.write() as db:
            db.execute(insert(stored).values(value=b"small"))
    place = copied(made.path, tmp_path / "copy")
    assert files(place)[1].stat().st_size < LOG_BYTES
    place.write_bytes(older)
    with pytest.raises(StateError, match=r"E-STATE-23.*lacks the last \d+ changes"):
        opened(place)


def test_a_refused_home_keeps_its_log_apart_from_its_file(made: Database, tmp_path: Path) -> None:
    """What is refused may be put right: SQLite must not join the two for the refusal."""
    place = copied(made.path, tmp_path / "copy")
    shutil.copy(made.path, tmp_path / "before")
    fill(made)
    shutil.copy(files(made.path)[2], files(place)[2])  # the log lacks the newest change
    before = place.read_bytes(), files(place)[1].read_bytes()
    with pytest.raises(StateError, match=r"E-STATE-23.*lacks the last 1 changes"):
        opened(place)
    assert (place.read_bytes(), files(place)[1].read_bytes()) == before


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let this process write no file beyond a size, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault("a disk", "is full in the middle of a checkpoint", "committed data are kept, also after a restart")
def test_a_disk_that_fills_in_the_middle_of_a_checkpoint_loses_nothing_and_refuses_nothing(
    made: Database, tmp_path: Path
) -> None:
    room = made.path.stat().st_size + 3 * PAGE
    with limited(room):
        made.checkpoint()  # what was committed is in the log: no reason for an error
        with pytest.raises(UnavailableError, match="E-STATE-63"):
            fill(made)
    assert rows(made) == 90
    place = copied(made.path, tmp_path / "killed")
    with limited(room), closing(opened(place)) as again:  # started again while the disk is still full
        assert rows(again) == 90
    for database in (made.path, place):
        with closing(opened(database)) as again:
            fill(again)
            again.checkpoint()
            assert rows(again) == 120
