"""A coordinator that asks a hospital about runs without end: its home stays small, and what is real goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from fl_core.errors import RefusedError
from fl_core.methods import build_method
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey
from silo.events import SiloEvent
from silo.service.task_queue import PREFLIGHTS_AT_ONCE, PREFLIGHTS_PER_MIN, TaskQueue
from silo.storage.approvals import MAX_UNDECIDED
from silo.storage.run_data import RunData
from silo.storage.store import MAX_CLOSED, MAX_UNTRAINED, SiloStore
from tests.support import until
from tests.support.fake_coordinator import Hospital
from tests.support.hospital import B, M, key, opened, stage
from tests.support.privacy import SEEDED_POLICY, budgeted, private

pytestmark = pytest.mark.integration

BY_HAND = SEEDED_POLICY + '[runs]\napprove = "by hand"\n'
SESSION, PATIENT = 4000, 500
"""Messages of one session: more are read at a pace, which a liar evades by another session; and of a patient liar."""
REAL = "the-real-one"


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked, of a hospital with what policy and budget, and the codes that are answered.

    merged: a later question takes the place of an earlier one that waits, so only the last is answered for certain.
    """

    run: Callable[[int], RunManifest | None]
    codes: frozenset[str]
    policy: str = SEEDED_POLICY
    budget: float = 1000.0
    ids: Callable[[int], str] = "run-{}".format
    merged: bool = False


def named(number: int, **terms: object) -> RunManifest:
    return replace(private(**terms), name=f"run {number}")


KINDS: Mapping[str, Kind] = {
    "refused by the policy": Kind(lambda n: named(n, epsilon=9.0), frozenset({"E-POLICY-05"})),
    "refused by the budget": Kind(named, frozenset({"E-BUDGET-01"}), budget=0.5),
    "ready": Kind(named, frozenset({""})),
    "asked by hand": Kind(named, frozenset({"E-WIRE-17"}), policy=BY_HAND),
    "of one run under other manifests": Kind(named, frozenset({"", "E-RUN-33"}), ids=lambda _: "run-1", merged=True),
    "of no manifest": Kind(lambda _: None, frozenset({"E-WIRE-06"})),
}


@dataclass(frozen=True, slots=True)
class Left:
    """What a flood left: bytes of the home's growth, by file; answers by code; rows and events that were added."""

    bytes: int
    largest: str
    answers: Counter[str]
    runs: int
    waiting: int
    events: int
    seconds: float
    sessions: int


class Flooded:
    """A hospital that one real question waits at, or that takes part in a real run, while others pour in."""

    def __init__(self, folder: Path, kind: Kind, patient: bool = False) -> None:
        self.kind, self._session = kind, PATIENT if patient else SESSION
        hour = count(0.0, 3600.0)
        clock: Callable[[], float] = (lambda: next(hour)) if patient else time.monotonic
        self.ledger = budgeted(folder, kind.budget, kind.budget, kind.policy)
        self.hospital = Hospital(folder, replace(private(), name="real"), clock=clock)
        self.hospital.run_id = REAL
        self.hospital.start()
        assert self.hospital.service is not None
        self.store: SiloStore = self.hospital.service.store

    def answers(self) -> list[pb.PreflightAnswer]:
        return [a for s in self.hospital.control.sessions for a in s.got("preflight")]

    def ask(self, run_id: str, digest: str) -> None:
        self.hospital.control.last.send(preflight=pb.Preflight(run_id=run_id, manifest_digest=digest))

    def ask_real(self) -> None:
        """Ask about the real run; where a person decides, wait until it waits."""
        self.ask(REAL, self.hospital.digest)
        if self.kind.policy == BY_HAND:
            until(lambda: self.store.approvals.waits(REAL), seconds=60)
        else:
            until(lambda: any(a.run_id == REAL for a in self.answers()), seconds=60)

    def pour(self, number: int, first: int = 0) -> Left:
        """Ask `number` times, wait until all is answered that is going to be, and measure what is left."""
        before, seen, began = self._files(), len(self.answers()), time.monotonic()
        events = len(self.ledger.events())
        waiting = len(self._waiting())
        for k in range(first, first + number):
            run = self.kind.run(k)
            digest = "no digest" if run is None else self.hospital.transfer.offer(run.to_json().encode())
            self.ask(self.kind.ids(k), digest)
            if k % self._session == self._session - 1 or k == first + number - 1:
                wanted = 1 if self.kind.merged else k - first + 1
                self._wait(seen, wanted + waiting, digest, 60 + number / 2)
                self._another_session()
        took = time.monotonic() - began
        until(self._at_rest, seconds=60)
        after = self._files()
        growth = Counter({name: size - before.get(name, 0) for name, size in after.items()})
        found = Counter(a.code for a in self.answers()[seen:])
        largest = ", ".join(f"{name} {size:,}" for name, size in growth.most_common(2))
        return Left(
            sum(growth.values()),
            largest,
            found,
            len(self.store.history()),
            len(self._waiting()),
            len(self.ledger.events()) - events,
            took,
            len(self.hospital.control.sessions),
        )

    def _wait(self, seen: int, answers: int, last: str, seconds: float) -> None:
        """Wait until so many were answered or wait for a person, and the last one is among them."""

        def told() -> bool:
            heard = [*self.answers()[seen:], *self.store.approvals.all()]
            return len(self.answers()) - seen + len(self._waiting()) >= answers and last in {
                a.manifest_digest for a in heard
            }

        until(told, f"{answers} answers", seconds)

    def _another_session(self) -> None:
        known = len(self.hospital.control.sessions)
        self.hospital.control.last.end()
        until(lambda: len(self.hospital.control.sessions) > known, seconds=60)

    def _waiting(self) -> list[str]:
        return [a.run_id for a in self.store.approvals.all() if a.decided is None]

    def _at_rest(self) -> bool:
        assert self.hospital.service is not None
        return self.hospital.service.pulse().activity in (pb.IDLE, pb.AWAITING_APPROVAL)

    def _files(self) -> dict[str, int]:
        folder = self.hospital.folder
        return {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*") if f.is_file()}

    def do_real(self) -> None:
        """Approve the real question, which is on top, where a person decides; then do the run's first round."""
        if self.kind.policy == BY_HAND:
            top = self.store.approvals.all()[0]
            assert (top.run_id, top.name) == (REAL, "real")
            self.store.approvals.decide(REAL, True)
            until(lambda: any(a.run_id == REAL and a.ready for a in self.answers()), seconds=60)
        method = build_method("fedavg", {})
        offer = self.hospital.offer_of(state=method.broadcast(self.hospital.server))
        self.hospital.control.greet = lambda session: session.send(offer=offer)  # a session that was lost meanwhile
        self.hospital.control.last.send(offer=offer)
        self.hospital.sent()


@contextmanager
def flooded(folder: Path, kind: str, patient: bool = False) -> Iterator[Flooded]:
    made = Flooded(folder, KINDS[kind], patient)
    try:
        yield made
    finally:
        made.hospital.stop()
        made.hospital.host.stop()


MAX_BYTES, WAL_BYTES = 1 << 20, 5 << 20
"""Of a home's growth, however many preflights come; and with a database's log that is full, which is used again."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SiloStore]:
    made = SiloStore(tmp_path / "silo.db", clock=lambda: 0.0)
    yield made
    made.close_database()


@pytest.mark.fault(
    "a coordinator", "asks about 10,000 runs", "a few are examined, the others refused; the home stays small"
)
@pytest.mark.parametrize("number", [100, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_of_preflights_grows_no_home_and_the_real_run_goes_on(tmp_path: Path, kind: str, number: int) -> None:
    with flooded(tmp_path / "home", kind) as hospital:
        able = hospital.kind.budget > 1
        if able:
            hospital.ask_real()
        left = hospital.pour(number)
        assert left.bytes < MAX_BYTES, left.largest
        assert left.runs <= MAX_UNTRAINED
        assert left.waiting <= MAX_UNDECIDED
        assert left.events <= 12
        assert set(left.answers) <= hospital.kind.codes | {"E-WIRE-17"}
        if able:
            hospital.do_real()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_liar_who_waits_until_each_question_is_looked_at_grows_no_home_either(tmp_path: Path, kind: str) -> None:
    with flooded(tmp_path / "home", kind, patient=True) as hospital:
        left = hospital.pour(300)
        assert left.bytes < WAL_BYTES, left.largest
        assert left.runs <= MAX_UNTRAINED
        assert left.waiting <= MAX_UNDECIDED
        assert left.events <= 10 + 5  # ten refusals, and the 16th, 32nd, ... 256th
        assert set(left.answers) <= hospital.kind.codes


def test_preflights_beyond_the_pace_are_refused_at_once_and_the_pace_recovers(store: SiloStore) -> None:
    now, sent, said = [0.0], list[pb.SiloMessage](), list[SiloEvent]()
    queue = TaskQueue(store, sent.append, said.append, lambda: now[0])

    def ask(first: int, number: int) -> int:
        """Ask, look at all that waits, and return how many that were."""
        for k in range(first, first + number):
            queue.preflight(pb.Preflight(run_id=f"run-{k}", manifest_digest=M))
        looked_at = 0
        while (task := queue.take(0)) is not None:
            queue.finish(task)
            looked_at += 1
        return looked_at

    assert ask(0, 1000) == PREFLIGHTS_AT_ONCE
    assert {(m.preflight.code, m.preflight.ready) for m in sent} == {("E-WIRE-17", False)}
    assert len(sent) == 1000 - PREFLIGHTS_AT_ONCE
    assert [found.event for found in said] == ["refused"]  # a flood is one line of the log
    now[0] += 60.0  # what was refused is no debt
    assert ask(1000, 1000) == PREFLIGHTS_PER_MIN
    now[0] -= 3600.0  # a clock that goes back gives nothing and takes nothing
    assert ask(2000, 10) == 0
    now[0] += 3600.0
    assert ask(3000, 10) == 10


def test_a_question_that_waits_is_asked_again_without_end_at_no_cost(store: SiloStore) -> None:
    """A coordinator names what is open in each session; a hospital may decide after a week."""
    sent, said = list[pb.SiloMessage](), list[SiloEvent]()
    queue = TaskQueue(store, sent.append, said.append, lambda: 0.0)
    for _ in range(1000):
        queue.preflight(pb.Preflight(run_id="run-1", manifest_digest=M))
    assert (sent, said) == ([], [])
    assert queue.take(0) is not None


def test_runs_that_asked_and_offered_nothing_lapse_and_those_that_trained_stay(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    store = outbox.store
    store.record_run("run-1", "trained", M, B)
    stage(outbox)
    store.close(key(), included=True)
    for k in range(100):
        store.record_run(f"asked-{k}", "asked", M)
    for k in range(100):
        store.run_data.begin(f"offered-{k}", RunData("v1"))
        store.record_run(f"offered-{k}", "offered", M, B)
        store.end_run(f"offered-{k}", "failed", "")
    assert [r.run_id for r in store.history()] == ["run-1", *(f"offered-{k}" for k in range(80, 100))]
    assert store.manifest_of("asked-99") is None
    assert store.committed("run-1") is not None
    store.record_run("asked-0", "asked again", M)
    assert [(r.run_id, r.state) for r in store.history()][-1] == ("asked-0", "asked")
    store.record_run("asked-0", "asked again", M, B)
    assert [(r.run_id, r.state) for r in store.history()][-1] == ("asked-0", "running")
    store.close_database()


def test_rounds_that_are_closed_without_end_are_a_few_rows_and_none_of_a_run_that_is_not_known(
    store: SiloStore,
) -> None:
    for k in range(100):
        assert store.close(TaskKey(f"nobody-{k}", 0, TaskKind.TRAIN), included=True)
    assert not any(store.closed(TaskKey(f"nobody-{k}", 0, TaskKind.TRAIN)) for k in range(100))
    store.record_run("run-1", "known", M)
    for k in range(100):
        store.close(key(k), included=False)
    assert [k for k in range(100) if store.closed(key(k))] == list(range(100 - MAX_CLOSED, 100))


def test_the_first_question_stays_on_top_and_those_beyond_a_bound_are_refused(store: SiloStore) -> None:
    approvals = store.approvals
    approvals.ask("decided", M, "before", "fedavg")
    approvals.decide("decided", False)
    approvals.ask(REAL, M, "real", "fedavg")
    for k in range(MAX_UNDECIDED - 1):
        assert approvals.ask(f"run-{k}", M, "real", "fedavg") is None
    for k in range(MAX_UNDECIDED - 1, 100):
        with pytest.raises(RefusedError, match="E-WIRE-17"):
            approvals.ask(f"run-{k}", M, "real", "fedavg")
    assert approvals.ask(REAL, M, "real", "fedavg") is None  # asked again, it waits on
    listed = approvals.all()
    assert (listed[0].run_id, listed[-1].run_id) == (REAL, "decided")
    approvals.decide("run-0", False)
    assert approvals.ask("run-99", M, "later", "fedavg") is None  # a decision makes room, and so does a run's end
    store.end_run("run-1", "aborted", "")
    assert approvals.ask("run-98", M, "later", "fedavg") is None
    assert [a.run_id for a in approvals.all() if a.decided is None][-2:] == ["run-99", "run-98"]


def test_a_hospital_that_decides_by_hand_answers_by_its_policy_alone_until_it_has_decided(tmp_path: Path) -> None:
    """Neither a budget that covers the run nor one that does not is answered: nothing bisects what is left."""
    heard = []
    for budget in (0.001, 1000.0):
        with flooded(tmp_path / f"{budget}", "asked by hand") as hospital:
            for collection in hospital.ledger.collections():
                hospital.ledger.set_budget(collection, budget, 1e-5, "dpo", "test")
            assert hospital.kind.policy == BY_HAND
            heard.append(hospital.pour(10))
            assert hospital.answers() == []
    assert [(left.waiting, left.answers) for left in heard] == [(10, {}), (10, {})]
