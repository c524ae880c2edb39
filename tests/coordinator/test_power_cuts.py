"""Power cuts: the service dies before or after every single write, is started again, and gives the same bits."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial

import pytest
import torch
from sqlalchemy import Connection

from consilium.research.engines.in_process import simulate
from coordinator.api.server import CoordinatorServer
from coordinator.runs.withdrawal import Withdrawals
from coordinator.storage.records import RunState
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from tests.support import until
from tests.support.coordinator import World, copied
from tests.support.federations import NAMES, manifest, shares
from tests.support.hospital import Memory, ScriptedSilo
from tests.support.masked_silo import MaskedMemory, MaskedSilo, masked

PEOPLE = ("north", "east")
AGREED = {
    "masked": masked(rounds=2),
    "fedavg": manifest(rounds=2, names=PEOPLE),
    "analytic": manifest(rounds=2, names=PEOPLE, method="analytic", options={"class_weights": "balanced"}),
}
OBJECTS = ("put_file", "commit", "remove")
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.integration,
]


class PowerCut(BaseException):
    """Nothing after it happens: no handler of ours catches it."""


class Power:
    """Counts the writes of a service, and cuts the power at one of them; from then on nothing is written."""

    def __init__(self, server: CoordinatorServer, at: int, after: bool) -> None:
        self.cut = threading.Event()
        self.count = 0
        self.where = ""
        self._at, self._after = at, after
        self._lock = threading.RLock()
        database = server.store.database
        write = database.write

        @contextmanager
        def guarded() -> Iterator[Connection]:
            with self._lock:  # in one process a second thread could otherwise write while the power is failing
                number = self._before("transaction")
                with write() as db:
                    yield db
                self._done(number)

        database.write = guarded  # type: ignore[method-assign]
        for name in OBJECTS:
            setattr(server.objects, name, self._wrap(getattr(server.objects, name), name))
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
    server.dispatcher.close()
    server.end_calls(0)
    server.store.database.close()
    server._lock.close()


@cache
def expected(method: str) -> str:
    run = RunSetup.of(AGREED[method])
    return tensor_maps.digest(simulate(run, shares()[: len(run.manifest.members)], Observer())["w"])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Enrol once: keys take longer than runs."""
    return copied(tmp_path_factory.mktemp("crash") / "home", NAMES)


def start(world: World, memories: dict[str, Memory]) -> list[ScriptedSilo]:
    if any(isinstance(memory, MaskedMemory) for memory in memories.values()):
        return [MaskedSilo(world, n, m) for n, m in memories.items() if isinstance(m, MaskedMemory)]
    return [ScriptedSilo(world, n, s, memories[n]) for n, s in zip(PEOPLE, shares(), strict=False)]


def _settled(world: World, power: Power, run_id: str) -> bool:
    return power.cut.is_set() or (world.run(run_id).state.ended and run_id not in world.server.runs._active)


def _deleted(server: CoordinatorServer, power: Power, digest: str) -> bool:
    """Objects are deleted after a run has ended: the power may be cut there, too."""
    return power.cut.is_set() or not server.objects.has(digest)


def _told(memories: dict[str, Memory], run_id: str) -> bool:
    return all(m.ended.get(run_id) for m in memories.values())


def live_through(world: World, method: str, at: Callable[[int], int], after: bool) -> tuple[str, int, list[int]]:
    """Run to the end, cutting the power at write number `at(life)` of each life; 0: not in this one."""
    memories: dict[str, Memory] = {name: Memory() for name in PEOPLE}
    if method == "masked":
        memories = {name: MaskedMemory() for name in NAMES}
    request = uuid.uuid4().hex
    life, counts, people, run_id = 0, [], [], ""
    while True:
        server = world.start()
        power = Power(server, at(life), after)
        people = start(world, memories)
        with suppress(PowerCut):
            run_id = world.submit(AGREED[method], request).id

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
        for silo in people:
            silo.stop()
        if ended:
            with suppress(PowerCut):  # at a write after the end
                world.stop()
            assert all(len(m.trained) == len(set(m.trained)) == 3 for m in memories.values()), (
                "a task was trained twice"
            )
            assert all(not m.outbox for m in memories.values())
            seals = [s for m in memories.values() if isinstance(m, MaskedMemory) for s in m.confirmed.values()]
            assert all(len(of_one_task) == 1 for of_one_task in seals), "a round was sealed for two sets"
            return digest, life, counts
        world.server = None
        life += 1


@pytest.mark.parametrize(
    ("method", "every", "after"),
    [
        ("fedavg", 1, False),
        ("masked", 4, False),
        ("masked", 9, True),
        *(pytest.param("masked", *c, marks=pytest.mark.slow) for c in ((1, False), (1, True), (20, False))),
        ("analytic", 11, True),
        *(pytest.param("fedavg", *c, marks=pytest.mark.slow) for c in ((1, True), (5, False), (5, True), (11, False))),
    ],
)
def test_dying_again_and_again_at_a_write_gives_the_same_model(
    template: World, method: str, every: int, after: bool
) -> None:
    """Each life gets one write further than the last, so that the lives together die at very different moments.

    T-37: a masked run ends in the same model, each round opened for one set.
    """
    digest, lives, _ = live_through(template, method, lambda life: every + 2 * life if life < 12 else 0, after)
    assert digest == expected(method)
    assert lives > 1


@pytest.mark.slow
@pytest.mark.parametrize("method", list(AGREED))
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(1, 61))
def test_dying_once_at_any_write_gives_the_same_model(template: World, method: str, at: int, after: bool) -> None:
    digest, lives, _ = live_through(template, method, lambda life: 0 if life else at, after)
    assert lives == 1  # a run of this kind makes 62 to 67 writes, so there was a power cut
    assert digest == expected(method)


SUMMED = manifest(rounds=1, names=PEOPLE, method="analytic", model="random_features", model_options={"width": 16})
ALONE = manifest(rounds=1, names=PEOPLE[:1], method="analytic", model="random_features", model_options={"width": 16})


@pytest.mark.parametrize(("every", "after"), [(1, False), (2, True)])
def test_dying_again_and_again_while_a_hospital_is_taken_out_leaves_all_of_it_or_nothing(
    template: World, every: int, after: bool
) -> None:
    memories = {name: Memory() for name in PEOPLE}
    world = template
    world.start()
    people = start(world, memories)
    run = world.finished(world.submit(SUMMED, uuid.uuid4().hex).id)
    whole, life, lives = world.model(run.id), 0, 0
    for silo in people:
        silo.stop()
    world.stop()
    while True:
        server = world.start()
        known = world.run(run.id)
        by = [r for r in server.store.runs.all() if r.parent == run.id]
        if known.state_object is not None:
            assert all(torch.equal(whole["sums"][name], v) for name, v in world.model(run.id)["sums"].items())
        else:
            assert [r.state for r in by] == [RunState.FINISHED]
        power = Power(server, every + 2 * life if life < 15 else 0, after)
        people = [ScriptedSilo(world, s.name, s.share, s.memory) for s in people]
        withdrawals = Withdrawals(server.store, server.runs.submit, server.runs.schedule_cleanup)
        with suppress(PowerCut):
            (touched,) = (t for t in withdrawals.withdraw("east", "lead") if t.run.id == run.id)
            assert touched.by is not None
            until(partial(_settled, world, power, touched.by.id), "the end or a power cut", 120)
            gone = partial(_deleted, server, power, run.state_object)
            until(gone, "the end of the state with its sums or a power cut", 120)
        if not power.cut.is_set():
            break
        bury(server)
        for silo in people:
            silo.stop()
        world.server, life, lives = None, life + 1, lives + 1
    assert lives > 3
    (taken,) = (r for r in server.store.runs.all() if r.parent == run.id)
    assert (taken.state, world.run(run.id).state_object) == (RunState.FINISHED, None)
    assert not server.objects.has(run.state_object)
    alone = simulate(RunSetup.of(ALONE), shares()[:1], Observer())
    left = world.model(taken.id)
    for group in ("w", "sums"):
        assert all(torch.equal(alone[group][name], v) for name, v in left[group].items())
    for silo in people:
        silo.stop()
    with suppress(PowerCut):  # at a write after the end
        world.stop()
