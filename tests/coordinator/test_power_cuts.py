"""Power cuts: the service dies before or after every single write, is started again, and gives the same bits.

A note (`Database.note`) waits for no disk: a machine that loses its power may forget those after the last write.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from helpers_core import manifest, shares
from helpers_grpc import World, until
from helpers_scripted import Memory, ScriptedSilo
from sqlalchemy import Connection

from coordinator.api.server import CoordinatorServer
from coordinator.storage.database import Database
from coordinator.storage.records import RunState
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import simulate
from fl_core.types import tensor_maps as trees

PEOPLE = ("north", "east")
AGREED = manifest(rounds=2, names=PEOPLE)
OBJECTS = ("put_file", "commit", "remove")
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class PowerCut(BaseException):
    """Nothing after it happens: no handler of ours catches it."""


@dataclass
class Disk:
    """The database as it is for certain on the disk: SQLite's file and its log, at the end of the last write."""

    file: Path
    _sure: dict[Path, bytes] = field(default_factory=dict)

    @property
    def _files(self) -> tuple[Path, Path]:
        return self.file, self.file.with_name(f"{self.file.name}-wal")

    def reached(self) -> None:
        """Everything that was written, notes too, is there."""
        self._sure = {file: file.read_bytes() for file in self._files if file.exists()}

    def forget(self) -> None:
        """Lose the notes since then. Nobody has the file open."""
        for file in (*self._files, self.file.with_name(f"{self.file.name}-shm")):
            file.unlink(missing_ok=True)
        for file, content in self._sure.items():
            file.write_bytes(content)


class Power:
    """Counts the writes of a service, and cuts the power at one of them; from then on nothing is written."""

    def __init__(self, server: CoordinatorServer, at: int, after: bool) -> None:
        self.cut = threading.Event()
        self.count = 0
        self.where = ""
        self._at, self._after = at, after
        self._lock = threading.RLock()
        database = server.store.database
        self.disk = Disk(database.path)
        self.disk.reached()

        def counted(
            write: Callable[[], AbstractContextManager[Connection]], reached: Callable[[], None] = lambda: None
        ) -> Callable[[], AbstractContextManager[Connection]]:
            @contextmanager
            def guarded() -> Iterator[Connection]:
                with self._lock:  # in one process a second thread could otherwise write while the power is failing
                    number = self._before("transaction")
                    with write() as db:
                        yield db
                    reached()
                    self._done(number)

            return guarded

        database.write = counted(database.write, self.disk.reached)  # type: ignore[method-assign]
        database.note = counted(database.note)  # type: ignore[method-assign]
        for name in OBJECTS:
            setattr(server.blobs, name, self._wrap(getattr(server.blobs, name), name))
        server.uploads.discard = self._wrap(server.uploads.discard, "discard")  # type: ignore[method-assign]

    def _wrap(self, inner: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            with self._lock:
                number = self._before(name)
                result = inner(*given)
                self._done(number)
                return result

        return call

    def _before(self, what: str) -> int:
        if self.cut.is_set():
            raise PowerCut
        self.count += 1
        self.where = what
        if self.count == self._at and not self._after:
            self._fail()
        return self.count

    def _done(self, number: int) -> None:
        if number == self._at and self._after:
            self._fail()

    def _fail(self) -> None:
        self.cut.set()
        raise PowerCut


def bury(server: CoordinatorServer) -> None:
    """Take the dead service's port, threads and lock away; nothing of it is written any more."""
    server._stopping.set()
    with suppress(PowerCut):
        server.runs.stop(5)
    server.hub.close()
    server.grpc.stop(0).wait()
    server.store.database.close()
    server._lock.close()


@pytest.fixture(scope="module")
def expected() -> str:
    return trees.digest(simulate(RunSetup.of(AGREED), shares()[:2], Observer())["w"])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Enrol once: keys take longer than runs."""
    return World.create(tmp_path_factory.mktemp("crash") / "home", PEOPLE)


def start(world: World, memories: dict[str, Memory]) -> list[ScriptedSilo]:
    return [ScriptedSilo(world, n, s, memories[n]) for n, s in zip(PEOPLE, shares(), strict=False)]


def _settled(world: World, power: Power, run_id: str) -> bool:
    return power.cut.is_set() or (world.run(run_id).state.ended and run_id not in world.server.runs._active)


def _told(memories: dict[str, Memory], run_id: str) -> bool:
    return all(m.ended.get(run_id) for m in memories.values())


def live_through(world: World, at: Callable[[int], int], after: bool, forget: bool) -> tuple[str, int, list[int]]:
    """Run to the end, cutting the power at write number `at(life)` of each life; 0: not in this one.

    forget: whether a cut takes the notes that are not on the disk for certain; otherwise the process alone dies.
    """
    memories, request = {name: Memory() for name in PEOPLE}, uuid.uuid4().hex
    life, counts, people, run_id = 0, [], [], ""
    while True:
        server = world.start()
        power = Power(server, at(life), after)
        if not people:
            people = start(world, memories)
        else:
            people = [ScriptedSilo(world, s.name, s.share, s.memory) for s in people]
        with suppress(PowerCut):
            run_id = world.submit(AGREED, request).id

        until(partial(_settled, world, power, run_id), "the end or a power cut", 30)
        ended = not power.cut.is_set()
        if ended:
            until(partial(_told, memories, run_id), "the end at every silo")
            run = world.run(run_id)
            assert run.state is RunState.FINISHED, run.reason
            digest = run.model_digest
        counts.append(power.count)
        if not ended:
            bury(server)  # before the silos: a call that died in the middle is answered by nobody
            if forget:
                power.disk.forget()
        for silo in people:
            silo.stop()
        if ended:
            world.stop()
            assert all(len(m.trained) == len(set(m.trained)) == 3 for m in memories.values()), (
                "a task was trained twice"
            )
            assert all(not m.outbox for m in memories.values())
            return digest, life, counts
        world.server = None
        life += 1


def test_a_power_cut_takes_the_notes_after_the_last_write_and_nothing_else(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    disk = Disk(database.path)
    for block, text in ((database.note, "sure"), (database.write, "written"), (database.note, "lost")):
        with block() as db:
            db.exec_driver_sql("CREATE TABLE IF NOT EXISTS said (text TEXT)")
            db.exec_driver_sql("INSERT INTO said VALUES (?)", (text,))
        if text == "written":
            disk.reached()
    database.close()
    disk.forget()
    database = Database(tmp_path / "db")
    with database.read() as db:
        assert [row.text for row in db.exec_driver_sql("SELECT text FROM said")] == ["sure", "written"]
    database.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("every", "forget"), [(1, False), (5, True), (11, True)])
def test_dying_again_and_again_at_a_write_gives_the_same_model(
    template: World, expected: str, every: int, after: bool, forget: bool
) -> None:
    """Each life gets one write further than the last, so that the lives together die at very different moments."""
    digest, lives, _ = live_through(template, lambda life: every + 2 * life if life < 12 else 0, after, forget)
    assert digest == expected
    assert lives > 1


@pytest.mark.slow
@pytest.mark.parametrize(("after", "forget"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("at", range(1, 61))
def test_dying_once_at_any_write_gives_the_same_model(
    template: World, expected: str, at: int, after: bool, forget: bool
) -> None:
    digest, lives, _ = live_through(template, lambda life: 0 if life else at, after, forget)
    assert lives == 1  # a run of this kind makes 62 to 67 writes, so there was a power cut
    assert digest == expected
