"""PA of methods that have no personal model: the best global model, fine-tuned at each silo.

Fan, Yao et al. (FedGELA), NeurIPS 2023, appendix: ten epochs on each silo's training set, then the unweighted mean over
silos of the accuracy on the own test set. "Best" is chosen by test accuracy, as the paper does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.nn import Module

from fl_core import rng
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import RoundHistory, SiloShare
from fl_core.simulation.latest_personal import LatestPersonal
from fl_core.training.evaluation import evaluate, weighted_accuracy
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, RoundContext, SgdOptions, State

EPOCHS = 10


@dataclass(frozen=True, slots=True)
class EarlierRounds:
    """What a history keeps of rounds: see `BestHistory`. personal: newest scores, by the silo's index."""

    records: Sequence[RoundRecord]
    measured: Sequence[RoundRecord]
    best: State | None
    best_round: int
    newest: State
    personal: Mapping[int, Bundle]


class BestHistory(RoundHistory):
    """A history that keeps the server state of the best round.

    A record measures the model from before its round, so the state of the close before it is the one that was best;
    the initial model does not count.
    measure: makes `measured` of a record and the state before it (None: the initial one), which chooses the best; the
    record itself without one   personal: keeps each silo's newest scores, which `measured` then has over all silos.
    """

    def __init__(
        self,
        measure: Callable[[RoundRecord, State | None], RoundRecord] | None = None,
        personal: LatestPersonal | None = None,
    ) -> None:
        super().__init__()
        self.personal = personal
        self.best: State | None = None
        self.best_round = 0
        self.newest: State | None = None
        self.measured: list[RoundRecord] = []
        self._measure = measure

    def restore(self, earlier: EarlierRounds) -> None:
        """Take over what a history of the rounds before had kept."""
        self.records, self.measured = list(earlier.records), list(earlier.measured)
        self.best, self.best_round, self.newest = earlier.best, earlier.best_round, earlier.newest
        if self.personal:
            self.personal.newest.update(earlier.personal)

    def scored(self, name: str, own: Bundle) -> None:
        if self.personal:
            self.personal.keep(name, own)

    def closed(self, record: RoundRecord, server: State) -> None:
        super().closed(record, server)
        measured = self._measure(record, self.newest) if self._measure else record
        if self.personal:
            measured = replace(measured, personal=self.personal.scores(record, self.newest))
        best = -math.inf if self.best is None else self.measured[self.best_round].accuracy
        self.measured.append(measured)
        if self.newest is not None and measured.accuracy > best:
            self.best, self.best_round = self.newest, record.round
        self.newest = server


@dataclass(frozen=True, slots=True)
class FineTuned:
    """Accuracies per silo on its own test split, NaN without test examples."""

    accuracies: tuple[float, ...]

    @property
    def pa(self) -> float:
        """Return the mean over silos that have test examples."""
        return _mean([a for a in self.accuracies if not math.isnan(a)])

    @property
    def fairness(self) -> float:
        """Return the population standard deviation over silos that have test examples."""
        known = [a for a in self.accuracies if not math.isnan(a)]
        return math.sqrt(_mean([(a - self.pa) ** 2 for a in known])) if known else math.nan


def fine_tuned(
    run: RunSetup, shares: Sequence[SiloShare], server: State | None, round: int, epochs: float = EPOCHS
) -> FineTuned:
    """Fine-tune the global model of a server state at every silo with plain cross entropy, and evaluate it there.

    server: None gives no accuracies   round: whose learning rate is used
    Guarantees: the run is not changed; batches come from streams of their own, so equal arguments give equal
    bits.
    """
    if server is None:
        return FineTuned(())
    manifest, runtime = run.manifest, run.silo_runtime()
    n_classes = len(manifest.schema.classes)
    msg = runtime.method.broadcast(server)
    context = RoundContext(len(shares), n_classes, manifest.rounds, round, len(shares))
    found: list[float] = []
    for k, share in enumerate(shares):
        model: Module = runtime.method.global_model(runtime.reset_model(), msg)
        at_silo = context.for_silo(k, rng.derive(manifest.seed, "fine-tune"))
        data = PlainLocalData(RoundData(share.train, share.test, manifest.train, at_silo))
        if len(share.train):
            data.sgd(model, FedAvg.loss, SgdOptions(epochs=epochs))
        part = evaluate(model, data, n_classes)
        found.append(weighted_accuracy(part.total["correct"], part.weight, part.weight.new_ones(n_classes)))
    return FineTuned(tuple(found))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
