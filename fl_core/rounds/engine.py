"""The only round loop: sample, broadcast, sum on arrival, unguard, merge, checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch import Tensor

from fl_core.aggregation import adaptive_guards
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.errors import REASON_CHARS, FederationError, UnavailableError
from fl_core.rounds import sampling
from fl_core.training.evaluation import METRIC_PARTS, METRICS, personal_scores
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Guard, Method, SiloPort
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, Layout, RoundContext, State


@dataclass(frozen=True, slots=True)
class Schedule:
    """The public schedule of a run: rounds T, cohort size per round (0: all) and the quorum that closes a round."""

    rounds: int
    seed: int
    n_classes: int
    cohort: int = 0
    quorum: int = 0


class Observer:
    """Callbacks of the round loop, for storage and progress, called from the loop's thread; here they do nothing."""

    def opened(self, context: RoundContext, kind: TaskKind, names: Sequence[str]) -> None:
        """Handle the start of a round, before anything is sent."""

    def arrived(self, name: str) -> None:
        """Handle a silo's bundle, which was added to the sum."""

    def closed(self, record: RoundRecord, server: State) -> None:
        """Handle the state after a closed round; the next round begins when this returns."""


@dataclass(frozen=True, slots=True)
class RoundLoop:
    """Everything that a round needs besides the state: the loop holds no state of its own, so it can be resumed.

    incoming: the guards to undo on the sum, in the order of their application.
    parallel: how many silos work at once (1 in one process, all of them over the network).
    """

    method: Method
    schedule: Schedule
    layout: Layout
    grid: FixedPointFormat
    incoming: Sequence[Guard]
    ports: Sequence[SiloPort]
    parallel: int = 1

    def run(self, server: State, observer: Observer, start: int = 0) -> State:
        """Run the rounds from `start` to the end and the closing evaluation; return the final server state.

        Raises UnavailableError (E-RUN-03) when fewer silos than the quorum deliver; the state of the last closed
        round is with the observer, and `start` continues from there.
        """
        for t in range(start, self.schedule.rounds):
            server = self.round(server, t, TaskKind.TRAIN, observer)
        return self.round(server, self.schedule.rounds, TaskKind.EVALUATE, observer)

    def round(self, server: State, t: int, kind: TaskKind, observer: Observer) -> State:
        """Run one round and return the state after it."""
        schedule = self.schedule
        train = kind is TaskKind.TRAIN
        ids = sampling.sample_cohort(schedule.seed, t, len(self.ports), schedule.cohort if train else 0)
        context = RoundContext(len(self.ports), schedule.n_classes, schedule.rounds, t, len(ids))
        names = [self.ports[k].name for k in ids]
        observer.opened(context, kind, names)
        layout = self.layout if train else {METRICS: self.layout[METRICS]}
        own, now = adaptive_guards.groups(self.incoming), adaptive_guards.current_settings(self.incoming, server, t)
        model = adaptive_guards.method_state(server, own)
        server = {**model, **now}
        msg = {**self.method.broadcast(model), **now}
        total, included, missing, clipped = self._collect_updates(msg, context, kind, ids, layout, observer)
        needed = min(schedule.quorum or len(ids), len(ids))
        if len(included) < needed:
            raise UnavailableError(
                "E-RUN-03",
                f"round {t + 1}: expected updates of at least {needed} of {len(ids)} silos, found {len(included)}; "
                + "; ".join(f"{name}: {why}" for name, why in missing.items()),
            )
        metrics = total[METRICS]
        record = RoundRecord(
            t,
            kind,
            _floats(metrics.total["correct"]),
            _floats(metrics.weight),
            tuple(sorted(included)),
            missing,
            clipped,
            personal_scores(total),
        )
        if train:
            rest = {name: part for name, part in total.items() if name not in METRIC_PARTS | own}
            following = adaptive_guards.next_settings(self.incoming, now, total)
            server = {**self.method.merge(model, rest, context), **following}
            del rest
        del total, metrics  # several times the model's bytes, not needed while the state is stored
        observer.closed(record, server)
        for k in ids:
            self.ports[k].settle(context, kind, self.ports[k].name in included)
        return server

    def _collect_updates(
        self, msg: State, context: RoundContext, kind: TaskKind, ids: Sequence[int], layout: Layout, observer: Observer
    ) -> tuple[Bundle, list[str], dict[str, str], int]:
        """Add bundles as they arrive, one at a time; one that does not fit is refused and the round goes on.

        Raises FederationError where a bundle that was accepted can no longer be read: the round cannot go on.
        """
        index = {self.ports[k].name: k for k in ids}
        sums = Aggregator(layout, self.grid, self.method.unsummed_parts)
        included: list[str] = []
        missing: dict[str, str] = {}
        for name, reply in self._replies([self.ports[k] for k in ids], msg, context, kind):
            try:
                update = reply.result()
                sums.validate(update)
            except FederationError as error:
                missing[name] = str(error)[:REASON_CHARS]  # the names in a bundle may be of any length
                continue
            sums.add(update, index[name])  # an error here is fatal for the round: the sum may hold half of the update
            del update
            included.append(name)
            observer.arrived(name)
        total = sums.total()
        for guard in reversed(adaptive_guards.guards_for_round(self.incoming, msg)):
            total = guard.incoming(total, len(included), context.round)
        return total, included, missing, sums.clipped

    def _replies(
        self, ports: Sequence[SiloPort], msg: State, context: RoundContext, kind: TaskKind
    ) -> Iterator[tuple[str, Future[Bundle]]]:
        """Yield replies as they arrive, at most `parallel` silos at work; with one, silos run in this thread."""
        if self.parallel == 1:
            for port in ports:
                yield port.name, _reply(port, msg, context, kind)
            return
        waiting = list(reversed(ports))
        with ThreadPoolExecutor(self.parallel, thread_name_prefix="port") as pool:
            running: dict[Future[Bundle], str] = {}
            while waiting or running:
                while waiting and len(running) < self.parallel:
                    port = waiting.pop()
                    running[pool.submit(port.round, msg, context, kind)] = port.name
                ready = sorted(wait(running, return_when=FIRST_COMPLETED).done, key=lambda r: running[r], reverse=True)
                while ready:  # a reply that was added is dropped at once: its bundle may be in memory
                    yield running.pop(ready[-1]), ready.pop()


def _reply(port: SiloPort, msg: State, context: RoundContext, kind: TaskKind) -> Future[Bundle]:
    reply: Future[Bundle] = Future()
    try:
        reply.set_result(port.round(msg, context, kind))
    except Exception as error:
        reply.set_exception(error)
    return reply


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
