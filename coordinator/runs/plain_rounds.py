"""Plain rounds, in which the coordinator reads each update: all differences from masked rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.runs.open_round import OpenRound
from coordinator.runs.preflight import ask_preflight
from coordinator.runs.run_facts import DerivedFacts
from coordinator.runs.services import Services
from coordinator.runs.tasks import RunTasks
from coordinator.storage.records import Steering, StoredRun
from fl_core.rounds.manifest import RunManifest
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import read_alone


@dataclass(slots=True, eq=False)
class PlainRounds:
    """The rounds of a run without masks.

    Every valid update is taken until the round is closed; the sum needs no further messages, and classes are counted
    from the answers before round 0. After a restart the received updates contain all that is needed.
    """

    run: StoredRun
    manifest: RunManifest
    facts: DerivedFacts
    services: Services
    tasks: RunTasks
    masks: Mapping[str, str] = field(default_factory=dict)
    """Fields that an offer has besides the model."""

    def prepare(self, steering: Steering) -> ClassCoverage | None:
        """Ask the silos before round 0 whether they can do their part; return their classes, if asked.

        A private run waits for all of them. A run without privacy charges nothing and may continue with its quorum: it
        waits for connected silos, at most the manifest's patience. No answer is stored: after a restart all are asked
        again, until a round was opened. Raises as `ask_preflight`.
        """
        run, facts, store = self.run, self.facts, self.services.store
        if store.runs.round(run.id, 0) is not None:
            return None
        self.tasks.event("clear", text=read_alone(len(run.members)))
        if run.closed:
            return None
        quorum = 0 if facts.private else steering.quorum or self.manifest.quorum
        arguments = run, self.manifest, self.services.dispatcher, self.tasks
        ready = ask_preflight(*arguments, excluded=steering.excluded, all_answer=facts.private, quorum=quorum)
        if not facts.counts_classes:
            return None
        trains = [set(pending.trains) for pending in ready.values() if pending.trains]
        counted = [sum(c in each for each in trains) for c in range(len(self.manifest.schema.classes))]
        silent = len(trains) < len(run.members) - len(steering.excluded)
        return facts.coverage(self.manifest.schema.classes, counted if trains else (), partial=silent)

    def begin(self, census: Callable[[], Sequence[float]]) -> tuple[None, ClassCoverage | None]:
        """Prepare round 0 once the model exists: nothing to do."""
        del census
        return None, None

    def base(self, kind: TaskKind) -> str:
        """Return the base of a round without a model."""
        del kind
        return ""

    def opened(self, now: OpenRound) -> None:
        """Record the open round."""

    def needed(self, kind: TaskKind, cohort: int, needed: int) -> int:
        """Return how many updates of a cohort close a round: `needed`, unchanged."""
        del kind, cohort
        return needed

    def fixed_set(self, round: int, kind: TaskKind) -> Mapping[str, str] | None:
        """Return the digests of the only acceptable updates; None: all valid ones."""
        del round, kind
        return None
