"""The memory of models that were answered about: it outlives restarts, and a clock that jumps makes no room."""

from __future__ import annotations

import pytest

from fl_core.errors import FederationError
from fl_core.types.enums import TaskKind
from silo.admission.memory import DAY_S, AnswerMemory, keep_to_one_set
from silo.storage.store import SiloStore
from tests.support.hospital import key

A, B, C = "a" * 64, "b" * 64, "c" * 64


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memory(tmp_path, clock):
    store = SiloStore(tmp_path / "silo.db", clock)
    yield store.answers
    store.close_database()


def code(call, *args) -> str:
    with pytest.raises(FederationError) as caught:
        call(*args)
    return caught.value.code


def claim(memory: AnswerMemory, run: str, most: int = 2) -> None:
    memory.claim(key(run=run, kind=TaskKind.EVALUATE), A, "", "", most)


def test_a_run_counts_once_however_many_rounds_it_has_and_the_same_task_again_counts_nothing(memory):
    for round in range(50):
        memory.claim(key(round), f"{round:064}", "", "", 1)
        memory.claim(key(round), f"{round:064}", "", "", 1)
    memory.claim(key(50, kind=TaskKind.EVALUATE), A, "", "", 1)
    assert memory.measured_today() == 1


def test_a_day_later_there_is_room_again(memory, clock):
    claim(memory, "r1")
    claim(memory, "r2")
    assert code(claim, memory, "r3") == "E-POLICY-19"
    assert code(memory.require_room, "r3", 2) == "E-POLICY-19"
    memory.require_room("r2", 2)
    clock.now += DAY_S
    claim(memory, "r3")


def test_a_clock_that_is_set_back_makes_no_room(memory, clock):
    claim(memory, "r1")
    claim(memory, "r2")
    for back in (1.0, DAY_S, 400 * DAY_S):
        clock.now = 1e9 - back
        assert code(claim, memory, "r3") == "E-POLICY-19"


def test_a_round_under_another_incarnation_counts_as_one_more_run(memory):
    memory.claim(key(), A, "", "first", 2)
    assert code(memory.claim, key(), B, "", "first", 2) == "E-RUN-33"
    memory.claim(key(), B, "", "second", 2)
    assert code(memory.claim, key(), C, "", "third", 2) == "E-POLICY-19"


def test_a_set_is_kept_by_the_models_numbers_where_they_are_known_and_by_its_bytes_elsewhere(memory, tmp_path):
    memory.claim(key(0), A, "numbers", "")
    memory.claim(key(1), B, "numbers", "")
    memory.claim(key(2), C, "others", "")
    with memory._database.write() as db:
        keep_to_one_set(db, key(0), A, (0, 1, 2))
        keep_to_one_set(db, key(1), B, (0, 1, 2))
        keep_to_one_set(db, key(2), C, (0, 1))
        keep_to_one_set(db, key(3), "d" * 64, (0, 1))  # nothing was sent from here
        keep_to_one_set(db, key(3, kind=TaskKind.EVALUATE), A, (0, 1))  # of another kind
        keep_to_one_set(db, key(0, "run-2"), A, (0, 1))  # under other keys
    for round, base in ((1, B), (4, A), (4, B), (4, "d" * 64)):
        with memory._database.write() as db:
            assert code(keep_to_one_set, db, key(round), base, (0, 3)) == "E-RUN-50"
