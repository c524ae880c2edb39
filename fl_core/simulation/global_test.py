"""A round's model on the official test set, or on the test sets of all silos, for simulations.

A record covers the test sets of its round's cohort, since a federation asks nobody else. With a few silos per round a
curve of records shows the luck of the draw beside the model, and its best round is one with an easy cohort. A
simulation holds all test sets and can measure on their union, apart from the run. In a private run that would be a
release that no ledger counts: there the records are all there is.

Where silos hold out their own test examples, the data's official test set is nobody's, and papers measure the global
model there: so does this class, at every cohort size, and in private runs as well, since no record of a hospital is
looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import SiloShare, has_official_test, public_test
from fl_core.training.clinical import clinical_metrics
from fl_core.training.evaluation import CLINICAL_PART, METRICS, evaluate_global
from fl_core.training.local_data import PlainLocalData
from fl_core.types.clinical import CLINICAL
from fl_core.types.interfaces import RoundData
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State


class GlobalTestEvaluator:
    """Measures server states of one run on the official test set, else on the union of its silos' test sets.

    device: where models are evaluated   clinical: also measure `ClinicalMetrics` where the run itself does not
    Guarantees: without an official test set it equals a record's counts where the record covers everybody; the run's
    bits do not change.
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
        self._clinical = clinical or manifest.metrics == CLINICAL
        self._initial = run.initial_state()
        self._official = has_official_test(shares)
        tests = public_test(shares)
        context = RoundContext(self._silos, self._n_classes, manifest.rounds).for_silo(0, manifest.seed)
        self._data = PlainLocalData(RoundData(tests, tests, manifest.train, context, self._device))

    def __call__(self, record: RoundRecord, before: State | None) -> RoundRecord:
        """Return a record with the counts of these tests for the state before its round; before: None for the first.

        The record itself where it covers the same examples, and where the method has no global model.
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
