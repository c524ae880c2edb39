"""Measures that only a simulation can make, because it has the test sets of all silos.

A record covers only the silos of its round, as in a federation. With few silos per round, a curve of records also
shows which silos were drawn, and its best round has an easy cohort. In a private run, further measures on silos' data
would be releases that no ledger counts, so there are only the records.

PA of methods without a personal model: the best global model, fine-tuned at each silo. Fan, Yao et al. (FedGELA),
NeurIPS 2023, appendix: ten epochs on each silo's training set, then the unweighted mean over silos of the accuracy on
the silo's own test set. "Best" is chosen by test accuracy, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import Module

from consilium.research.engines.in_process import RoundHistory, SiloShare, has_official_test, public_test
from fl_core import rng
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.clinical import clinical_metrics
from fl_core.training.evaluation import evaluate, evaluate_global, evaluate_personal, personal_scores, weighted_accuracy
from fl_core.training.local_data import PlainLocalData
from fl_core.types.clinical import CLINICAL
from fl_core.types.interfaces import RoundData
from fl_core.types.metric_parts import CLINICAL_PART, METRICS
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, RoundContext, SgdOptions, State


class GlobalTestEvaluator:
    """Measures server states of one run on the official test set, otherwise on the union of its silos' test sets.

    If silos hold out their own test examples, the official test set belongs to no silo, and papers measure the global
    model there. So does this class, with every cohort size. It also does so in private runs, because that reads no
    silo's data.
    device: where models are evaluated   clinical: also measure `ClinicalMetrics`, even if the run does not
    Guarantees: without an official test set, equals a record's counts if the record covers all silos; does not change
    the run's bits.
    """

    def __init__(
        self,
        run: RunSetup,
        shares: Sequence[SiloShare],
        device: torch.device | None = None,
        clinical: bool = False,
    ) -> None:
        manifest, self._runtime, self._device = run.manifest, run.silo_runtime(), device or torch.device("cpu")
        self._runtime.model.to(self._device)
        self._n_classes, self._silos = len(manifest.schema.classes), len(shares)
        self._clinical = clinical or manifest.evaluation.metrics == CLINICAL
        self._initial = run.initial_state()
        self._official = has_official_test(shares)
        tests = public_test(shares)
        context = RoundContext(self._silos, self._n_classes, manifest.rounds).for_silo(0, manifest.seed)
        self._data = PlainLocalData(RoundData(tests, tests, manifest.train, context, self._device))

    def __call__(self, record: RoundRecord, before: State | None) -> RoundRecord:
        """Return a record with this test set's counts for the state before its round. before: None for round 0.

        Returns the record unchanged if it covers the same examples, or the method has no global model.
        """
        method, covered = self._runtime.method, len(record.included) == self._silos and not self._official
        if covered or not method.has_global_model:
            return record
        msg = method.broadcast(self._initial if before is None else before)
        model = method.global_model(self._runtime.reset_model(), msg)
        parts = evaluate_global(model, self._data, self._n_classes, self._clinical)
        correct, examples = parts[METRICS].total["correct"].tolist(), parts[METRICS].weight.tolist()
        clinical = clinical_metrics(parts[CLINICAL_PART]) if self._clinical else None
        return replace(record, correct=tuple(correct), examples=tuple(examples), clinical=clinical)


class LatestPersonal:
    """Scores of each silo's newest personal model, in a run that measures them and is not private.

    Papers report all silos, including those that have not trained recently: the score is that of the newest model when
    it was made. A silo that has not trained yet uses the personal model that its method makes from this round's message
    without local training: the global model if the method has one (FedGELA's with the silo's own phi_k), otherwise the
    initial model.
    device: where models of silos that have not trained yet are evaluated
    Guarantees: equals a record's scores if the record covers all silos; does not change the run's bits.
    """

    def __init__(self, run: RunSetup, shares: Sequence[SiloShare], device: torch.device | None = None) -> None:
        self._manifest, self._runtime, self._shares = run.manifest, run.silo_runtime(), shares
        self._device = device or torch.device("cpu")
        self._runtime.model.to(self._device)
        self._initial, self._public = run.initial_state(), public_test(shares)
        self.newest: dict[int, Bundle] = {}

    def keep(self, name: str, bundle: Bundle) -> None:
        """Store a silo's scores of its newest model."""
        self.newest[self._manifest.index(name)] = bundle

    def scores(self, record: RoundRecord, before: State | None) -> Mapping[str, float]:
        """Return the scores over all silos after a round. before: the state before it, None for round 0.

        Returns the record's own scores if it covers all silos, or has none.
        """
        silos = range(len(self._shares))
        if len(record.included) == len(silos) or not record.personal:
            return record.personal
        msg = self._runtime.method.broadcast(self._initial if before is None else before)
        models = [self.newest[k] if k in self.newest else self._untrained(k, msg, record.round) for k in silos]
        total = dict(models[0])
        for model in models[1:]:
            total = {part: total[part] + model[part] for part in total}
        return personal_scores(total)

    def _untrained(self, silo: int, msg: State, round: int) -> Bundle:
        manifest, method, share = self._manifest, self._runtime.method, self._shares[silo]
        n_classes = len(manifest.schema.classes)
        context = RoundContext(len(self._shares), n_classes, manifest.rounds, round, manifest.cohort)
        units = manifest.masked_units(silo)
        context = context.for_silo(silo, manifest.seed, manifest.members[silo].prototypes, units)
        data = PlainLocalData(
            RoundData(share.train, share.test, manifest.train, context, device=self._device, public=self._public)
        )
        state = method.init_silo(self._runtime.reset_model(), context)
        model = self._runtime.reset_model()
        if method.has_global_model:
            method.global_model(model, msg)
        return evaluate_personal(method.personal(model, msg, state, data, context), data, n_classes)


EPOCHS = 10


@dataclass(frozen=True, slots=True)
class EarlierRounds:
    """A history's data to restore: see `BestHistory`. personal: newest scores, by the silo's index."""

    records: Sequence[RoundRecord]
    measured: Sequence[RoundRecord]
    best: State | None
    best_round: int
    newest: State
    personal: Mapping[int, Bundle]


class BestHistory(RoundHistory):
    """A history that also keeps the server state of the best round.

    A record measures the model from before its round, so the best state is that of the close before. The initial model
    does not count.
    measure: turns a record and the state before it (None: the initial one) into the record in `measured`, from which
    the best is chosen; by default the record itself   personal: collects each silo's newest scores for `measured`.
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
        """Restore the data of the rounds before."""
        self.records, self.measured = list(earlier.records), list(earlier.measured)
        self.best, self.best_round, self.newest = earlier.best, earlier.best_round, earlier.newest
        if self.personal:
            self.personal.newest.update(earlier.personal)

    def scored(self, name: str, bundle: Bundle) -> None:
        if self.personal:
            self.personal.keep(name, bundle)

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
        """Mean over silos that have test examples."""
        return _mean([a for a in self.accuracies if not math.isnan(a)])

    @property
    def fairness(self) -> float:
        """Population standard deviation over silos that have test examples."""
        measured = [a for a in self.accuracies if not math.isnan(a)]
        return math.sqrt(_mean([(a - self.pa) ** 2 for a in measured])) if measured else math.nan


def fine_tuned(
    run: RunSetup, shares: Sequence[SiloShare], server: State | None, round: int, epochs: float = EPOCHS
) -> FineTuned:
    """Fine-tune the global model of a server state at every silo with plain cross entropy, and evaluate it there.

    server: None gives no accuracies   round: determines the learning rate
    Guarantees: does not change the run; batches come from separate random streams, so equal arguments give equal bits.
    """
    if server is None:
        return FineTuned(())
    manifest, runtime = run.manifest, run.silo_runtime()
    n_classes = len(manifest.schema.classes)
    msg = runtime.method.broadcast(server)
    context = RoundContext(len(shares), n_classes, manifest.rounds, round, len(shares))
    accuracies: list[float] = []
    for k, share in enumerate(shares):
        model: Module = runtime.method.global_model(runtime.reset_model(), msg)
        at_silo = context.for_silo(k, rng.derive(manifest.seed, "fine-tune"))
        data = PlainLocalData(RoundData(share.train, share.test, manifest.train, at_silo))
        if len(share.train):
            data.sgd(model, FedAvg.loss, SgdOptions(epochs=epochs))
        part = evaluate(model, data, n_classes)
        accuracies.append(weighted_accuracy(part.total["correct"], part.weight, part.weight.new_ones(n_classes)))
    return FineTuned(tuple(accuracies))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
