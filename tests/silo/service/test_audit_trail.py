"""The hospital's audit log: what a round leaves in it, and what a hostile coordinator cannot write there."""

from __future__ import annotations

import pytest

from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import log_heads, receipts
from service_core.audit_log.heads import SignedHead
from service_core.storage.private_files import Credentials
from tests.support import until
from tests.support.audit_log import entries, texts, verified
from tests.support.fake_coordinator import CONSORTIUM, Hospital, authority, receipt_for

SILO, COORDINATOR = f"silo://{CONSORTIUM}/center1", f"coordinator://{CONSORTIUM}"


def round_of(hospital: Hospital, number: int) -> None:
    hospital.offer(number)
    hospital.sent(number + 1)
    hospital.close(number)
    hospital.settled(number + 1)


def answering_with(monkeypatch, *heads: SignedHead) -> None:
    """Let receipts come with these ends of the coordinator's log, one after the other."""
    left = list(heads)

    def receipt(opened: pb.OpenRequest, holder: str, **other: object) -> pb.Receipt:
        made = receipt_for(opened, holder, **other)
        if left:
            made.log_head.CopyFrom(log_heads.to_message(left.pop(0)))
        return made

    monkeypatch.setattr("tests.support.fake_coordinator.receipt_for", receipt)


def head(number: int, hash: str, own: Credentials, of: str = COORDINATOR) -> SignedHead:
    return SignedHead.sign(of, number, hash * 32, own)


def test_a_round_leaves_lines_without_measurements_and_the_ends_of_both_logs_cross(make, monkeypatch):
    hospital = make()
    answering_with(monkeypatch, head(41, "ab", authority().issue_server()))
    hospital.start()
    round_of(hospital, 0)
    (opened,) = hospital.transfer.opened.values()
    sent = log_heads.of_message(opened.log_head, SILO, authority().ca_pem)
    (stored,) = hospital.service.store.receipts()
    hospital.stop()
    found = entries(hospital.folder)
    task = "run=run-1 round=1 kind=train"
    assert [(e.who, e.what, e.about, e.outcome) for e in found if e.what != "connected"] == [
        (SILO, "service started", "", "allowed"),
        (COORDINATOR, "training", task, "allowed"),
        (SILO, "staged", task, "allowed"),
        (COORDINATOR, "head", "its log ends at line 41", "allowed"),
        (SILO, "sent", task, "allowed"),
        (COORDINATOR, "closed", f"{task} included=True", "allowed"),
        (SILO, "service stopped", "", "allowed"),
    ]
    assert next(e.bytes for e in found if e.what == "sent") == opened.size
    kept = pb.Receipt.FromString(stored)
    assert not kept.HasField("log_head")  # it is in the audit log, and not a second time beside every task
    receipts.verify(kept, authority().ca_pem, CONSORTIUM)
    assert verified(hospital.folder, sent).agreed == 1
    staged = next(n.text for n in hospital.notices if n.event == "staged")
    assert staged.split(": ")[1][:10] not in "".join(texts(hospital.folder))


@pytest.mark.fault(
    "a coordinator",
    "restores its audit log, or signs two different ones",
    "each hospital reports it at its next round and keeps both ends",
)
def test_a_coordinator_whose_log_goes_back_is_noticed(make, monkeypatch):
    hospital = make()
    own = authority().issue_server()
    answering_with(monkeypatch, head(41, "ab", own), head(40, "cd", own))
    hospital.start()
    round_of(hospital, 0)
    round_of(hospital, 1)
    until(lambda: [n for n in hospital.notices if n.facts.get("code") == "E-STATE-80"], "the finding")
    hospital.stop()
    assert [e.head.number for e in entries(hospital.folder) if e.head] == [41, 40]
    assert "log went back" in [e.what for e in entries(hospital.folder)]


@pytest.mark.parametrize("lie", ["another key", "another name", "no signature"])
def test_an_end_that_the_coordinator_did_not_sign_is_not_kept(make, monkeypatch, lie):
    hospital = make()
    own = authority().issue_server()
    lies = {
        "another key": head(7, "ab", authority().issue_lead("eve")),
        "another name": head(7, "ab", own, of="coordinator://other"),
        "no signature": SignedHead(COORDINATOR, 7, "ab" * 32, b"", own.cert_pem),
    }
    answering_with(monkeypatch, lies[lie])
    hospital.start()
    round_of(hospital, 0)
    until(lambda: [n for n in hospital.notices if n.facts.get("code") == "E-ID-14"], "the finding")
    hospital.stop()
    assert [e for e in entries(hospital.folder) if e.head] == []


@pytest.mark.fault(
    "a coordinator",
    "writes control characters and long texts into its messages",
    "none reaches the hospital's audit log",
)
def test_what_a_coordinator_writes_stays_out_of_the_lines(started):
    hospital = started()
    evil = '\x1b[2J"}\n{"number":1}' + "x" * 10_000
    hospital.control.last.send(run_ended=pb.RunEnded(run_id=evil[:100], state=evil, reason=evil))
    hospital.control.last.send(preflight=pb.Preflight(run_id="run-1", manifest_digest=evil))
    hospital.control.last.send(run_ended=pb.RunEnded(run_id="run-1", state=evil, reason=evil))
    until(lambda: "ended" in hospital.events(), "the end")
    hospital.stop()
    raw = "".join(texts(hospital.folder))
    assert all(32 <= ord(character) < 127 for character in raw)
    assert len(raw) < 4000
    assert verified(hospital.folder).notes == ()
