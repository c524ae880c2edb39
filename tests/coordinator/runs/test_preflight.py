"""Which runs are asked about before round 0, whom the coordinator asks, and whose answer counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.runs import masked_rounds, plain_rounds, run_facts
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.masked_rounds import MaskedRounds
from coordinator.runs.plain_rounds import PlainRounds
from coordinator.runs.preflight import ask_preflight
from coordinator.runs.tasks import PendingTask, Preflight, RunInterrupted
from coordinator.storage.records import StoredRun
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import RefusedError, UnavailableError
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.enums import TaskKind
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until
from tests.support.coordinator import session
from tests.support.federations import NAMES, manifest
from tests.support.masked_silo import masked

PRIVATE = replace(manifest(), privacy=NamedOptions("dp_record", {"epsilon": 8.0}))
ALONE = replace(PRIVATE, members=PRIVATE.members[:1])
DIGEST = "m" * 64


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[Dispatcher]:
    found = Dispatcher(CoordinatorStore(tmp_path), 1.0)
    yield found
    found.store.close()


def stored(dispatcher: Dispatcher, of: RunManifest = PRIVATE) -> StoredRun:
    names = tuple(m.name for m in of.members)
    run = StoredRun("run-1", "run", "request", "{}", of.to_json(), DIGEST, "fedavg", "made-up", of.rounds, names)
    return dispatcher.store.runs.add(run, 1)


def said(**other: object) -> pb.PreflightAnswer:
    return pb.PreflightAnswer(**{"run_id": "run-1", "manifest_digest": DIGEST, "ready": True, **other})


def kinds(dispatcher: Dispatcher) -> list[str]:
    return [e.kind for e in dispatcher.store.runs.events("run-1", 0)]


class Asking:
    """`ask_preflight` on a thread of its own."""

    def __init__(self, dispatcher: Dispatcher, of: RunManifest, quorum: int = 0) -> None:
        self.error: BaseException | None = None
        self._run, self._of, self._dispatcher = stored(dispatcher, of), of, dispatcher
        self._quorum, self.tasks = quorum, dispatcher.add_run(self._run.id)
        self.thread = threading.Thread(target=self._ask)
        asked = session()
        dispatcher.attach(asked)
        self.thread.start()
        until(lambda: asked.next(), "the question")

    def _ask(self) -> None:
        try:
            private = CompiledRun.of(self._of).private
            asked = self._run, self._of, self._dispatcher, self.tasks
            ask_preflight(*asked, all_answer=private, quorum=self._quorum)
        except BaseException as error:  # kept for the test
            self.error = error

    def over(self) -> BaseException | None:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.error


def test_a_run_is_asked_about_until_its_round_0_was_opened_and_never_after(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = stored(dispatcher), list[str]()
    monkeypatch.setattr(plain_rounds, "ask_preflight", lambda run, *_, **__: asked.append(run.id) or {})
    services, tasks = SimpleNamespace(store=dispatcher.store, dispatcher=dispatcher), dispatcher.add_run(run.id)
    steering, agreed = dispatcher.store.steering.of(run.id), (PRIVATE, run_facts.computed(PRIVATE.to_json()))
    PlainRounds(run, *agreed, services, tasks).prepare(steering)
    assert asked == ["run-1"]
    PlainRounds(replace(run, closed=1), *agreed, services, tasks).prepare(steering)
    dispatcher.store.runs.open_round(run.id, 0, TaskKind.TRAIN, NAMES)
    PlainRounds(run, *agreed, services, tasks).prepare(steering)
    assert asked == ["run-1"]


def test_only_the_answer_of_the_silo_itself_about_this_manifest_counts_and_only_once(dispatcher: Dispatcher) -> None:
    here, stranger = session(), session("west")
    asking = Asking(dispatcher, ALONE)
    dispatcher.attach(here)
    dispatcher.catch_up(here, pb.Hello(), time.time())
    messages = list(iter(lambda: here.next(), None))
    assert [m.WhichOneof("body") for m in messages] == ["preflight"]
    assert (messages[0].preflight.run_id, messages[0].preflight.manifest_digest) == ("run-1", DIGEST)
    dispatcher.hear(stranger, said())
    dispatcher.hear(here, said(manifest_digest="n" * 64))
    dispatcher.hear(here, said(run_id="run-2"))
    dispatcher.hear(here, said(manifest_digest=""))
    assert "ready" not in kinds(dispatcher)
    assert asking.thread.is_alive()
    dispatcher.hear(here, said())
    dispatcher.hear(here, said())
    dispatcher.hear(here, said(ready=False, code="E-BUDGET-01"))
    assert asking.over() is None
    dispatcher.hear(here, said(ready=False, code="E-BUDGET-01"))
    assert kinds(dispatcher).count("ready") == 1
    assert "refused" not in kinds(dispatcher)


def test_a_reason_is_cut_and_a_code_that_is_none_is_replaced(dispatcher: Dispatcher) -> None:
    asking = Asking(dispatcher, ALONE)
    dispatcher.hear(session(), said(ready=False, code="nonsense\n", reason="x" * 100_000))
    error = asking.over()
    assert isinstance(error, RefusedError)
    assert error.code == "E-RUN-36"
    assert "north: E-RUN-14" in error.message
    assert len(error.message) < 600


def test_a_reason_is_cut_between_words_and_what_to_do_about_its_code_is_said(dispatcher: Dispatcher) -> None:
    asking = Asking(dispatcher, ALONE)
    dispatcher.hear(session(), said(ready=False, code="E-BUDGET-04", reason="registered " * 100))
    error = asking.over()
    assert isinstance(error, RefusedError)
    assert "registered ...\n" in error.message
    assert "coordinator resume run-1" in error.message.splitlines()[-1]
    assert "coordinator explain CODE" in error.message


def test_who_has_answered_is_not_asked_again_in_the_next_session(dispatcher: Dispatcher) -> None:
    asking = Asking(dispatcher, replace(PRIVATE, members=PRIVATE.members[:2]))
    dispatcher.hear(session(), said())
    again = session()
    dispatcher.attach(again)
    dispatcher.catch_up(again, pb.Hello(), time.time())
    assert again.next() is None
    asking.tasks.interrupt()
    assert isinstance(asking.over(), RunInterrupted)


def test_a_silence_until_the_deadline_names_the_silent(dispatcher: Dispatcher) -> None:
    error = Asking(dispatcher, replace(PRIVATE, deadline_s=0.2)).over()
    assert isinstance(error, UnavailableError)
    assert error.code == "E-RUN-37"
    assert "east, north, south" in error.message


PLAIN = replace(manifest(), patience_s=30.0)


def test_a_run_without_privacy_is_begun_without_the_word_of_silos_that_are_away(dispatcher: Dispatcher) -> None:
    asking = Asking(dispatcher, PLAIN)  # north alone is here
    dispatcher.hear(session(), said())
    assert asking.over() is None
    (event,) = [e for e in dispatcher.store.runs.events("run-1", 0) if e.kind == "preflight"]
    assert event.text.startswith("preflight of 1 silo;")
    assert "away: " in event.text


def test_a_run_without_privacy_is_stopped_by_a_silo_that_cannot_do_it(dispatcher: Dispatcher) -> None:
    asking = Asking(dispatcher, PLAIN)
    dispatcher.hear(session(), said(ready=False, code="E-RUN-38", reason="expected about 9000 MiB"))
    error = asking.over()
    assert isinstance(error, RefusedError)
    assert error.code == "E-RUN-36"
    assert "north: E-RUN-38" in error.message


def test_a_run_without_privacy_begins_with_a_quorum_that_was_named_although_others_refuse(
    dispatcher: Dispatcher,
) -> None:
    asking = Asking(dispatcher, PLAIN, quorum=2)
    dispatcher.hear(session(), said(ready=False, code="E-POLICY-15", reason="not this code"))
    assert asking.over() is None
    (event,) = [e for e in dispatcher.store.runs.events("run-1", 0) if e.kind == "warning"]
    assert "started with the given quorum of 2, although 1 refused" in event.text
    assert "north: E-POLICY-15" in event.text


def test_a_named_quorum_that_the_others_do_not_make_stops_the_run(dispatcher: Dispatcher) -> None:
    asking = Asking(dispatcher, PLAIN, quorum=3)
    dispatcher.hear(session(), said(ready=False, code="E-POLICY-15", reason="not this code"))
    assert isinstance(asking.over(), RefusedError)


def test_a_run_without_privacy_waits_for_no_hospital_that_must_decide_first(dispatcher: Dispatcher) -> None:
    asking = Asking(dispatcher, replace(PLAIN, patience_s=1000.0))
    here = session()
    dispatcher.attach(here)
    dispatcher.pulse(here, pb.Pulse(activity=pb.AWAITING_APPROVAL, run_id="run-1"))
    assert asking.over() is None


def test_a_run_without_privacy_waits_for_a_silent_silo_no_longer_than_its_patience(dispatcher: Dispatcher) -> None:
    assert Asking(dispatcher, replace(PLAIN, patience_s=0.2)).over() is None


def test_a_question_carries_its_deadline() -> None:
    question = Preflight("run-1", "north", DIGEST, time.monotonic() + 100).offer().preflight
    assert question.deadline_unix == pytest.approx(time.time() + 100, abs=5)


def test_members_are_asked_again_where_one_renewed_its_certificate_while_they_were_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys that a renewed identity signed are checked by the list that names it: all have it before keys are fixed."""
    lists, sent = iter([b"1", b"2", b"2", b"2"]), list[bytes]()

    def ask(*_: object, roster: bytes, **__: object) -> dict[str, PendingTask]:
        sent.append(roster)
        question = Preflight("run-1", "north", DIGEST, time.monotonic())
        return {"north": PendingTask(question, entry=pb.SecaggEntry(agree=bytes([len(sent)])))}

    monkeypatch.setattr(masked_rounds, "ask_preflight", ask)
    kept = list[bytes]()
    store = SimpleNamespace(keys=lambda _: kept[0].hex() if kept else None, census=lambda _: None)
    services = SimpleNamespace(roster=lambda: next(lists), dispatcher=None, store=SimpleNamespace(secagg=store))
    monkeypatch.setattr(MaskedRounds, "keep_keys", lambda _, entries: kept.append(entries["north"].agree))
    monkeypatch.setattr(MaskedRounds, "_stored_keys", lambda _: None)
    agreed = masked()
    run = StoredRun(
        "run-1", "run", "request", "{}", agreed.to_json(), DIGEST, "fedavg", "made-up", agreed.rounds, NAMES
    )
    MaskedRounds(run, agreed, run_facts.computed(agreed.to_json()), services, None).prepare(None)  # type: ignore[arg-type]
    assert kept == [b"\x02"]
    assert sent == [b"1", b"2"]
