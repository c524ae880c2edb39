"""Records of the store, as plain values. Times are seconds since 1970, UTC."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from fl_core.kinds import RunKind, kind_of
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from service_core.pki.identity import PeerCertificate


class RunState(Enum):
    """The states of a run. A paused or failed run keeps its data and can be resumed; it does nothing until then.

    PAUSED: the lead decides: hospitals are missing or refuse, classes are left out, or the worker ended
    FAILED: any other error
    """

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self not in LIVE

    @property
    def comes_from(self) -> tuple[RunState, ...]:
        """The states that may precede this one; `RunStore` refuses all other transitions."""
        return _COMES_FROM[self]


LIVE = (RunState.WAITING, RunState.RUNNING)
RESUMABLE = (RunState.PAUSED, RunState.FAILED)
_COMES_FROM = {
    RunState.WAITING: RESUMABLE,
    RunState.RUNNING: (RunState.WAITING,),
    RunState.PAUSED: LIVE,
    RunState.FAILED: LIVE,
    RunState.FINISHED: (RunState.RUNNING,),
    RunState.ABORTED: (*LIVE, *RESUMABLE),
}


class ObjectKind(Enum):
    """The role of an object in a run."""

    MANIFEST = "manifest"
    BASE = "base"
    BUNDLE = "bundle"
    STATE = "state"
    WEIGHTS = "weights"
    KEYS = "keys"
    CENSUS = "census"


@dataclass(frozen=True, slots=True)
class DataOffer:
    """A silo's declaration of its data.

    Attributes:
        nominal_size: privacy units
        holds: the classes that it has, if declared
        train_examples, test_examples: upper bounds; 0 if not declared
        metrics: what its evaluations can send besides correct answers
        masks: whether its version supports masked updates
        labels_digest: of its label dictionary, if declared
        coarse_labels: whether its dictionary has names that stand for one of several classes
        validation_only: whether it evaluates models and trains none
        label_source: the digest of the table of labels or the query that its labels come from, if declared
    """

    name: str = ""
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    nominal_size: float = 0.0
    holds: tuple[str, ...] = ()
    train_examples: float = 0.0
    test_examples: float = 0.0
    metrics: tuple[str, ...] = ()
    masks: bool = False
    labels_digest: str = ""
    coarse_labels: bool = False
    validation_only: bool = False
    label_source: str = ""


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate of a silo. serial and fingerprint: lower-case hex; enrolled: by an invitation."""

    serial: str
    name: str
    fingerprint: str
    pem: str
    issued: float
    until: float
    enrolled: bool
    first_used: float | None = None


@dataclass(frozen=True, slots=True)
class Silo:
    """A hospital: `revoked` or a member. proofs: its renewals as (previous key, signature).

    validation_only: invited to evaluate models and never asked to train; `data` has its own declaration.
    """

    name: str
    revoked: bool
    certificate: IssuedCertificate
    since: float
    proofs: tuple[tuple[str, str], ...] = ()
    software: str = ""
    data: DataOffer = field(default_factory=DataOffer)
    last_seen: float = 0.0
    validation_only: bool = False


@dataclass(frozen=True, slots=True)
class Lead:
    """A certificate of a lead. revoked: the reason, or None."""

    serial: str
    name: str
    fingerprint: str
    issued: float
    until: float
    first_used: float | None = None
    revoked: str | None = None

    @classmethod
    def of(cls, peer: PeerCertificate) -> Lead:
        begin, end = peer.not_before.timestamp(), peer.not_after.timestamp()
        return cls(peer.serial, peer.identity.name, peer.fingerprint, begin, end)


class MembershipStatus(NamedTuple):
    """A certificate's status at one moment.

    revoked: the reason it was revoked, or None   member: a silo or lead of this name and key is in force, or an
    invitation of this serial is open   renewed_at: since when its successor is in use, or None
    """

    revoked: str | None
    member: bool
    renewed_at: float | None = None


@dataclass(frozen=True, slots=True)
class InvitationRow:
    """An issued invitation. used, fingerprint, certificate: when, by which key, the resulting serial."""

    serial: str
    name: str
    issued: float
    expires: float
    withdrawn: float | None = None
    used: float | None = None
    fingerprint: str | None = None
    certificate: str | None = None
    validation_only: bool = False


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run. accuracy is -1 before the first evaluation; state_object: digest of the newest server state.

    coverage: `ClassCoverage.facts`, from before round 1 on
    facts: `DerivedFacts.to_dict`; None: of an earlier version.
    """

    id: str
    name: str
    request_id: str
    spec: str
    manifest: str
    manifest_digest: str
    method: str
    data: str
    rounds: int
    members: tuple[str, ...]
    state: RunState = RunState.WAITING
    reason: str = ""
    closed: int = 0
    state_object: str | None = None
    model_digest: str = ""
    accuracy: float = -1.0
    best_accuracy: float = -1.0
    bytes_up: int = 0
    bytes_down: int = 0
    created: float = 0.0
    ended: float = 0.0
    coverage: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] | None = None

    @property
    def kind(self) -> RunKind:
        return kind_of(self.method, self.rounds)

    @property
    def parent(self) -> str:
        """The id of the run that this one continues; empty if there is none."""
        start = json.loads(self.manifest).get("start")
        return str(start["run"]) if start else ""


@dataclass(frozen=True, slots=True)
class Steering:
    """A lead's changes to a running run, and the classes that each silo was seen to have.

    attempt: how often the run was resumed   quorum: 0 for the manifest's   extended_s: seconds added to the round
    `extended_round`.
    """

    run_id: str
    attempt: int = 0
    quorum: int = 0
    excluded: tuple[str, ...] = ()
    extended_round: int = 0
    extended_s: float = 0.0
    holds: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def extension(self, round: int) -> float:
        """Return how many seconds the lead added to a round."""
        return self.extended_s if self.extended_round == round else 0.0


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A round of a run: open, or closed with its record. base: the object that each silo of the cohort gets."""

    run_id: str
    record: RoundRecord
    is_open: bool
    cohort: tuple[str, ...]
    base_digest: str = ""
    base_size: int = 0
    opened: float = 0.0
    closed: float = 0.0

    @property
    def round(self) -> int:
        return self.record.round


class EvaluationSummary(NamedTuple):
    """The sums of a closed round that an accuracy needs. Fields as in `RoundRecord`."""

    correct: tuple[float, ...]
    examples: tuple[float, ...]
    included: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contribution:
    """An announced update. received: when it was committed, with object and record on disk; None until then."""

    id: str
    run_id: str
    round: int
    kind: TaskKind
    silo: str
    manifest_digest: str
    base_digest: str
    object_digest: str
    size: int
    received: float | None = None


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event of a run; numbers start at 1 and have no gap."""

    run_id: str
    number: int
    at: float
    kind: str
    round: int = 0
    silo: str = ""
    text: str = ""
