"""What a hospital tells the coordinator in a private run: field by field public, or charged, or no fact of its data.

Every field of every message that a silo sends is listed here with what it is; a field that is added to the protocol and
not to the list fails. Two hospitals that differ in everything but what they declare then tell the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_core import datasets
from fl_core.rounds.silo_round import run_silo_round
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from protos.consilium.v1 import federation_pb2 as pb
from silo.storage.home import Home
from tests.support.fake_coordinator import Hospital
from tests.support.privacy import HOSPITAL, SEEDED_POLICY, hospital_level, private

DECLARED = "the same whatever the records are: the software's, the run's, or typed by the operator"
STATED = "set by the hospital about itself: its policy file, the ends of its ledger's and its audit log's chains"
DRAWN = "random numbers of this process: keys and seeds of masks, shares of these, and what is signed with them"
ASKED = "follows from what the coordinator itself sent of a sealed set"
CODED = "a code of this software, and for what is the hospital's own a text that goes with the code"
CLEAR = "the classes that its records train, in runs without privacy and masks alone; a private run has none"
CHARGED = "the bundle: released by the mechanisms, charged in the ledger; or its hash"

TOLD = {
    "Hello.protocol_min": DECLARED,
    "Hello.protocol_max": DECLARED,
    "Hello.software": DECLARED,
    "Hello.data": DECLARED,
    "DataOffer.name": DECLARED,
    "DataOffer.shape": DECLARED,
    "DataOffer.classes": DECLARED,
    "DataOffer.nominal_size": DECLARED,
    "DataOffer.holds": DECLARED,
    "DataOffer.train_examples": DECLARED,
    "DataOffer.test_examples": DECLARED,
    "DataOffer.metrics": DECLARED,
    "DataOffer.masks": DECLARED,
    "DataOffer.labels_digest": DECLARED,
    "DataOffer.label_source": DECLARED,
    "DataOffer.coarse_labels": DECLARED,
    "DataOffer.validation_only": STATED,
    "Hello.staged": DECLARED,
    "Hello.policy_digest": STATED,
    "Hello.roster_version": DECLARED,
    "Hello.masked_answers": DECLARED,
    "Hello.instance": DRAWN,
    "Hello.previous_instance": DRAWN,
    "RoundRef.run_id": DECLARED,
    "RoundRef.round": DECLARED,
    "RoundRef.kind": DECLARED,
    "Pulse.activity": DECLARED,
    "Pulse.run_id": DECLARED,
    "Pulse.round": DECLARED,
    "Pulse.done": DECLARED,
    "Pulse.total": DECLARED,
    "Answer.run_id": DECLARED,
    "Answer.round": DECLARED,
    "Answer.kind": DECLARED,
    "Answer.accepted": CODED,
    "Answer.code": CODED,
    "Answer.reason": CODED,
    "Settled.run_id": DECLARED,
    "Settled.round": DECLARED,
    "Settled.kind": DECLARED,
    "SiloMessage.hello": DECLARED,
    "SiloMessage.pulse": DECLARED,
    "SiloMessage.answer": DECLARED,
    "SiloMessage.settled": DECLARED,
    "SiloMessage.preflight": DECLARED,
    "PreflightAnswer.run_id": DECLARED,
    "PreflightAnswer.manifest_digest": DECLARED,
    "PreflightAnswer.ready": CODED,
    "PreflightAnswer.code": CODED,
    "PreflightAnswer.reason": CODED,
    "PreflightAnswer.secagg_entry": DRAWN,
    "PreflightAnswer.trains": CLEAR,
    "SecaggEntry.agree": DRAWN,
    "SecaggEntry.sign": DRAWN,
    "SecaggEntry.certificate_pem": DECLARED,
    "SecaggEntry.signature": DRAWN,
    "SiloMessage.secagg_confirm": DECLARED,
    "SecaggConfirm.run_id": DECLARED,
    "SecaggConfirm.round": DECLARED,
    "SecaggConfirm.kind": DECLARED,
    "SecaggConfirm.seal_hash": ASKED,
    "SecaggConfirm.masked_answers": DECLARED,
    "SecaggConfirm.signature": DRAWN,
    "SiloMessage.secagg_shares": DECLARED,
    "SecaggShares.run_id": DECLARED,
    "SecaggShares.round": DECLARED,
    "SecaggShares.kind": DECLARED,
    "SecaggShares.seal_hash": ASKED,
    "SecaggShares.shares": DRAWN,
    "SecaggShare.block": ASKED,
    "SecaggShare.dealer": ASKED,
    "SecaggShare.slot": ASKED,
    "SecaggShare.share": DRAWN,
    "SiloMessage.secagg_refusal": DECLARED,
    "SecaggRefusal.run_id": DECLARED,
    "SecaggRefusal.round": DECLARED,
    "SecaggRefusal.kind": DECLARED,
    "SecaggRefusal.seal_hash": ASKED,
    "SecaggRefusal.code": CODED,
    "SecaggRefusal.reason": CODED,
    "SecaggRefusal.blamed": ASKED,
    "OpenRequest.contribution_id": DECLARED,
    "OpenRequest.run_id": DECLARED,
    "OpenRequest.round": DECLARED,
    "OpenRequest.kind": DECLARED,
    "OpenRequest.manifest_digest": DECLARED,
    "OpenRequest.base_digest": DECLARED,
    "OpenRequest.object_digest": CHARGED,
    "OpenRequest.size": DECLARED,
    "OpenRequest.attestation": STATED,
    "OpenRequest.log_head": STATED,
    "OpenRequest.ledger_sealed": STATED,
    "LogHead.number": STATED,
    "LogHead.hash": STATED,
    "LogHead.signature": STATED,
    "LogHead.certificate_pem": STATED,
    "LogHead.restored": STATED,
    "LogHead.restored_hash": STATED,
    "Attestation.policy_digest": STATED,
    "Attestation.ledger_seq": STATED,
    "Attestation.ledger_head": STATED,
    "Attestation.ledger_sealed": STATED,
    "Attestation.ledger_restored": STATED,
    "Chunk.object": DECLARED,
    "Chunk.offset": DECLARED,
    "Chunk.data": CHARGED,
    "CommitRequest.contribution_id": DECLARED,
    "GetRequest.digest": DECLARED,
    "GetRequest.offset": DECLARED,
}
SENT = ("SiloMessage", "OpenRequest", "Chunk", "CommitRequest", "GetRequest")
"""Requests of the two services that a silo calls in a run; enrolment carries keys and signatures alone."""


def fields_of(name: str, found: dict[str, object] | None = None) -> dict[str, object]:
    """List every field below a message, through the messages that it holds."""
    found = {} if found is None else found
    for field in pb.DESCRIPTOR.message_types_by_name[name].fields:
        if f"{name}.{field.name}" not in found:
            found[f"{name}.{field.name}"] = field
            if field.message_type is not None:
                fields_of(field.message_type.name, found)
    return found


def test_every_field_that_a_silo_sends_in_a_run_is_declared_or_charged() -> None:
    found: dict[str, object] = {}
    for name in SENT:
        fields_of(name, found)
    assert sorted(found) == sorted(TOLD)
    called = [m.input_type.name for s in ("Control", "Transfer") for m in pb.DESCRIPTOR.services_by_name[s].methods]
    assert set(called) == set(SENT)


DATA = ("digits/p3c4/1", "digits/p2c5/0")
"""Two hospitals that share no count: 507 and other records, four and five classes."""


class Heard:
    """All that one hospital told in one round, sorted by what it may depend on."""

    def __init__(self, folder: Path, run: object, data: str, do: object = run_silo_round) -> None:
        self.training: list[pb.Pulse] = []
        ledger = self._ledger(folder, data)

        def watched(*args: object) -> object:
            try:
                return do(*args)  # type: ignore[operator]
            finally:
                self.training.append(hospital.service.pulse())  # type: ignore[union-attr]

        hospital = Hospital(folder / "home", run, watched, data=data, nominal_size=500.0)  # type: ignore[arg-type]
        try:
            hospital.start()
            hospital.offer()
            if do is run_silo_round:
                hospital.sent()
            else:
                hospital.refused()
        finally:
            hospital.end()
        self.hellos = [s.hello for s in hospital.control.sessions]
        self.answers = hospital.answers()
        self.opened = list(hospital.transfer.opened.values())
        self.bundle = [bytes(raw) for raw in hospital.transfer.uploads.values()]
        self.ledger = ledger

    @staticmethod
    def _ledger(folder: Path, data: str) -> Ledger:
        home = Home(folder / "home").make()
        home.policy.write_text(SEEDED_POLICY)
        ledger = Ledger(home.ledger)
        register(ledger, datasets.load(data), "mine")
        for name in ("mine/train", "mine/test", HOSPITAL):
            ledger.set_budget(name, 100.0, 1e-5, "dpo", "test")
        return ledger

    def plain(self) -> list[pb.Hello | pb.Answer | pb.OpenRequest | pb.Pulse]:
        """Copy the messages without what the table calls stated, drawn or charged."""
        found = []
        for message in (*self.hellos, *self.answers, *self.opened, *self.training):
            copy = type(message)()
            copy.CopyFrom(message)
            for field in list(copy.DESCRIPTOR.fields):
                if TOLD[f"{copy.DESCRIPTOR.name}.{field.name}"] in (STATED, DRAWN, CHARGED):
                    copy.ClearField(field.name)
            if not (isinstance(copy, pb.Hello) and copy in found):  # a session that was replaced says the same again
                found.append(copy)
        return found


@pytest.mark.integration
@pytest.mark.parametrize("run", [private, hospital_level], ids=["records", "hospital"])
def test_two_hospitals_of_other_records_tell_the_same_but_for_what_is_charged(run, tmp_path) -> None:
    labels = [datasets.load(d).train.labels for d in DATA]
    assert len(labels[0]) != len(labels[1])
    assert set(labels[0].tolist()) != set(labels[1].tolist())
    made = run()
    mine, theirs = (Heard(tmp_path / str(k), made, data) for k, data in enumerate(DATA))
    assert mine.plain() == theirs.plain()
    assert mine.hellos[0].data.nominal_size == 500
    assert mine.bundle != theirs.bundle
    assert [len(b) for b in mine.bundle] == [len(b) for b in theirs.bundle]
    for collection in ("mine/train", "mine/test"):
        assert mine.ledger.history(collection) == theirs.ledger.history(collection) != []


@pytest.mark.parametrize("run", [private, hospital_level], ids=["records", "hospital"])
def test_a_pulse_of_a_private_run_tells_no_step(run, tmp_path) -> None:
    (pulse,) = Heard(tmp_path, run(), DATA[0]).training
    assert pulse == pb.Pulse(activity=pb.TRAINING, run_id="run-1", round=0)


@pytest.mark.parametrize("run", [private, hospital_level], ids=["records", "hospital"])
def test_no_error_tells_what_it_met_in_the_data(run, tmp_path) -> None:
    """The exception names a patient, a path and a number; the answer has the code's own text."""

    def fails(*_: object) -> None:
        raise ValueError(f"/data/doe.png: patient Doe has {torch.tensor(17)} lesions")

    heard = Heard(tmp_path, run(), DATA[0], fails)
    refused = next(a for a in heard.answers if not a.accepted)
    assert refused.code == "E-RUN-31"
    for word in ("Doe", "17", "/data", "ValueError", "lesions"):
        assert word not in refused.reason
    assert heard.bundle == []
