"""A coordinator that asks a hospital about runs without end: its home stays small, and what is real goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_core.errors import RefusedError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey
from silo.events import Event
from silo.service.task_queue import PREFLIGHTS_AT_ONCE, PREFLIGHTS_PER_MIN, TaskQueue
from silo.storage.approvals import MOST_UNDECIDED
from silo.storage.store import MOST_CLOSED, MOST_UNTRAINED, Store
from tests.support.floods import BY_HAND, KINDS, REAL, flooded
from tests.support.hospital import B, M, key, opened, stage

MOST_BYTES, WAL_BYTES = 1 << 20, 5 << 20
"""Of a home's growth, however many preflights come; and with a database's log that is full, which is used again."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "silo.db", clock=lambda: 0.0)
    yield made
    made.close_database()


@pytest.mark.fault(
    "a coordinator", "asks about 10,000 runs", "a few are looked at, the others refused; the home stays small"
)
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_of_preflights_grows_no_home_and_the_real_run_goes_on(tmp_path: Path, kind: str, number: int) -> None:
    with flooded(tmp_path / "home", kind) as hospital:
        able = hospital.kind.budget > 1
        if able:
            hospital.ask_real()
        left = hospital.pour(number)
        assert left.bytes < MOST_BYTES, left.largest
        assert left.runs <= MOST_UNTRAINED
        assert left.waiting <= MOST_UNDECIDED
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
        assert left.runs <= MOST_UNTRAINED
        assert left.waiting <= MOST_UNDECIDED
        assert left.events <= 10 + 5  # ten refusals, and the 16th, 32nd, ... 256th
        assert set(left.answers) <= hospital.kind.codes


def test_preflights_beyond_the_pace_are_refused_at_once_and_the_pace_recovers(store: Store) -> None:
    now, sent, said = [0.0], list[pb.SiloMessage](), list[Event]()
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


def test_a_question_that_waits_is_asked_again_without_end_at_no_cost(store: Store) -> None:
    """A coordinator names what is open in each session; a hospital may decide after a week."""
    sent, said = list[pb.SiloMessage](), list[Event]()
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
        store.fix_data(f"offered-{k}", "v1")
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


def test_rounds_that_are_closed_without_end_are_a_few_rows_and_none_of_a_run_that_is_not_known(store: Store) -> None:
    for k in range(100):
        assert store.close(TaskKey(f"nobody-{k}", 0, TaskKind.TRAIN), included=True)
    assert not any(store.closed(TaskKey(f"nobody-{k}", 0, TaskKind.TRAIN)) for k in range(100))
    store.record_run("run-1", "known", M)
    for k in range(100):
        store.close(key(k), included=False)
    assert [k for k in range(100) if store.closed(key(k))] == list(range(100 - MOST_CLOSED, 100))


def test_the_first_question_stays_on_top_and_those_beyond_a_bound_are_refused(store: Store) -> None:
    approvals = store.approvals
    approvals.ask("decided", M, "before", "fedavg")
    approvals.decide("decided", False)
    approvals.ask(REAL, M, "real", "fedavg")
    for k in range(MOST_UNDECIDED - 1):
        assert approvals.ask(f"run-{k}", M, "real", "fedavg") is None
    for k in range(MOST_UNDECIDED - 1, 100):
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
