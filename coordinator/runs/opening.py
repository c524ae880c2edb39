"""The sum of a masked round is opened: its set is stored, signed by t members, and answered for by any t of them.

The set is on the disk before anybody is told of it, and is the only one of its round, whenever the service ends: after
a restart the same bytes go out again. Only what members answered is kept in memory; a restart asks for it anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from coordinator.runs.dispatcher import Dispatcher, FromMember, stated
from coordinator.runs.round_closer import AwaitedSilo, RoundCloser, Waiting
from coordinator.runs.tasks import RunInterrupted
from coordinator.storage.records import Contribution
from coordinator.storage.store import Store
from fl_core.aggregation.flat_blocks import BLOCKS, CHECK_WORDS, CLASSES
from fl_core.aggregation.masked_sum import unsigned
from fl_core.errors import FederationError, StateError, UnavailableError
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import MASKS
from fl_core.types.values import RoundContext
from privacy.secagg.coordinator_side import Opened, SealedRound, UploadSum
from privacy.secagg.keys import Vouched
from privacy.secagg.messages import Bytes, Confirmation, Seal, Shares
from privacy.secagg.terms import Round, SecaggError, SecaggRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import BundleFile
from protos.wire.tasks import FROM_WIRE, TO_WIRE
from service_core.audit_log.lines import REFUSED, Entry
from service_core.pki import certificates
from service_core.pki.identity import Identity, Kind, identity_of
from service_core.storage.object_store import ObjectStore
from service_core.storage.private_files import Credentials

CONFIRMING_S = 2.0
"""For so long every member that is connected is awaited, although enough have confirmed."""
_AUDITED = 300
"""Characters of what a silo said that an audit line has."""
_LOOK_S = 0.5
"""After which a wait looks whether the lead has extended it."""


@dataclass(slots=True, eq=False)
class Openings:
    """Makes what opens each round of one masked run (`fl_core.rounds.engine.Openings`).

    deadline_s: from the seal to the pause of the run   signer: the coordinator's certificate in force   record: writes
    a line into the audit log.
    """

    run: SecaggRun
    keys: Vouched
    deadline_s: float
    signer: Callable[[], Credentials]
    record: Callable[[Entry], object]
    closer: RoundCloser
    store: Store
    objects: ObjectStore
    dispatcher: Dispatcher
    clock: Callable[[], float] = time.monotonic
    current: SealedMembers | None = None

    def __call__(self, context: RoundContext, kind: TaskKind) -> RoundOpening:
        return RoundOpening(self, context.round, kind)


@dataclass(frozen=True, slots=True)
class RoundOpening:
    """Opens one round's sum (`fl_core.aggregation.masked_sum.Opening`)."""

    of: Openings
    number: int
    kind: TaskKind

    def unmask(self, sums: Mapping[str, Tensor], members: Collection[str], blocks: Collection[str]) -> None:
        """Fix the set, unless it is, ask its members, and take the masks off.

        Raises UnavailableError (E-RUN-45) where too few confirm or answer, or a sealed update is missing; SecaggError
        (E-RUN-48) where masks do not cancel or a dealer's shares are wrong, E-RUN-51 on too small a set;
        RunInterrupted when the run was aborted or the service stops.
        Guarantees: one set is ever sent for a round, and it is on the disk before it is; nothing is opened otherwise.
        """
        of = self.of
        row = of.store.runs.round(of.run.run_id, self.number)
        assert row is not None
        cohort = [of.run.members.index(name) for name in row.cohort]
        base = bytes.fromhex(row.base_digest)
        round = of.run.round(of.keys.digest, self.kind.value, self.number, base, cohort)
        updates = {u.silo: u for u in of.store.contributions.arrivals(of.run.run_id, self.number)}
        kept = {of.run.members.index(name): self._envelope(updates[name]) for name in members}
        total = UploadSum.of(round, [unsigned(sums[block]) for block in BLOCKS], kept)
        message = self._sealed(total, members)
        state = SealedRound(total, _seal_of(message, self.kind), of.keys.sign)
        if {BLOCKS[block] for block, _, _ in round.opened(state.inside)} != set(blocks):
            raise ValueError(f"expected to open what the members answer for, found {sorted(blocks)}")
        of.closer.sealed()
        asked = SealedMembers(of, round, self.kind, state, message)
        of.current = asked
        try:
            with of.dispatcher.asking(of.run.run_id, asked):
                asked.open()
        finally:
            of.current = None
        if self.kind is TaskKind.CENSUS:
            self._keep_census(asked, sums, updates)

    def _keep_census(
        self, asked: SealedMembers, sums: Mapping[str, Tensor], updates: Mapping[str, Contribution]
    ) -> None:
        """Store what proves how many hospitals each class has: every silo finds it the same."""
        of, state = self.of, asked.state
        assert asked.opened is not None
        found = [int(n) for n in sums[CLASSES][CHECK_WORDS:]]
        proof = pb.SecaggCensus(
            seal=asked.seal,
            confirmations=[pb.Confirmed(index=u, signature=signature) for u, signature in state.confirmations],
            uploads=[of.objects.path(updates[of.run.members[u]].object_digest).read_bytes() for u in state.inside],
            seeds=[pb.OpenedSeed(block=b, member=u, seed=s) for (b, u), s in asked.opened.own_seeds.items()],
            hospitals=found,
        )
        raw, text = proof.SerializeToString(deterministic=True), "all hospitals are counted, class by class"
        with of.objects.lock:
            of.store.secagg.keep_census(of.run.run_id, of.objects.put(raw), len(raw), text)

    def _envelope(self, update: Contribution) -> tuple[bytes, Bytes, Bytes, Bytes]:
        """Read what an upload holds beside its words: its digest, salt, commitments and packages."""
        part = BundleFile(self.of.objects.path(update.object_digest))[MASKS].total
        salt, commitments, packages = (part[name].numpy() for name in ("salt", "commitments", "packages"))
        return bytes.fromhex(update.object_digest), salt, commitments, packages

    def _sealed(self, total: UploadSum, members: Collection[str]) -> pb.SecaggSeal:
        """Return the stored set; where there is none, store that of what was added."""
        of = self.of
        message = of.store.secagg.seal(of.run.run_id, self.number, self.kind)
        if message is None:
            own = of.signer()
            key = certificates.load_key(own.key_pem, "the key in force")
            seal = total.seal(lambda text: certificates.sign(key, Seal.CONTEXT, text))
            text = f"{len(members)} of {total.round.n} updates are its set; {total.round.t} hospitals must answer"
            try:
                message = of.store.secagg.keep_seal(_message_of(seal, self.kind, own.cert_pem), self.kind, text)
            except StateError as error:  # aborted in between
                if error.code != "E-RUN-11":
                    raise
                raise RunInterrupted(str(error)) from error
            own_name = identity_of(own.cert_pem).identity.uri
            about = f"run={of.run.run_id} round={self.number + 1} set={', '.join(sorted(members))}"
            of.record(Entry(own_name, "sealed", about))
        inside = {of.run.members[update.index] for update in message.updates}
        if lost := sorted(inside - set(members)):
            raise UnavailableError(
                "E-RUN-45",
                f"round {self.number + 1}: expected the updates of its set, found none here of {', '.join(lost)}: they "
                "were lost after the set was fixed, and it stays as it is; start these hospitals, then resume the run",
            )
        return message


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


# ---- the members of a sealed round -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SealedMembers:
    """What the members of a sealed round have said (`coordinator.runs.dispatcher.SealedSet`). Thread-safe.

    No thread but the run's waits while masks are taken off.

    Guarantees: whatever a member sends, it can neither speak for another nor end the round's wait.
    """

    of: Openings
    round: Round
    kind: TaskKind
    state: SealedRound
    seal: pb.SecaggSeal
    opened: Opened | None = None
    _opens: bool = False
    _joins: bool = False
    _stopped: bool = False
    _began: float = 0.0
    _answers: int = 0
    _refused: dict[str, str] = field(default_factory=dict)
    _late: dict[tuple[str, type], FromMember] = field(default_factory=dict)
    """What came while masks were being taken off, which takes seconds: the newest of each kind of a silo."""
    _noted: set[tuple[str, str]] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # ---- asked by the dispatcher ---------------------------------------------------------------------------------

    def messages_for(self, silo: str) -> Sequence[pb.CoordinatorMessage]:
        """Return what a member is still asked for: to confirm, to answer, both, or nothing."""
        with self._changed:
            member = self._member(silo)
            if member is None or self._joins or member not in self.state.unanswered:
                return []
            unconfirmed = member in self.state.unconfirmed
            asked = [pb.CoordinatorMessage(secagg_seal=self.seal)] if unconfirmed else []
            if self._opens:
                asked.append(pb.CoordinatorMessage(secagg_open=self._opening(member)))
            return asked

    def receive(self, silo: str, message: FromMember) -> None:
        """Take what a silo says; what does not fit is noted once, and changes nothing."""
        if (message.round, FROM_WIRE.get(message.kind)) != (self.round.number, self.kind):
            return  # of a round before, which was opened without it
        try:
            with self._changed:
                if self._joins:
                    self._late[silo, type(message)] = message
                    return
                self._take(silo, message)
                self._changed.notify_all()
        except FederationError as error:
            self._note(silo, error, f"what it said of the sealed set is not taken: {error}")
        else:
            if isinstance(message, pb.SecaggRefusal):
                why = stated(message.code, message.reason)
                self._note(silo, why, f"it does not open the sealed set{self._because(message)}: {why}")
        self.of.dispatcher.changes.notify()

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
            self.state.answer(member, Shares(*about, shares))
            self._refused.pop(silo, None)
        elif message.seal_hash in (b"", self.state.hash) and member in self.state.unanswered:
            self._refused[silo] = stated(message.code, "").code + self._because(message)

    def _member(self, silo: str) -> int | None:
        members = self.round.run.members
        index = members.index(silo) if silo in members else -1
        return index if index in self.round.cohort else None

    def _opening(self, member: int) -> pb.SecaggOpen:
        found = self.state.opening(member)
        return pb.SecaggOpen(
            run_id=found.run_id,
            round=found.round,
            kind=TO_WIRE[self.kind],
            seal_hash=found.seal_hash,
            confirmations=[pb.Confirmed(index=u, signature=signature) for u, signature in found.confirmations],
            packages=[pb.SealedPackage(index=u, salt=salt, package=p) for u, salt, p in found.packages],
        )

    def _because(self, refusal: pb.SecaggRefusal) -> str:
        members = self.round.run.members
        blamed = [members[u] for u in refusal.blamed[:1] if u < len(members)]
        return f", because of {blamed[0]}" if blamed else ""

    def _note(self, silo: str, error: FederationError, text: str) -> None:
        with self._changed:
            if (silo, error.code) in self._noted:
                return  # each is kept for good
            self._noted.add((silo, error.code))
        self.of.store.runs.event(self.round.run.run_id, "refused", self.round.number, silo, text)
        about = f"run={self.round.run.run_id} round={self.round.number + 1}: {text[:_AUDITED]}"
        consortium = identity_of(self.of.signer().cert_pem).identity.consortium
        self.of.record(Entry(Identity(Kind.SILO, consortium, silo).uri, "sealed set", about, REFUSED, error.code))

    # ---- asked by the run's thread -------------------------------------------------------------------------------

    def open(self) -> None:
        """Ask until the masks are off; raises as `RoundOpening.unmask`."""
        names = [self.round.run.members[u] for u in self.round.cohort]
        self._began = self.of.clock()
        self.of.dispatcher.changes.notify()
        self.of.dispatcher.ask_members(self, names)
        self._wait(self._is_confirmed)
        with self._changed:
            self._opens, self._answers = True, self.round.t
        self.of.dispatcher.changes.notify()
        self.of.dispatcher.ask_members(self, names)
        wrong: Sequence[tuple[int, int]] | None = None
        while wrong is None:
            self._wait(lambda: self.round.n - len(self.state.unanswered) >= self._answers)
            wrong = self._join()
            if wrong is None:
                self.of.dispatcher.ask_members(self, names)
        for answerer, dealer in wrong:
            mine, whose = self.round.run.members[answerer], self.round.run.members[dealer]
            text = f"its share of a seed of {whose} did not fit, by its own doing or that of {whose}"
            self._note(mine, SecaggError("E-RUN-48", text), f"E-RUN-48: {text}; the sum is exact all the same")

    def _join(self) -> Sequence[tuple[int, int]] | None:
        """Take the masks off with the answers that are there; None where one is wrong, and one more tells which."""
        with self._changed:
            answers, self._joins = self.round.n - len(self.state.unanswered), True
        try:
            self.opened = self.state.finish()
            return self.opened.wrong
        except SecaggError as error:
            if self.state.taken or error.blamed is not None or answers == self.round.n:
                raise
            self._answers = answers + 1
            return None
        finally:
            with self._changed:
                late, self._late, self._joins = self._late, {}, False
            for (silo, _), message in late.items():
                self.receive(silo, message)

    def _is_confirmed(self) -> bool:
        """Tell whether enough confirmed, and nobody who is connected may do so at once."""
        silent = {self.round.run.members[u] for u in self.state.unconfirmed}
        if self.round.n - len(silent) < self.round.t:
            return False
        soon = silent & self.of.dispatcher.connected() - set(self._refused)
        return not soon or self.of.clock() - self._began >= CONFIRMING_S

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while not done():
                if self._stopped:
                    raise RunInterrupted(self.round.run.run_id)
                due = self._began + self.of.deadline_s + self.of.closer.extension(self.round.number)
                willing = self.round.n - len(self._refused)
                if (left := due - self.of.clock()) <= 0 or willing < max(self.round.t, self._answers):
                    raise self._too_few()
                self._changed.wait(min(left, _LOOK_S))

    def _silent(self) -> list[str]:
        silent = self.state.unanswered if self._opens else self.state.unconfirmed
        return [self.round.run.members[u] for u in silent]

    def _too_few(self) -> FederationError:
        silent, what = self._silent(), "answer for" if self._opens else "confirm"
        listed = [f"{name} (refused: {self._refused[name]})" if name in self._refused else name for name in silent]
        return UnavailableError(
            "E-RUN-45",
            f"round {self.round.number + 1}: expected {self.round.t} of {self.round.n} hospitals to {what} its sealed "
            f"set, found {self.round.n - len(silent)}; without an answer: {', '.join(listed)}: nothing was opened, and "
            "`coordinator resume` asks for the same set again",
        )

    def waiting(self) -> Waiting:
        """Say how many confirmed or, once enough have, answered, and who may still."""
        with self._changed:
            silent = self._silent()
            there, began = self.round.n - len(silent), self._began or self.of.clock()
        left = began + self.of.deadline_s + self.of.closer.extension(self.round.number) - self.of.clock()
        offline = self.of.dispatcher.offline_for
        awaited = tuple(AwaitedSilo(name, max(0.0, left), offline(name), ()) for name in silent)
        return Waiting(self.round.number, there, self.round.t, awaited, sealed=True)
