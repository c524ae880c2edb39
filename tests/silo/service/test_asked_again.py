"""A coordinator that was restored, or says so, asks again for a private round that this hospital has paid for."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from privacy.ledger.ledger import Ledger
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until
from tests.support.fake_coordinator import Hospital, receipt_for
from tests.support.privacy import TEST, TRAIN, budgeted, private

pytestmark = pytest.mark.integration


@pytest.fixture
def hospital(make, tmp_path) -> Hospital:
    """Give a hospital that has paid for round 1, whose update has a receipt and was included."""
    budgeted(tmp_path / "home0", 100.0, 100.0)
    made = make(private(reserve_rounds=3))
    made.start()
    made.offer(incarnation="one")
    made.sent()
    made.close()
    made.settled()
    assert len(entries(made)) == 2
    return made


def entries(hospital: Hospital) -> list[tuple[str, str]]:
    ledger = Ledger(hospital.folder / "ledger.db")
    return [(entry, state) for name in (TRAIN, TEST) for entry, state, _ in ledger.entries(name)]


def taken(hospital: Hospital) -> None:
    until(lambda: "taken" in hospital.events(), str([n.text for n in hospital.notices]))


@pytest.mark.fault(
    "a coordinator",
    "asks again for a private round whose update it has",
    "the hospital checks the receipt; nothing is trained or charged",
)
def test_a_private_round_with_a_receipt_is_neither_trained_nor_charged_again(hospital):
    before = entries(hospital)
    hospital.offer(incarnation="two")
    taken(hospital)
    assert entries(hospital) == before
    assert hospital.events().count("training") == 1
    assert [entry.receipt is not None for entry in hospital.service.store.outbox()] == [True]
    hospital.close()
    hospital.settled(2)
    assert hospital.service.store.outbox() == []
    assert len(hospital.service.store.receipts()) == 1
    hospital.offer(incarnation="two")
    assert hospital.refused().code == "E-RUN-33"


def test_the_question_for_a_receipt_is_repeated_until_it_is_answered(hospital):
    before = entries(hospital)
    hospital.transfer.refusal = (grpc.StatusCode.UNAVAILABLE, "E-NET-12: away")
    hospital.offer(incarnation="two")
    until(lambda: hospital.events().count("trouble") >= 3)
    assert hospital.events().count("training") == 1
    hospital.transfer.refusal = None
    taken(hospital)
    assert entries(hospital) == before


def forged(opened: pb.OpenRequest) -> pb.Receipt:
    made = receipt_for(opened, "center1")
    made.signature = made.signature[:-1] + bytes([made.signature[-1] ^ 1])
    return made


def of_another_object(opened: pb.OpenRequest) -> pb.Receipt:
    return receipt_for(opened, "center1", object_digest="e" * 64)


def of_another_hospital(opened: pb.OpenRequest) -> pb.Receipt:
    return receipt_for(opened, "center2")


def of_another_ledger(opened: pb.OpenRequest) -> pb.Receipt:
    other = pb.OpenRequest()
    other.CopyFrom(opened)
    other.attestation.ledger_seq += 1
    return receipt_for(other, "center1")


def of_another_round(opened: pb.OpenRequest) -> pb.Receipt:
    return receipt_for(opened, "center1", round=1)


@pytest.mark.fault(
    "a coordinator",
    "shows a false receipt for a private round that it asks for again",
    "the round is refused; nothing is trained, charged or stored",
)
@pytest.mark.parametrize(
    ("lie", "code"),
    [
        (forged, "E-ID-14"),
        (of_another_object, "E-WIRE-12"),
        (of_another_hospital, "E-WIRE-12"),
        (of_another_ledger, "E-WIRE-12"),
        (of_another_round, "E-WIRE-12"),
    ],
)
def test_a_false_receipt_refuses_the_round(hospital, lie: Callable[[pb.OpenRequest], pb.Receipt], code):
    before = entries(hospital)
    ((name, honest),) = hospital.transfer.receipts.items()
    hospital.transfer.receipts[name] = lie(hospital.transfer.opened[name])
    hospital.offer(incarnation="two")
    assert hospital.refused().code == code
    assert entries(hospital) == before
    assert hospital.events().count("training") == 1
    assert hospital.service.store.outbox() == []
    hospital.transfer.receipts[name] = honest
    hospital.offer(incarnation="two", attempt=1)
    taken(hospital)
    assert entries(hospital) == before


@pytest.mark.parametrize(
    "told", ["E-WIRE-07: expected the object that was taken", "E-RUN-06: expected an open round", "E-WIRE-12: no"]
)
def test_a_question_that_is_refused_refuses_the_round_before_any_charge(hospital, told):
    before = entries(hospital)
    hospital.transfer.refusal = (grpc.StatusCode.FAILED_PRECONDITION, told)
    hospital.offer(incarnation="two")
    assert hospital.refused().code == told.partition(":")[0]
    assert entries(hospital) == before
    assert hospital.events().count("training") == 1


@pytest.mark.fault(
    "a coordinator",
    "denies receiving a private round's update and requests it again and again",
    "charged at most three times, reported each time",
)
def test_a_coordinator_that_denies_a_receipt_is_paid_again_three_times_at_most_and_never_silently(hospital):
    for times, incarnation in enumerate(("two", "three"), start=1):
        hospital.transfer.forget()
        hospital.offer(incarnation=incarnation)
        hospital.sent(times + 1)
        assert len(entries(hospital)) == 2 * (times + 1)
        told = [notice.text for notice in hospital.notices if notice.event == "charged"]
        assert len(told) == times
        assert f"({times} of at most 3 times)" in told[-1]
        assert "although it signed for it before" in hospital.notices[hospital.events().index("repeated")].text
        hospital.close()
        hospital.settled(times + 1)
    hospital.transfer.forget()
    hospital.offer(incarnation="four")
    assert hospital.refused().code == "E-BUDGET-12"
    charged = [state for _, state in entries(hospital) if state != "REFUSED"]
    assert charged == ["SPENT"] * 6
