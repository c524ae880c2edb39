"""A masked round whose set is fixed: its members confirm the set, then answer, and the masks come off the sum.

Only what members answered is kept in memory; a restart asks for it anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.runs.open_round import AwaitedSilo, Waiting
from coordinator.runs.services import Services
from coordinator.runs.tasks import FromMember, RunInterrupted, RunTasks, stated
from fl_core.errors import FederationError, UnavailableError
from fl_core.types.enums import TaskKind
from privacy.secagg.coordinator_side import Opened, SealedRound
from privacy.secagg.messages import Confirmation, Shares
from privacy.secagg.terms import Round, SecaggError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import FROM_WIRE, TO_WIRE
from service_core.audit_log.lines import REFUSED, Entry
from service_core.pki.identity import Identity, Kind, identity_of

CONFIRMING_S = 2.0
"""For so long every member that is connected is awaited, although enough have confirmed."""
_AUDITED = 300
"""Characters of what a silo said that an audit line has."""
_LOOK_S = 0.5
"""After which a wait looks whether the lead has extended it."""


@dataclass(slots=True, eq=False)
class SetOpening:
    """Asks the members of a fixed set to open its sum (`coordinator.runs.tasks.FixedSet`). Thread-safe.

    deadline_s: from the first question to the pause of the run. No thread but the run's waits while masks are taken
    off.

    Guarantees: whatever a member sends, it can neither speak for another nor end the round's wait.
    """

    services: Services
    tasks: RunTasks
    round: Round
    kind: TaskKind
    state: SealedRound
    seal: pb.SecaggSeal
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    opened: Opened | None = None
    _opens: bool = False
    _joins: bool = False
    _stopped: bool = False
    _began: float = field(init=False)
    _answers: int = 0
    _refused: dict[str, str] = field(default_factory=dict)
    _late: dict[tuple[str, type], FromMember] = field(default_factory=dict)
    """What came while masks were being taken off, which takes seconds: the newest of each kind of a silo."""
    _noted: set[tuple[str, str]] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._began = self.clock()

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
        self.tasks.event("refused", self.round.number, silo, text)
        about = f"run={self.round.run.run_id} round={self.round.number + 1}: {text[:_AUDITED]}"
        consortium = identity_of(self.services.signer().cert_pem).identity.consortium
        self.services.record(Entry(Identity(Kind.SILO, consortium, silo).uri, "sealed set", about, REFUSED, error.code))

    # ---- asked by the run's thread -------------------------------------------------------------------------------

    def open(self) -> None:
        """Ask until the masks are off; raises as `MaskedRounds.unmask`."""
        names = [self.round.run.members[u] for u in self.round.cohort]
        self.tasks.notify()
        self.tasks.ask_members(self, names)
        self._wait(self._is_confirmed)
        with self._changed:
            self._opens, self._answers = True, self.round.t
        self.tasks.notify()
        self.tasks.ask_members(self, names)
        wrong: Sequence[tuple[int, int]] | None = None
        while wrong is None:
            self._wait(lambda: self.round.n - len(self.state.unanswered) >= self._answers)
            wrong = self._join()
            if wrong is None:
                self.tasks.ask_members(self, names)
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
            f"round {self.round.number + 1}: expected {self.round.t} of {self.round.n} hospitals to {what} its sealed "
            f"set, found {self.round.n - len(silent)}; without an answer: {', '.join(listed)}: nothing was opened, and "
            "`coordinator resume` asks for the same set again",
        )

    def waiting(self) -> Waiting:
        """Say how many confirmed or, once enough have, answered, and who may still."""
        with self._changed:
            silent = self._silent()
            there = self.round.n - len(silent)
        left, offline = max(0.0, self._left()), self.services.dispatcher.offline_for
        awaited = tuple(AwaitedSilo(name, left, offline(name), ()) for name in silent)
        return Waiting(self.round.number, there, self.round.t, awaited, sealed=True)
