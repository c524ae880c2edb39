"""A silo's records of finished tasks, and the attestation that it sends with an update."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from fl_core.types.clinical import ClinicalMetrics
from privacy.accounting.uncertainty import EvaluationNoise
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey


@dataclass(frozen=True, slots=True)
class LocalEvaluation:
    """A silo's measurement of the received model, per class; it stays here.

    noise: None for exact counts   clinical: in runs that measure it, whether it is sent or not.
    """

    classes: tuple[str, ...]
    correct: tuple[float, ...]
    examples: tuple[float, ...]
    noise: EvaluationNoise | None = None
    clinical: ClinicalMetrics | None = None


class Attestation(NamedTuple):
    """Statement of this hospital with an update: SHA-256 of its policy, and the end of its ledger.

    policy: empty without a policy   seq, head: number and hash of the ledger's last event; 0 and empty without one
    sealed: the ledger's spending, hex, encrypted for this hospital   restored: how often the ledger was restored.
    """

    policy: str = ""
    seq: int = 0
    head: str = ""
    sealed: str = ""
    restored: int = 0

    @property
    def signed(self) -> Attestation:
        """The attestation without the sealed part, as a signed receipt repeats it."""
        return self._replace(sealed="")

    def message(self) -> pb.Attestation:
        return pb.Attestation(
            policy_digest=self.policy,
            ledger_seq=self.seq,
            ledger_head=self.head,
            ledger_sealed=bytes.fromhex(self.sealed),
            ledger_restored=self.restored,
        )

    @classmethod
    def of(cls, message: pb.Attestation) -> Attestation:
        return cls(
            message.policy_digest,
            message.ledger_seq,
            message.ledger_head,
            message.ledger_sealed.hex(),
            message.ledger_restored,
        )


def ledger_position(attested: Attestation) -> tuple[int, int]:
    """Return a key that sorts attestations by time. Event numbers start lower again after a restoration."""
    return attested.restored, attested.seq


NO_ATTESTATION = Attestation()


def read_attestation(text: str, sealed: bytes | None = None) -> Attestation:
    """Read an attestation from the columns `attested` and `sealed` of a task's row."""
    attestation = Attestation(*json.loads(text)) if text else NO_ATTESTATION
    return attestation if sealed is None else attestation._replace(sealed=sealed.hex())


class UnprotectedUpdate(NamedTuple):
    """An update without differential privacy for some split. fingerprint: of its data; empty if unknown.

    splits: those without a privacy bound; None if unknown: an earlier version made the update and recorded neither the
    splits nor its privacy.
    """

    run_id: str
    fingerprint: str
    splits: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """The update of a finished task.

    state_digest: None for an evaluation   receipt: signed; None before it arrives   refused: the coordinator's reason
    for a final refusal, otherwise None   mirrored: the state counts only if the bundle is included   coordinator: the
    incarnation that offered the task   staged: whether it is in the outbox; False if its round was reopened for another
    incarnation and there is no receipt from that one yet.
    """

    key: TaskKey
    manifest_digest: str
    base_digest: str
    contribution_id: str
    object_digest: str
    size: int
    state_digest: str | None = None
    receipt: bytes | None = None
    refused: str | None = None
    mirrored: bool = True
    attested: Attestation = NO_ATTESTATION
    coordinator: str = ""
    staged: bool = True

    def facts(self) -> dict[str, Any]:
        """Return the update's description in upload messages and receipts, by field name."""
        return {
            "contribution_id": self.contribution_id,
            "run_id": self.key.run_id,
            "round": self.key.round,
            "kind": self.key.wire_kind,
            "manifest_digest": self.manifest_digest,
            "object_digest": self.object_digest,
            "size": self.size,
        }

    def signed_facts(self) -> pb.Receipt:
        """Return a receipt with the fields that follow from this entry."""
        return pb.Receipt(**self.facts(), attestation=self.attested.signed.message() if any(self.attested) else None)
