"""The only round loop: sample, broadcast, sum on arrival, undo guards, merge, checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from fl_core.aggregation import adaptive_guards
from fl_core.aggregation.contributor_floor import HOSPITALS
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.round_sum import NO_HISTORY, NormHistory, RoundSum
from fl_core.aggregation.update_check import UpdateCheck
from fl_core.errors import REASON_CHARS, FederationError, RefusedError, UnavailableError
from fl_core.kinds.base import RunKind
from fl_core.kinds.training import TrainingRun
from fl_core.rounds import closing, sampling
from fl_core.rounds.silo_round import round_layout
from fl_core.rounds.updates import MaskedSums, PlainSums
from fl_core.tensors import Tensor
from fl_core.training.clinical import clinical_metrics
from fl_core.training.evaluation import own_models, personal_scores, shown_result
from fl_core.types import tensor_maps
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.enums import Capability, TaskKind
from fl_core.types.interfaces import Guard, Method, SiloPort
from fl_core.types.metric_parts import CLINICAL_PART, METRIC_PARTS, METRICS, PERSONAL_PARTS
from fl_core.types.records import HospitalResult, RoundRecord
from fl_core.types.values import Bundle, RoundContext, State, Tensors


@dataclass(frozen=True, slots=True)
class Schedule:
    """The public schedule of a run: rounds T, cohort size per round (0: all) and the quorum that closes a round.

    quorum: a number of updates; 0: two thirds of the cohort, or all if the method needs all silos
    kind: defines the tasks of each round.
    """

    rounds: int
    seed: int
    n_classes: int
    cohort: int = 0
    quorum: int = 0
    kind: RunKind = TrainingRun()  # noqa: RUF009


class Observer:
    """Callbacks of the round loop, for storage and progress, in the loop's thread; these defaults do nothing."""

    def counted(self, coverage: ClassCoverage) -> None:
        """Handle the classes that the run trains, before round 1."""

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        """Handle the start of a round, before anything is sent."""

    def arrived(self, name: str) -> None:
        """Handle a silo's accepted bundle."""

    def scored(self, name: str, own: Bundle) -> None:
        """Handle the score of a silo's personal model in an accepted bundle; simulations use it."""

    def refused(self, name: str, why: str) -> None:
        """Handle a silo without an update in this round: it was missing or refused."""

    def merged(self, server: State) -> State:
        """Return the merged state, held in memory or in a file: tensors of `server` may be computed at each read."""
        return tensor_maps.in_memory(server)

    def closed(self, record: RoundRecord, server: State) -> None:
        """Handle the state after a closed round; the next round begins when this returns."""


_NO_STEP = ("E-RUN-52", "E-DATA-08")
"""Codes of hospitals whose data give no training step, in this round and in later ones."""

Replies = Iterator[tuple[str, Future[Bundle]]]
"""Names of silos and their replies, as they arrive."""
Exchange = Callable[[Sequence[SiloPort], State, RoundContext, TaskKind], Replies]
"""Asks a cohort for its replies. An error of the exchange ends the round, an error in a reply only that silo's part."""


@dataclass(frozen=True, slots=True)
class RoundLoop:
    """Everything that a round needs besides the state. The loop has no state of its own, so it can be resumed.

    incoming: the guards to undo on the sum, in the order of their application   check: of single updates, with the
    run's layout and grid   sums: the aggregation of updates
    parallel: how many silos work at once, each in a thread   exchange: asks a whole cohort, instead of port by port
    initial: norms of the initial weights, as `NormHistory`.
    """

    method: Method
    schedule: Schedule
    check: UpdateCheck
    incoming: Sequence[Guard]
    ports: Sequence[SiloPort]
    parallel: int = 1
    sums: PlainSums | MaskedSums = PlainSums()  # noqa: RUF009
    exchange: Exchange | None = None
    initial: Mapping[str, float] = field(default_factory=dict)

    def run(
        self, server: State, observer: Observer, start: int = 0, closed: Sequence[Mapping[str, float]] = ()
    ) -> State:
        """Run the rounds from `start` to the end and the closing evaluation; return the final server state.

        closed: `RoundRecord.medians` of the rounds before `start`; without them the bound on norms starts over.

        Raises UnavailableError (E-RUN-03) if fewer silos than the quorum deliver: the observer has the state of the
        last closed round, from which a later call can continue with `start`. Raises RefusedError (E-RUN-52) if no silo
        of a round can take a training step.
        """
        history = NormHistory.of(closed, self.initial)
        if start == 0 and self.sums.census and HOSPITALS not in server:
            server = {**server, HOSPITALS: self.census(observer)}
        for t, task in self.schedule.kind.tasks(self.schedule.rounds)[start:]:
            server, medians = self.round(server, t, task, observer, history)
            history = history.after(medians)
        return server

    def census(self, observer: Observer) -> Tensors:
        """Count the hospitals that will contribute rows of each class: the setting of a `ContributorFloor`.

        Raises UnavailableError (E-RUN-03) unless every member answers; as `MaskedSum.finish`.
        """
        kind, ids = TaskKind.CENSUS, range(len(self.ports))
        context = RoundContext(len(ids), self.schedule.n_classes, self.schedule.rounds, 0, len(ids))
        names = [port.name for port in self.ports]
        observer.opened(context, kind, names)
        check = self.check.of(round_layout(self.method, self.check.layout, kind))
        sums = self.sums.of_round(check, NO_HISTORY, {}, context, kind)
        included, missing, *_ = self._collect_updates({}, context, kind, ids, sums, observer)
        if len(included) < len(ids):
            raise UnavailableError(
                "E-RUN-03",
                f"census: expected all {len(ids)} silos, found {len(included)}; "
                + "; ".join(f"{name}: {why}" for name, why in missing.items()),
            )
        sums.finish()
        total = FixedPoint(self.check.grid).incoming(sums.total(), len(included), 0)
        return {HOSPITALS: total[HOSPITALS].weight}

    def needed(self, cohort: int) -> int:
        """Return how many updates of a cohort close a round."""
        everybody = not self.schedule.quorum and Capability.PARTIAL_PARTICIPATION in self.method.unsupported
        quorum = cohort if everybody else closing.needed(self.schedule.quorum, cohort)
        unchanged = not self.method.has_global_model and self.schedule.rounds > 1
        return self.sums.needed(quorum, cohort, unchanged)

    def round(
        self, server: State, t: int, kind: TaskKind, observer: Observer, history: NormHistory = NO_HISTORY
    ) -> tuple[State, Mapping[str, float]]:
        """Run one round; return the state after it and the medians of its norms."""
        schedule = self.schedule
        train = kind.trains
        ids = sampling.sample_cohort(schedule.seed, t, len(self.ports), kind.drawn(schedule.cohort))
        context = RoundContext(len(self.ports), schedule.n_classes, schedule.rounds, t, len(ids))
        names = [self.ports[k].name for k in ids]
        observer.opened(context, kind, names)
        check = self.check.of(round_layout(self.method, self.check.layout, kind))
        guard_parts = adaptive_guards.groups(self.incoming)
        now = adaptive_guards.current_settings(self.incoming, server, t)
        model = adaptive_guards.method_state(server, guard_parts)
        server = {**model, **now}
        msg = {**self.method.broadcast(model), **now}
        sums = self.sums.of_round(check, history, msg, context, kind)
        included, missing, added, shown = self._collect_updates(msg, context, kind, ids, sums, observer)
        self._require_enough(included, missing, len(ids), t)
        decided = sums.finish()
        included = sorted(set(included) - set(decided.refused))
        for name, why in decided.refused.items():
            missing[name] = why[:REASON_CHARS]
            observer.refused(name, missing[name])
        self._require_enough(included, missing, len(ids), t)
        total = sums.total()
        for guard in reversed(adaptive_guards.guards_for_round(self.incoming, msg)):
            total = guard.incoming(total, len(included), context.round)
        metrics = total[METRICS]
        record = RoundRecord(
            t,
            kind,
            _floats(metrics.total["correct"]),
            _floats(metrics.weight),
            tuple(included),
            missing,
            sums.clipped,
            personal_scores(total),
            decided.cut,
            decided.medians,
            clinical_metrics(total[CLINICAL_PART]) if CLINICAL_PART in total else None,
            decided.cut_rows,
            decided.unbounded,
            {} if decided.cut else {name: added[name] for name in included if name in added},
            {name: shown[name] for name in included if name in shown},
            own_models(total),
            self.check.multi_label,
        )
        if train:
            rest = {name: part for name, part in total.items() if name not in METRIC_PARTS | guard_parts}
            following = adaptive_guards.next_settings(self.incoming, now, total)
            server = observer.merged({**self.method.merge(model, rest, context), **following})
            del rest
        del total, metrics  # several times the model's bytes
        observer.closed(record, server)
        for k in ids:
            self.ports[k].settle(context, kind, self.ports[k].name in included)
        return server, decided.medians

    def _require_enough(self, included: Sequence[str], missing: Mapping[str, str], cohort: int, t: int) -> None:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        if missing and not included and all(why.startswith(_NO_STEP) for why in missing.values()):
            raise RefusedError(
                "E-RUN-52", f"round {t + 1}: no hospital took a training step, so there is nothing to merge; {reasons}"
            )
        if len(included) < (needed := self.needed(cohort)):
            raise UnavailableError(
                "E-RUN-03",
                f"round {t + 1}: expected updates of at least {needed} of {cohort} silos, found {len(included)}; "
                + reasons,
            )

    def _collect_updates(
        self,
        msg: State,
        context: RoundContext,
        kind: TaskKind,
        ids: Sequence[int],
        sums: RoundSum,
        observer: Observer,
    ) -> tuple[list[str], dict[str, str], dict[str, str], dict[str, HospitalResult]]:
        """Take updates as they arrive, one at a time; an invalid one is refused and the round continues.

        Returns the silos in the sum, the reasons for the others, the fingerprints of added updates, and the results
        that may be shown by hospital.

        Raises FederationError if an accepted bundle can no longer be read: the round cannot continue.
        """
        index = {self.ports[k].name: k for k in ids}
        included: list[str] = []
        missing, added, shown = dict[str, str](), dict[str, str](), dict[str, HospitalResult]()
        ask = self.exchange or self._replies
        for name, reply in ask([self.ports[k] for k in ids], msg, context, kind):
            try:
                update = reply.result()
                measured = sums.measure(update, name)
                if kind.trains and (mark := self.sums.fingerprint(self.method, update, context.round)):
                    added[name] = mark
                if (own_result := shown_result(update)) is not None:
                    shown[name] = own_result
            except FederationError as error:
                missing[name] = str(error)[:REASON_CHARS]  # names in a bundle may have any length
                observer.refused(name, missing[name])
                continue
            # An error here is fatal for the round: the sum may contain half of the update.
            sums.add(update, name, index[name], measured)
            if personal := {part: update[part] for part in PERSONAL_PARTS if part in update}:
                observer.scored(name, personal)
            del update
            included.append(name)
            observer.arrived(name)
        return included, missing, added, shown

    def _replies(self, ports: Sequence[SiloPort], msg: State, context: RoundContext, kind: TaskKind) -> Replies:
        """Yield replies as they arrive, at most `parallel` silos at work; with one, silos run in this thread."""
        if self.parallel == 1:
            for port in ports:
                yield port.name, reply_of(partial(port.round, msg, context, kind))
            return
        waiting, running = list(reversed(ports)), dict[Future[Bundle], str]()
        pool = ThreadPoolExecutor(self.parallel, thread_name_prefix="port")
        try:
            while waiting or running:
                while waiting and len(running) < self.parallel:
                    port = waiting.pop()
                    running[pool.submit(port.round, msg, context, kind)] = port.name
                ready = sorted(wait(running, return_when=FIRST_COMPLETED).done, key=lambda r: running[r], reverse=True)
                while ready:  # drop a reply once it is added: its bundle may be in memory
                    yield running.pop(ready[-1]), ready.pop()
        finally:
            pool.shutdown(wait=False)  # a round that cannot continue does not wait


def reply_of(read: Callable[[], Bundle]) -> Future[Bundle]:
    """Return a finished reply with the result or the error of `read`."""
    reply: Future[Bundle] = Future()
    try:
        reply.set_result(read())
    except Exception as error:
        reply.set_exception(error)
    return reply


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
