"""Watches the open round of a run, and gives up the silos that the rule no longer awaits (`fl_core.rounds.closing`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from coordinator.runs.dispatcher import Dispatcher
from coordinator.storage.records import RoundRow
from coordinator.storage.store import Store
from fl_core.errors import FederationError, RefusedError, UnavailableError
from fl_core.rounds.closing import Attendance, Awaited, ClosingRule, Decision, Verdict
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.values import Part
from service_core.console import span

log = logging.getLogger(__name__)
_LOOK_S = 0.2
_NAMED = 20
"""Silos that one event names at most: there is one for each update that comes late, and a thousand may be awaited."""
_HISTORY = 50
"""Rounds that are looked back on for who missed how many in a row."""


@dataclass(frozen=True, slots=True)
class AwaitedSilo:
    """A silo that a run waits for, as a lead sees it.

    left: seconds until it is given up   offline: seconds since it was last there, None while it is connected
    classes: that nobody else has brought in this round.
    """

    name: str
    left: float
    offline: float | None
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An open round: updates that are there and that are needed, and who is awaited.

    sealed: of a masked round whose set is fixed, these are answers for the set.
    """

    round: int
    there: int
    needed: int
    awaited: tuple[AwaitedSilo, ...]
    sealed: bool = False


@dataclass(slots=True)
class _OpenRound:
    number: int
    kind: TaskKind
    cohort: Sequence[str]
    began: float
    rule: ClosingRule
    missed: Mapping[str, int]
    declared: Mapping[str, Sequence[str]]
    earlier: Mapping[str, float]
    """Seconds from the opening to updates that came before a restart."""
    answered: dict[str, float] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    decision: Decision | None = None
    told: frozenset[str] = frozenset()


class RoundCloser:
    """The open round of one run. A thread looks at it several times a second while `running`; thread-safe.

    Guarantees: an update whose receipt was signed before the decision is part of the round.
    """

    def __init__(
        self,
        run_id: str,
        manifest: RunManifest,
        store: Store,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_id, self._manifest = run_id, manifest
        self._store, self._dispatcher, self._clock = store, dispatcher, clock
        self._lock = threading.RLock()
        self._round: _OpenRound | None = None
        self._steering = store.steering.of(run_id)
        self._brought: dict[str, frozenset[str]] = {}
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[RoundCloser]:
        """Look at the open round until the block ends."""
        thread = threading.Thread(target=self._watch, name=f"closer-{self._run_id}", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    # ---- what happens in the round ---------------------------------------------------------------------------------

    def opened(self, row: RoundRow, needed: int) -> None:
        """Begin with a round that is stored. needed: updates that close it."""
        rule = ClosingRule(needed, self._manifest.deadline_s, self._manifest.patience_s)
        earlier = {
            name: min(max(0.0, came - row.opened), self._manifest.deadline_s)  # whatever the clock did in between
            for name, came in self._store.contributions.received(self._run_id, row.round).items()
        }
        missed = missed_in_a_row(self._store.runs.rounds(self._run_id, _HISTORY), row.cohort)
        declared = {s.name: s.data.holds for s in self._store.members.silos() if s.name in row.cohort}
        with self._lock:
            self._brought = {}
            self._round = _OpenRound(
                row.round, row.record.kind, row.cohort, self._clock(), rule, missed, declared, earlier
            )

    def record_classes(self, name: str, update: Mapping[str, Part]) -> None:
        """Note the classes of an update that has come, and is not yet accepted; of one with masks there are none."""
        if self._manifest.secagg is not None:
            return
        if (found := classes_in(update, self._manifest)) is not None:
            with self._lock:
                self._brought[name] = found

    def accepted(self, name: str) -> None:
        with self._lock:
            if self._round is not None:
                now = self._clock() - self._round.began
                self._round.answered[name] = max(now, self._round.earlier.get(name, 0.0))

    def refused(self, name: str) -> None:
        with self._lock:
            if self._round is not None:
                self._round.refused.add(name)

    def sealed(self) -> None:
        """End with a round whose set is fixed: nobody is awaited, and nothing is decided any more."""
        with self._lock:
            self._round = None

    def closed(self) -> None:
        """End with a round; what its training showed of the classes is kept."""
        with self._lock:
            over, self._round = self._round, None
        if over is None or over.kind is not TaskKind.TRAIN:
            return
        seen = {name: sorted(self._brought[name]) for name in over.answered if name in self._brought}
        self._store.steering.note_classes(self._run_id, seen)
        self.steered()

    def steered(self) -> None:
        """Take over what the lead has changed."""
        found = self._store.steering.of(self._run_id)
        with self._lock:
            self._steering = found
        gone = {name: excluded_error() for name in found.excluded}
        self._dispatcher.give_up(self._run_id, gone)

    @property
    def excluded(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._steering.excluded)

    def extension(self, round: int) -> float:
        """Return how many more seconds the lead gave a round."""
        with self._lock:
            return self._steering.extended_s if self._steering.extended_round == round else 0.0

    # ---- what is decided -------------------------------------------------------------------------------------------

    def waiting(self) -> Waiting | None:
        """Say whom the open round waits for; None between rounds."""
        with self._lock:
            found = self._round
            if found is None or found.decision is None:
                return None
            now = self._clock() - found.began
            awaited = tuple(
                AwaitedSilo(a.name, max(0.0, a.until - now), self._dispatcher.offline_for(a.name), a.classes)
                for a in found.decision.awaited
            )
            return Waiting(found.number, len(found.answered), found.rule.needed, awaited)

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                self.look()
            except Exception:  # a database that does not answer: the round must close all the same
                log.exception("the open round of %s could not be looked at", self._run_id)

    def look(self) -> None:
        """Decide about the open round, and give up whom it no longer awaits."""
        with self._lock:
            found = self._round
            if found is None:
                return
            open_silos = self._dispatcher.open_silos(self._run_id)
            settled = {*found.answered, *found.refused}
            if any(name not in settled and name not in open_silos for name in found.cohort):
                return  # an update is being checked, or a task is about to be offered
            now, extension = self._clock() - found.began, self.extension(found.number)
            silos = self._attendance(found)
            decision = replace(found.rule, extension=extension).decide(silos, now)
            found.decision = decision
            late = now >= self._manifest.patience_s
        if decision.verdict is Verdict.WAIT:
            self._tell(found, decision, late)
            return
        for lost in decision.lost:
            self._event(found, "forgetting", lost.name, self._loss(lost))
        reasons = {s.name: self._given_up(s, decision) for s in silos if s.is_open}
        self._dispatcher.give_up(self._run_id, reasons)

    def _attendance(self, found: _OpenRound) -> list[Attendance]:
        return [
            Attendance(
                name,
                found.answered.get(name),
                name in found.refused,
                self._dispatcher.offline_for(name),
                found.missed.get(name, 0),
                self._classes(name, found.declared.get(name, ())),
            )
            for name in found.cohort
        ]

    def _classes(self, name: str, declared: Sequence[str]) -> frozenset[str] | None:
        if declared:
            return frozenset(declared) & frozenset(self._manifest.schema.classes)
        seen = self._brought.get(name) or self._steering.holds.get(name)
        return None if seen is None else frozenset(seen)

    # ---- words -----------------------------------------------------------------------------------------------------

    def _tell(self, found: _OpenRound, decision: Decision, late: bool) -> None:
        """Store an event about whom a round waits for: once it takes long, and when others are awaited than before."""
        names = frozenset(a.name for a in decision.awaited)
        if not late or names == found.told:
            return
        found.told = names
        now = self._clock() - found.began
        some = decision.awaited[:_NAMED]
        whom = "; ".join(f"{a.name} ({self._state(a)}, {span(max(0.0, a.until - now))} more)" for a in some)
        if others := len(decision.awaited) - len(some):
            whom += f"; and {others} others"
        text = f"{len(found.answered)} of {found.rule.needed} updates that are needed; waits for {whom}"
        self._event(found, "waiting", "", text)

    def _state(self, silo: Awaited) -> str:
        alone = f"; nobody else holds {', '.join(silo.classes)}" if silo.classes else ""
        return self._where(silo.name) + alone

    def _where(self, name: str) -> str:
        offline = self._dispatcher.offline_for(name)
        if offline is None:
            return "connected"
        said = self._dispatcher.last_word(name)
        return f"offline {span(offline)}" + (f", {said}" if said else "")

    def _loss(self, lost: Awaited) -> str:
        return (
            f"closed without {lost.name} ({self._where(lost.name)}). Nobody else holds {', '.join(lost.classes)}: the "
            "model is forgetting it. Wait (coordinator extend RUN --hours H), or go on without it?"
        )

    def _given_up(self, silo: Attendance, decision: Decision) -> FederationError:
        why = "the quorum was missed" if decision.verdict is Verdict.PAUSE else "the round closed without it"
        return UnavailableError("E-RUN-13", f"no update ({self._where(silo.name)}): {why}")

    def _event(self, found: _OpenRound, kind: str, silo: str, text: str) -> None:
        self._store.runs.event(self._run_id, kind, found.number, silo, text)
        self._dispatcher.changes.notify()


def excluded_error() -> FederationError:
    return RefusedError("E-RUN-42", "excluded by the lead; coordinator exclude RUN SILO --readmit asks it again")


def missed_in_a_row(rounds: Sequence[RoundRow], names: Sequence[str]) -> dict[str, int]:
    """Count the newest rounds that each silo was asked for and missed. rounds: closed ones, in order."""
    found = dict.fromkeys(names, 0)
    for name in names:
        for row in reversed([r for r in rounds if name in r.cohort]):
            if name in row.record.included:
                break
            found[name] += 1
    return found


def classes_in(update: Mapping[str, Part], manifest: RunManifest) -> frozenset[str] | None:
    """Name the classes of which an update counts an example, noisy counts as they are; None where it counts none.

    Counted are the weights per class of the run's layout; what has another shape is refused elsewhere.
    """
    names, found = manifest.schema.classes, set[str]()
    for part, spec in manifest.layout.items():
        if spec.weight_shape != (len(names),) or part not in update:
            continue
        weight = update[part].weight
        if tuple(weight.shape) != spec.weight_shape:
            continue
        counts = weight if weight.is_floating_point() else manifest.grid.decode(f"{part}.weight", weight)
        found.update(name for name, count in zip(names, counts.tolist(), strict=True) if count >= 0.5)
    return frozenset(found) or None
