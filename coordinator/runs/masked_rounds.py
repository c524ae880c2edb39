"""Masked rounds, in which the coordinator reads only sums: all differences from plain rounds.

The set of a round is on disk before any member sees it. No other set is ever sent for the round: after a restart the
same bytes are sent again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from coordinator.pki.membership import roster_member
from coordinator.runs.dispatcher import census_closed
from coordinator.runs.open_round import AwaitedSilo, OpenRound, Waiting
from coordinator.runs.preflight import ask_preflight
from coordinator.runs.run_facts import DerivedFacts
from coordinator.runs.services import Services
from coordinator.runs.tasks import FromMember, RunInterrupted, RunTasks, stated, unless_over
from coordinator.storage.records import Contribution, RunState, Steering, StoredRun
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import FederationError, RefusedError, StateError, UnavailableError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import BLOCKS, MASKS
from privacy.secagg.coordinator_side import OpenedSeeds, SealedRound, UploadSum
from privacy.secagg.keys import KeyVerifier, MemberKeys, VerifiedKeys, pinned_signature, verify_keys
from privacy.secagg.messages import Bytes, Confirmation, RevealedShares, Seal
from privacy.secagg.terms import Round, SecaggError, SecaggRun
from privacy.secagg_run import secagg_run
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import read_bytes
from protos.wire.tasks import FROM_WIRE, TO_WIRE, TaskKey
from service_core.audit_log.lines import REFUSED
from service_core.audit_log.lines import LogEntry as AuditEntry
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, identity_of

ENTRY_BYTES = 16 << 10
"""Size limit of one member's keys with its certificate: the certificate may have unsigned bytes around it."""
CONFIRMING_S = 2.0
"""How long to wait for further connected members after enough have confirmed."""
_AUDITED = 300
"""Characters of a silo's message in an audit line."""
_LOOK_S = 0.5
"""Interval of checks whether the lead has extended a wait."""


@dataclass(slots=True, eq=False)
class MaskedRounds:
    """The rounds of a masked run.

    All members report that they are ready and send their keys, which are stored as one object. A separate round, the
    census, counts classes. The answers of a round's members open its sum, for one set of updates.

    Guarantees: stored keys never change. Only one set is ever sent for a round, after it is on disk, and no other set
    is opened. Of its updates only a lost one is requested again.
    """

    run: StoredRun
    manifest: RunManifest
    facts: DerivedFacts
    services: Services
    tasks: RunTasks
    _secagg: SecaggRun = field(init=False)
    _keys: VerifiedKeys = field(init=False)
    _open: OpenRound = field(init=False)
    _opened: SetOpening | None = None

    def __post_init__(self) -> None:
        self._secagg = secagg_run(self.run.id, self.manifest)

    @property
    def masks(self) -> Mapping[str, str]:
        """Fields that an offer has besides the model."""
        store = self.services.store.secagg
        return {
            "secagg_keys_digest": store.keys(self.run.id) or "",
            "secagg_census_digest": store.census(self.run.id) or "",
        }

    # ---- keys ------------------------------------------------------------------------------------------------------

    def prepare(self, steering: Steering) -> ClassCoverage | None:  # noqa: ARG002 - masks need all members
        """Store the keys of all members, after they report that they can do their part.

        They are asked again if the list of members has changed in the meantime: a member with a renewed certificate
        signs its keys with an identity that only the new list contains. Raises as `ask_preflight`.
        """
        store = self.services.store.secagg
        while store.keys(self.run.id) is None:
            roster = self.services.roster()
            arguments = self.run, self.manifest, self.services.dispatcher, self.tasks
            ready = ask_preflight(*arguments, check=self._check_keys, roster=roster)
            if self.services.roster() == roster:
                self.keep_keys({name: pending.entry for name, pending in ready.items() if pending.entry is not None})
        self._keys = self._stored_keys()
        return None

    def _check_keys(self, name: str, sent: pb.SecaggEntry | None) -> None:
        """Check the keys in a member's answer.

        Raises RefusedError: E-WIRE-01 without keys, E-ID-33 on keys that the member's certificate did not sign.
        """
        if sent is None:
            raise RefusedError(
                "E-WIRE-01",
                "the hospital sent no keys for a run with masks, because its software does not support them: "
                "upgrade it, or submit the run with secagg=off",
            )
        if (size := sent.ByteSize()) > ENTRY_BYTES:
            raise SecaggError("E-ID-33", f"expected keys of at most {ENTRY_BYTES} bytes, found {size}")
        entry = _entry(name, sent)
        if not self._trust()(entry, entry.message(self._secagg)):
            raise SecaggError(
                "E-ID-33",
                f"the keys of {name} for this run are not signed with the certificate that the coordinator has",
            )

    def keep_keys(self, entries: Mapping[str, pb.SecaggEntry]) -> None:
        """Fix the keys of all members as one object; raises SecaggError (E-ID-33) as `verify_keys`."""
        keys = pb.SecaggKeys(entries=[entries[name] for name in self.run.members])
        self._vouch(keys, self._trust())
        raw, objects = keys.SerializeToString(deterministic=True), self.services.objects
        with objects.lock:
            text = f"the keys of {len(entries)} hospitals are fixed for this run"
            self.services.store.secagg.keep_keys(self.run.id, objects.put(raw), len(raw), text)

    def _stored_keys(self) -> VerifiedKeys:
        """Read the stored keys; raises StateError (E-STATE-63, E-STATE-22) if they are missing or damaged."""
        raw = self.services.objects.verified(self.masks["secagg_keys_digest"]).read_bytes()
        try:
            return self._vouch(pb.SecaggKeys.FromString(raw), lambda *_: True)  # at the time when they were stored
        except DecodeError as error:
            raise StateError("E-STATE-22", f"the stored keys of {self.run.id} are damaged") from error

    def _vouch(self, keys: pb.SecaggKeys, trusted: KeyVerifier) -> VerifiedKeys:
        entries = zip(self.run.members, keys.entries, strict=True)
        return verify_keys(self._secagg, [_entry(name, entry) for name, entry in entries], trusted)

    def _trust(self) -> KeyVerifier:
        members = {s.name: roster_member(s) for s in self.services.store.members.silos() if not s.revoked}
        pins = {name: member.fingerprint for name, member in members.items()}
        consortium = identity_of(self.services.signer().cert_pem).identity.consortium
        return lambda entry, message: pinned_signature(entry, message, consortium, pins, members)

    # ---- the census ------------------------------------------------------------------------------------------------

    @property
    def _floor(self) -> bool:
        """Whether the census decides which classes are left out; then the run cannot begin without it."""
        return self.facts.least > 1

    def begin(self, census: Callable[[], Sequence[float]]) -> tuple[Sequence[float] | None, ClassCoverage | None]:
        """Hold the census before round 0; return its counts if rounds need them, and the class coverage.

        census: runs it. Raises UnavailableError if the run needs it and not all hospitals answer.
        """
        if not self.facts.counts_classes or self.run.closed:
            return None, None
        counted = self._census(census)
        if counted is None:
            return None, self.facts.coverage(self.manifest.schema.classes, (), why="not all hospitals were counted")
        coverage = self.facts.coverage(self.manifest.schema.classes, [int(n) for n in counted])
        return counted if self._floor else None, coverage

    def _census(self, census: Callable[[], Sequence[float]]) -> Sequence[float] | None:
        """Return how many hospitals each class has: from an earlier census, or from a new one.

        Without an earlier census, None if the run does not need one and not all hospitals answer, or a training round
        has begun, or the coverage is stored.
        """
        store, run = self.services.store, self.run
        digest = store.secagg.census(run.id)
        if digest is not None:
            proof = pb.SecaggCensus.FromString(self.services.objects.verified(digest).read_bytes())
            return list(proof.hospitals)
        begun = store.runs.round(run.id, 0)
        if not self._floor and (run.coverage is not None or (begun and begun.record.kind.trains)):
            return None
        try:
            counted = census()
        except UnavailableError:
            if self._floor or self.fixed_set(0, TaskKey.census(run.id).kind) is not None:
                raise
            store.secagg.drop_census(run.id)
            return None
        for name in run.members:
            self.services.dispatcher.send(name, census_closed(run.id))
        return counted

    def keep_census(self, hospitals: Sequence[int]) -> None:
        """Store the proof of the number of hospitals per class, which every silo checks."""
        opened, objects = self._opened, self.services.objects
        assert opened is not None
        assert opened.opened is not None
        proof = pb.SecaggCensus(
            seal=opened.seal,
            confirmations=[pb.Confirmed(index=u, signature=signature) for u, signature in opened.state.confirmations],
            uploads=[objects.path(update.object_digest).read_bytes() for update in opened.seal.updates],
            seeds=[pb.OpenedSeed(block=b, member=u, seed=s) for (b, u), s in opened.opened.by_member.items()],
            hospitals=hospitals,
        )
        raw, text = proof.SerializeToString(deterministic=True), "all hospitals are counted, class by class"
        with objects.lock:
            self.services.store.secagg.keep_census(self.run.id, objects.put(raw), len(raw), text)

    # ---- a round ---------------------------------------------------------------------------------------------------

    def base(self, kind: TaskKind) -> str:
        """Return the base of a round without a model: a census starts from all members' keys."""
        return self._keys.digest.hex() if kind.census else ""

    def opened(self, now: OpenRound) -> None:
        """Record the open round."""
        self._open = now

    def needed(self, kind: TaskKind, cohort: int, needed: int) -> int:
        """Return how many updates of a cohort close a round; a census that the run needs takes all."""
        return cohort if kind.census and self._floor else needed

    def fixed_set(self, round: int, kind: TaskKind) -> Mapping[str, str] | None:
        """Return the digests of the only acceptable updates; None while the set is not fixed."""
        return self.services.store.secagg.updates(self.run.id, round, kind)

    def unmask(self, number: int, kind: TaskKind, members: Collection[str], blocks: Collection[str]) -> OpenedSeeds:
        """Fix the set of a round if needed, and have its members open the seeds of the masks in its sum.

        members: whose updates were added   blocks: those to open
        Raises UnavailableError (E-RUN-45) if too few confirm or answer, or an update of the set is missing; SecaggError
        (E-RUN-48) if a dealer's shares are wrong, E-RUN-51 on too small a set; RunInterrupted if the run was aborted or
        the service stops.
        """
        run, store, names = self._secagg, self.services.store, self.run.members
        row = store.runs.round(run.run_id, number)
        assert row is not None
        cohort, base = [names.index(name) for name in row.cohort], bytes.fromhex(row.base_digest)
        round = run.round(self._keys.digest, kind.value, number, base, cohort)
        updates = {u.silo: u for u in store.contributions.arrivals(run.run_id, number)}
        total = UploadSum.elsewhere(round, {names.index(name): self._envelope(updates[name]) for name in members})
        message = self._fix(total, kind, members)
        state = SealedRound(total, _seal_of(message, kind), self._keys.sign)
        if {BLOCKS[block] for block, _, _ in round.opened(state.inside)} != set(blocks):
            raise ValueError(f"expected answers for the blocks that are opened, found {sorted(blocks)}")
        deadline_s = self.manifest.deadline_s
        self._opened = SetOpening(self.services, self.tasks, round, kind, state, message, deadline_s)
        self._open.set_fixed(self._opened.waiting)
        with self.tasks.asking(self._opened):
            return self._opened.open()

    def _envelope(self, update: Contribution) -> tuple[bytes, Bytes, Bytes, Bytes]:
        """Read an upload's fields besides its words: its digest, salt, commitments and packages."""
        parts = read_bytes(self.services.objects.path(update.object_digest), MASKS)
        return bytes.fromhex(update.object_digest), parts["salt"], parts["commitments"], parts["packages"]

    def _fix(self, total: UploadSum, kind: TaskKind, members: Collection[str]) -> pb.SecaggSeal:
        """Return the stored set; if there is none, store the set of the added updates."""
        services, number = self.services, total.round.number
        message = services.store.secagg.seal(self.run.id, number, kind)
        if message is None:
            credentials = services.signer()
            key = certificates.load_key(credentials.key_pem, "the key in force")
            seal = total.seal(lambda text: certificates.sign(key, Seal.CONTEXT, text))
            text = f"{len(members)} of {total.round.n} updates received; waiting for {total.round.t} confirmations"
            made = _message_of(seal, kind, credentials.cert_pem)
            message = unless_over(lambda: services.store.secagg.keep_seal(made, kind, text))
            own_name = identity_of(credentials.cert_pem).identity.uri
            about = f"run={self.run.id} round={number + 1} set={', '.join(sorted(members))}"
            services.record(AuditEntry(own_name, "sealed", about))
        inside = {self.run.members[update.index] for update in message.updates}
        if lost := sorted(inside - set(members)):
            raise UnavailableError(
                "E-RUN-45",
                f"round {number + 1}: the updates of {', '.join(lost)} were lost after the aggregation set was "
                "fixed. All updates of the set are needed, and the set cannot change: start these hospitals, then "
                "resume the run",
            )
        return message


def _entry(name: str, sent: pb.SecaggEntry) -> MemberKeys:
    return MemberKeys(name, sent.agree, sent.sign, sent.certificate_pem, sent.signature)


def _message_of(seal: Seal, kind: TaskKind, signer_pem: bytes) -> pb.SecaggSeal:
    updates = [pb.SealedUpdate(index=u, object_digest=digest.hex()) for u, digest in seal.uploads]
    return pb.SecaggSeal(
        run_id=seal.run_id,
        round=seal.round,
        kind=TO_WIRE[kind],
        base_digest=seal.base_digest.hex(),
        keys_digest=seal.keys_digest,
        updates=updates,
        signer_pem=signer_pem,
        signature=seal.signature,
    )


def _seal_of(message: pb.SecaggSeal, kind: TaskKind) -> Seal:
    uploads = tuple((u.index, bytes.fromhex(u.object_digest)) for u in message.updates)
    base = bytes.fromhex(message.base_digest)
    return Seal(message.run_id, kind.value, message.round, base, message.keys_digest, uploads, message.signature)


# ---- the members of a fixed set ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SetOpening:
    """Asks the members of a fixed set to open its sum (`coordinator.runs.tasks.FixedSet`). Thread-safe.

    deadline_s: from the first question until the run pauses. Only the thread of `open` waits for seeds.

    Guarantees: no message of a member counts for another member or stops the round's waiting.
    """

    services: Services
    tasks: RunTasks
    round: Round
    kind: TaskKind
    state: SealedRound
    seal: pb.SecaggSeal
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    opened: OpenedSeeds | None = None
    _opens: bool = False
    _joins: bool = False
    _stopped: bool = False
    _began: float = field(init=False)
    _answers: int = 0
    _refused: dict[str, str] = field(default_factory=dict)
    _late: dict[tuple[str, type], FromMember] = field(default_factory=dict)
    """Messages that arrived while seeds were reconstructed: the newest of each kind per silo."""
    _noted: set[tuple[str, str]] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._began = self.clock()

    # ---- called by the dispatcher --------------------------------------------------------------------------------

    def messages_for(self, silo: str) -> Sequence[pb.CoordinatorMessage]:
        """Return the requests that a member still has to answer: to confirm, to open, both, or none."""
        with self._changed:
            member = self._member(silo)
            if member is None or self._joins or member not in self.state.unanswered:
                return []
            unconfirmed = member in self.state.unconfirmed
            messages = [pb.CoordinatorMessage(secagg_seal=self.seal)] if unconfirmed else []
            if self._opens:
                messages.append(pb.CoordinatorMessage(secagg_open=self._opening(member)))
            return messages

    def receive(self, silo: str, message: FromMember) -> None:
        """Process a silo's message; an invalid one is recorded once, and changes nothing."""
        if (message.round, FROM_WIRE.get(message.kind)) != (self.round.number, self.kind):
            return  # of an earlier round, which was opened without it
        try:
            with self._changed:
                if self._joins:
                    self._late[silo, type(message)] = message
                    return
                self._take(silo, message)
                self._changed.notify_all()
        except FederationError as error:
            self._note(silo, error, f"its answer about the aggregation set is invalid: {error}")
        else:
            if isinstance(message, pb.SecaggRefusal):
                why = stated(message.code, message.reason)
                self._note(silo, why, f"it does not open the aggregation set{self._blamed_text(message)}: {why}")
        self.tasks.notify()

    def interrupt(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _take(self, silo: str, message: FromMember) -> None:
        member = self._member(silo)
        if member is None:
            raise SecaggError("E-RUN-51", f"expected a member of the round, found {silo}")
        about = (message.run_id, self.kind.value, message.round, message.seal_hash)
        if isinstance(message, pb.SecaggConfirm):
            self.state.confirm(member, Confirmation(*about, message.signature))
            self._refused.pop(silo, None)
        elif isinstance(message, pb.SecaggShares):
            shares = tuple((s.block, s.dealer, s.slot, s.share) for s in message.shares)
            self.state.answer(member, RevealedShares(*about, shares))
            self._refused.pop(silo, None)
        elif message.seal_hash in (b"", self.state.hash) and member in self.state.unanswered:
            self._refused[silo] = stated(message.code, "").code + self._blamed_text(message)

    def _member(self, silo: str) -> int | None:
        members = self.round.run.members
        index = members.index(silo) if silo in members else -1
        return index if index in self.round.cohort else None

    def _opening(self, member: int) -> pb.SecaggOpen:
        opening = self.state.opening(member)
        return pb.SecaggOpen(
            run_id=opening.run_id,
            round=opening.round,
            kind=TO_WIRE[self.kind],
            seal_hash=opening.seal_hash,
            confirmations=[pb.Confirmed(index=u, signature=signature) for u, signature in opening.confirmations],
            packages=[pb.SealedPackage(index=u, salt=salt, package=p) for u, salt, p in opening.packages],
        )

    def _blamed_text(self, refusal: pb.SecaggRefusal) -> str:
        members = self.round.run.members
        blamed = [members[u] for u in refusal.blamed[:1] if u < len(members)]
        return f", because of {blamed[0]}" if blamed else ""

    def _note(self, silo: str, error: FederationError, text: str) -> None:
        with self._changed:
            if (silo, error.code) in self._noted:
                return  # each is stored permanently
            self._noted.add((silo, error.code))
        self.tasks.event("refused", self.round.number, silo, text)
        about = f"run={self.round.run.run_id} round={self.round.number + 1}: {text[:_AUDITED]}"
        consortium = identity_of(self.services.signer().cert_pem).identity.consortium
        self.services.record(
            AuditEntry(Identity(CertificateRole.SILO, consortium, silo).uri, "sealed set", about, REFUSED, error.code)
        )

    # ---- called by the run's thread ------------------------------------------------------------------------------

    def open(self) -> OpenedSeeds:
        """Ask until the seeds can be reconstructed; raises as `MaskedRounds.unmask`."""
        names = [self.round.run.members[u] for u in self.round.cohort]
        self.tasks.notify()
        self.tasks.ask_members(self, names)
        self._wait(self._is_confirmed)
        with self._changed:
            self._opens, self._answers = True, self.round.t
        self.tasks.notify()
        self.tasks.ask_members(self, names)
        while self.opened is None:
            self._wait(lambda: self.round.n - len(self.state.unanswered) >= self._answers)
            self.opened = self._join()
            if self.opened is None:
                self.tasks.ask_members(self, names)
        for answerer, dealer in self.opened.wrong:
            mine, whose = self.round.run.members[answerer], self.round.run.members[dealer]
            text = f"its share of a seed of {whose} is invalid: one of the two sent wrong data"
            self._note(mine, SecaggError("E-RUN-48", text), f"E-RUN-48: {text}; the sum is still exact")
        return self.opened

    def _join(self) -> OpenedSeeds | None:
        """Reconstruct the seeds from the received answers; None if one is wrong and another answer can show which."""
        with self._changed:
            answers, self._joins = self.round.n - len(self.state.unanswered), True
        try:
            return self.state.join()
        except SecaggError as error:
            if error.blamed is not None or answers == self.round.n:
                raise
            self._answers = answers + 1
            return None
        finally:
            with self._changed:
                late, self._late, self._joins = self._late, {}, False
            for (silo, _), message in late.items():
                self.receive(silo, message)

    def _is_confirmed(self) -> bool:
        """Tell whether enough members confirmed, and no other connected one is awaited (at most `CONFIRMING_S`)."""
        silent = {self.round.run.members[u] for u in self.state.unconfirmed}
        if self.round.n - len(silent) < self.round.t:
            return False
        soon = silent & self.services.dispatcher.connected() - set(self._refused)
        return not soon or self.clock() - self._began >= CONFIRMING_S

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while not done():
                if self._stopped:
                    raise RunInterrupted(self.round.run.run_id)
                willing = self.round.n - len(self._refused)
                if (left := self._left()) <= 0 or willing < max(self.round.t, self._answers):
                    raise self._too_few()
                self._changed.wait(min(left, _LOOK_S))

    def _left(self) -> float:
        steering = self.services.store.steering.of(self.tasks.run_id)
        return self._began + self.deadline_s + steering.extension(self.round.number) - self.clock()

    def _silent(self) -> list[str]:
        silent = self.state.unanswered if self._opens else self.state.unconfirmed
        return [self.round.run.members[u] for u in silent]

    def _too_few(self) -> FederationError:
        silent, what = self._silent(), "answer for" if self._opens else "confirm"
        listed = [f"{name} (refused: {self._refused[name]})" if name in self._refused else name for name in silent]
        return UnavailableError(
            "E-RUN-45",
            f"round {self.round.number + 1}: {self.round.t} of {self.round.n} hospitals must {what} the aggregation "
            f"set, and {self.round.n - len(silent)} did. No answer from {', '.join(listed)}: nothing was opened, "
            "and `coordinator resume` asks for the same set again",
        )

    def waiting(self) -> Waiting:
        """Return how many members confirmed (once enough have: answered), and which have not."""
        with self._changed:
            silent = self._silent()
            present = self.round.n - len(silent)
        left, offline = max(0.0, self._left()), self.services.dispatcher.offline_for
        awaited = tuple(AwaitedSilo(name, left, offline(name), ()) for name in silent)
        return Waiting(self.round.number, present, self.round.t, awaited, sealed=True)


# ---- after a restoration ---------------------------------------------------------------------------------------------


def end_masked_runs(store: CoordinatorStore, remove: Callable[[str], None]) -> list[StoredRun]:
    """End every unfinished masked run whose members' keys were fixed; return them.

    For a coordinator restored from a backup: a hospital opens one set per round and deletes the keys of every round
    that it saw closed. The backup does not know which rounds these are.

    remove: deletes an object that is no longer needed, by its digest.
    """
    open_runs = [run for run in store.runs.all() if run.state in RunState.ABORTED.comes_from]
    begun = [run for run in open_runs if store.secagg.keys(run.id) is not None]
    ended = [store.runs.end(run.id, RunState.ABORTED, _end_reason(run)) for run in begun]
    for run in ended:
        store.contributions.delete_unreferenced(run.id, remove)
    return ended


def _end_reason(run: StoredRun) -> str:
    rounds = f"{run.closed} of {run.rounds} rounds" if run.rounds else "the evaluation"
    if run.closed == 0:
        remedy = "No round was closed: submit it again"
    elif run.closed < run.rounds:
        remedy = f"Continue from its last model, in a new run with new keys: coordinator run --from {run.id} "
        remedy += f"rounds={run.rounds - run.closed}"
    else:
        remedy = f"All rounds are trained: coordinator evaluate {run.id} evaluates its model with new keys"
    charged = ""
    if DerivedFacts.of(run).private:
        charged = (
            ". Each hospital's ledger keeps the charges of its rounds, also of those since the backup (on the "
            "hospital's machine: silo ledger show). A new run adds its own"
        )
    return (
        f"E-RUN-54: the coordinator was restored and has {rounds} closed. In a run with secure aggregation, hospitals "
        f"answer no round twice. {remedy}{charged}"
    )
