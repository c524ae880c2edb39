"""What a silo does with offers, closes and restarts that come again, late or out of order."""

from __future__ import annotations

import grpc
import pytest

from fl_core.methods.fedavg import FedAvg
from protos.consilium.v1 import federation_pb2 as pb
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.hospital import TRAINED


def test_an_offer_repeated_is_not_trained_twice(started, slow):
    hospital = started(run_round=slow)
    offer = hospital.offer()
    assert slow.started.wait(20)
    hospital.control.last.send(offer=offer)
    until(lambda: len(hospital.answers()) >= 2)
    slow.free.set()
    hospital.sent()
    hospital.control.last.send(offer=offer)
    until(lambda: len(hospital.answers()) >= 3)
    hospital.sent(2)
    assert slow.begun == [0]
    assert hospital.transfer.calls.count("Put") == 1


def test_a_restart_sends_what_is_in_the_outbox_without_training(make, slow):
    slow.held = False
    hospital = make(run_round=slow)
    hospital.transfer.refusal = (grpc.StatusCode.UNAVAILABLE, "away")
    hospital.start()
    hospital.offer()
    until(lambda: "staged" in hospital.events())
    hospital.stop()
    hospital.transfer.refusal = None
    hospital.start()
    assert [(s.run_id, s.round) for s in hospital.control.last.hello.staged] == [("run-1", 0)]
    hospital.train()
    assert slow.begun == [0]


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("included", [True, False])
def test_a_close_for_a_staged_round_after_a_restart(started, included, mirrored, monkeypatch):
    monkeypatch.setattr(FedAvg, "server_tracks_state", mirrored)
    hospital = started()
    hospital.train()
    hospital.stop()
    service = hospital.start()
    assert len(hospital.control.last.hello.staged) == 1
    hospital.close(included=included)
    hospital.settled()
    assert (service.store.committed("run-1") is not None) is (included or not mirrored)
    assert service.store.outbox() == []
    hospital.close(included=included)
    hospital.settled(2)


def test_an_offer_for_a_closed_round_is_refused(started):
    hospital = started()
    hospital.train()
    hospital.close(included=False)
    hospital.settled()
    hospital.offer()
    assert hospital.refused().code == "E-RUN-33"


def test_a_close_while_training_ends_it_and_discards(make, slow):
    hospital = make(run_round=slow)
    service = hospital.start()
    hospital.offer()
    assert slow.started.wait(20)
    hospital.close(included=False)
    hospital.settled()
    until(lambda: "stopped" in hospital.events())
    assert service.store.outbox() == []
    assert hospital.transfer.calls.count("Open") == 0


def test_a_later_round_supersedes_an_earlier_one(started, slow):
    hospital = started(run_round=slow)
    hospital.offer(0)
    assert slow.started.wait(20)
    hospital.offer(1)
    until(lambda: slow.begun == [0, 1])
    slow.free.set()
    hospital.sent()
    assert [o.round for o in hospital.transfer.opened.values()] == [1]


def test_a_round_waits_for_the_close_of_the_one_before(make, slow):
    slow.held = False
    hospital = make(run_round=slow)
    service = hospital.start()
    hospital.offer(0)
    hospital.sent()
    hospital.offer(1)
    until(lambda: len(hospital.control.sessions) >= 2, what="for a session in which closes are named")
    assert slow.begun == [0]
    hospital.close(0)
    hospital.sent(2)
    assert slow.begun == [0, 1]
    assert service.store.committed("run-1")[1] == 0


@pytest.mark.parametrize("state", ["aborted", "finished"])
def test_a_run_that_ends_takes_its_task_with_it(make, slow, state):
    hospital = make(run_round=slow)
    service = hospital.start()
    hospital.offer()
    assert slow.started.wait(20)
    hospital.control.last.send(run_ended=pb.RunEnded(run_id="run-1", state=state, reason="by the lead"))
    until(lambda: "ended" in hospital.events())
    assert service.store.outbox() == []
    assert service.store.history()[0].state == state
    until(lambda: service.pulse().activity == pb.IDLE)


def test_a_receipt_that_was_lost_is_fetched_after_the_close(started):
    hospital = started()
    hospital.transfer.lose_receipt = 1000
    real_open = hospital.transfer.Open
    hospital.transfer.Open = lambda request, context: (
        context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        if hospital.transfer.receipts
        else real_open(request, context)
    )
    hospital.host.stop()
    hospital.host.start()
    until(lambda: len(hospital.control.sessions) >= 2)
    hospital.offer()
    until(lambda: hospital.transfer.receipts)
    hospital.close(included=True)
    hospital.settled()
    hospital.stop()
    hospital.transfer.Open = real_open
    hospital.host.stop()
    hospital.host.start()
    service = hospital.start()
    until(lambda: service.store.receipts())
    assert service.store.missing_receipts() == []


def killed(hospital, attempt=0) -> None:
    """Leave on the disk what a service leaves that is killed in the middle of the first task."""
    store = SiloStore(hospital.folder / "silo.db")
    store.begin_training(TRAINED, attempt)
    store.close_database()


@pytest.mark.fault(
    "a hospital", "is killed twice in the middle of one task", "it refuses the run until the lead resumes it"
)
def test_a_task_that_killed_the_service_twice_is_refused_until_the_run_is_resumed(make, started, slow):
    slow.held = False
    hospital = started(run_round=slow)
    hospital.stop()
    killed(hospital)
    hospital.start()
    assert [n.text for n in hospital.notices if n.event == "killed"] == [
        "run-1 round 1: the service was killed in the middle of it (1 time so far)"
    ]
    hospital.transfer.refusal = (grpc.StatusCode.UNAVAILABLE, "away")
    hospital.offer()
    until(lambda: [a for a in hospital.answers() if a.accepted and a.code == "E-RUN-46"], "what the lead is told")
    until(lambda: "staged" in hospital.events())
    hospital.stop()
    hospital.transfer.refusal = None

    other = make(run_round=slow)  # a hospital that does not get as far
    other.start()
    for _ in range(2):
        other.stop()
        killed(other)
        other.start()
    before = len(slow.begun)
    for round in (0, 1):  # of the same run, whichever the round
        other.offer(round)
        until(lambda round=round: [a for a in other.answers() if a.round == round and a.code == "E-RUN-46"])
    assert not any(a.accepted for a in other.answers())
    assert len(slow.begun) == before
    other.offer(attempt=1)
    until(lambda: "staged" in other.events())
    assert len(slow.begun) == before + 1


def test_a_service_that_is_told_to_stop_in_the_middle_of_a_task_hands_it_back_and_was_not_killed(make, slow):
    hospital = make(run_round=slow)
    for _ in range(3):
        hospital.start()
        session = hospital.control.last
        hospital.offer()
        assert slow.started.wait(20)
        slow.started.clear()
        hospital.stop()
        assert session.over.is_set()
    assert all(answer.accepted for answer in hospital.answers())
    hospital.start()
    assert "killed" not in hospital.events()
    slow.free.set()
    hospital.train()
