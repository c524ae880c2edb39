"""The open round of a run: the silos that it waits for, and its close (`fl_core.rounds.closing`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.runs.services import Services
from coordinator.runs.tasks import RunTasks
from coordinator.storage.records import RoundRow, Steering
from fl_core.errors import FederationError, RefusedError, UnavailableError
from fl_core.rounds.closing import Attendance, ClosingRule, ClosingVerdict, Decision, PendingSilo
from fl_core.rounds.manifest import RunManifest
from service_core.console import format_duration

_NAMED = 20
"""Silos that one event names at most: late updates come one by one, and a thousand silos may be awaited."""
_HISTORY = 50
"""Rounds that are searched for consecutive misses of a silo."""


@dataclass(frozen=True, slots=True)
class AwaitedSilo:
    """A silo that a run waits for, as a lead sees it.

    left: seconds until it is given up   offline: seconds since it was last connected; None while it is connected
    classes: those that no other silo has brought in this round.
    """

    name: str
    left: float
    offline: float | None
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An open round: updates that arrived, updates that are needed, and the awaited silos.

    sealed: the set of a masked round is fixed, and the numbers count answers for the set.
    """

    round: int
    received: int
    needed: int
    awaited: tuple[AwaitedSilo, ...]
    sealed: bool = False


class OpenRound:
    """One open round, also after its set is fixed. Thread-safe; `look` is called several times a second.

    It waits for updates until the rule of `fl_core.rounds.closing` closes it. In a masked run it then waits for the
    members of its set. Each look reads the lead's changes from the store.

    Guarantees: an update whose receipt was signed before the decision is part of the round.
    """

    def __init__(
        self,
        row: RoundRow,
        needed: int,
        manifest: RunManifest,
        services: Services,
        tasks: RunTasks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with a stored round. needed: number of updates that close it."""
        store = services.store
        self.number, self.kind = row.round, row.record.kind
        self._cohort, self._manifest, self._store = row.cohort, manifest, store
        self._dispatcher, self._tasks, self._clock = services.dispatcher, tasks, clock
        self._rule = ClosingRule(needed, manifest.deadline_s, manifest.patience_s)
        self._began = clock()
        self._earlier = {
            name: min(max(0.0, came - row.opened), manifest.deadline_s)  # independent of clock changes
            for name, came in store.contributions.received(row.run_id, row.round).items()
        }
        self._missed = missed_in_a_row(store.runs.rounds(row.run_id, _HISTORY), row.cohort)
        self._declared = {s.name: s.data.holds for s in store.members.silos() if s.name in row.cohort}
        self._lock = threading.RLock()
        self._answered: dict[str, float] = {}
        self._refused: set[str] = set()
        self._brought: dict[str, frozenset[str]] = {}
        self._decision: Decision | None = None
        self._shown = frozenset[str]()
        self._members: Callable[[], Waiting] | None = None

    # ---- events of the round ---------------------------------------------------------------------------------------

    def record_classes(self, name: str, classes: frozenset[str]) -> None:
        """Record the classes of an update that has arrived, and is not accepted yet."""
        with self._lock:
            self._brought[name] = classes

    def accepted(self, name: str) -> None:
        with self._lock:
            self._answered[name] = max(self._clock() - self._began, self._earlier.get(name, 0.0))

    def refused(self, name: str) -> None:
        with self._lock:
            self._refused.add(name)

    def set_fixed(self, waiting: Callable[[], Waiting]) -> None:
        """Stop waiting for updates, and wait for the members of the set. waiting: returns the awaited ones."""
        with self._lock:
            self._members = waiting

    def close(self) -> None:
        """Store the classes of a training round's updates; called just before the round itself is stored."""
        with self._lock:
            seen = {name: sorted(self._brought[name]) for name in self._answered if name in self._brought}
        if seen and self.kind.trains:
            self._store.steering.note_classes(self._tasks.run_id, seen)

    # ---- decisions -------------------------------------------------------------------------------------------------

    def waiting(self) -> Waiting | None:
        """Return the awaited silos; None before the first look."""
        with self._lock:
            members, decision, now = self._members, self._decision, self._clock() - self._began
            if members is not None or decision is None:
                return None if members is None else members()
            awaited = tuple(
                AwaitedSilo(a.name, max(0.0, a.until - now), self._dispatcher.offline_for(a.name), a.classes)
                for a in decision.awaited
            )
            return Waiting(self.number, len(self._answered), self._rule.needed, awaited)

    def look(self) -> None:
        """Decide about the round, and give up silos that it no longer awaits."""
        steering = self._store.steering.of(self._tasks.run_id)
        with self._lock:
            if self._members is not None:
                return
            open_silos = self._tasks.open_silos()
            if excluded := open_silos & set(steering.excluded):
                self._tasks.give_up({name: excluded_error() for name in excluded})
            settled = {*self._answered, *self._refused}
            if any(name not in settled and name not in open_silos for name in self._cohort):
                return  # an update is being checked, or a task is about to be offered
            now, silos = self._clock() - self._began, self._attendance(steering)
            decision = replace(self._rule, extension=steering.extension(self.number)).decide(silos, now)
            self._decision = decision
        if decision.verdict is ClosingVerdict.WAIT:
            self._show(decision, now)
            return
        for lost in decision.lost:
            self._tasks.event("forgetting", self.number, lost.name, self._loss_warning(lost))
        self._tasks.give_up({s.name: self._given_up(s, decision) for s in silos if s.is_open})

    def _attendance(self, steering: Steering) -> list[Attendance]:
        return [
            Attendance(
                name,
                self._answered.get(name),
                name in self._refused,
                self._dispatcher.offline_for(name),
                self._missed.get(name, 0),
                self._classes(name, steering),
            )
            for name in self._cohort
        ]

    def _classes(self, name: str, steering: Steering) -> frozenset[str] | None:
        if declared := self._declared.get(name, ()):
            return frozenset(declared) & frozenset(self._manifest.schema.classes)
        seen = self._brought.get(name) or steering.holds.get(name)
        return None if seen is None else frozenset(seen)

    # ---- texts -----------------------------------------------------------------------------------------------------

    def _show(self, decision: Decision, now: float) -> None:
        """Store an event about the awaited silos: once the round takes long, and again when they change."""
        names = frozenset(a.name for a in decision.awaited)
        if now < self._manifest.patience_s or names == self._shown:
            return
        self._shown = names
        some = decision.awaited[:_NAMED]
        whom = "; ".join(f"{a.name} ({self._state(a)}, {format_duration(max(0.0, a.until - now))} left)" for a in some)
        if others := len(decision.awaited) - len(some):
            whom += f"; and {others} others"
        text = f"{len(self._answered)} of {self._rule.needed} updates received; waiting for {whom}"
        self._tasks.event("waiting", self.number, text=text)

    def _state(self, silo: PendingSilo) -> str:
        alone = f"; no other hospital has {', '.join(silo.classes)}" if silo.classes else ""
        return self._connection_text(silo.name) + alone

    def _connection_text(self, name: str) -> str:
        offline = self._dispatcher.offline_for(name)
        if offline is None:
            return "connected"
        reason = self._dispatcher.last_word(name)
        return f"offline {format_duration(offline)}" + (f", {reason}" if reason else "")

    def _loss_warning(self, lost: PendingSilo) -> str:
        return (
            f"closed without {lost.name} ({self._connection_text(lost.name)}). No other hospital has "
            f"{', '.join(lost.classes)}: the model is forgetting it. Wait (coordinator extend RUN --hours H), or "
            "continue without it?"
        )

    def _given_up(self, silo: Attendance, decision: Decision) -> FederationError:
        why = "the quorum was missed" if decision.verdict is ClosingVerdict.PAUSE else "the round closed without it"
        return UnavailableError("E-RUN-13", f"no update ({self._connection_text(silo.name)}): {why}")


def excluded_error() -> FederationError:
    return RefusedError("E-RUN-42", "excluded by the lead; to ask it again: coordinator exclude RUN SILO --readmit")


def missed_in_a_row(rounds: Sequence[RoundRow], names: Sequence[str]) -> dict[str, int]:
    """Count by silo how many of its newest rounds in a row it missed. rounds: closed ones, in order."""
    missed = dict.fromkeys(names, 0)
    for name in names:
        for row in reversed([r for r in rounds if name in r.cohort]):
            if name in row.record.included:
                break
            missed[name] += 1
    return missed
