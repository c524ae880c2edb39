"""The hospital's own measurement of the received model on its test examples; it stays at the hospital."""

from __future__ import annotations

from fl_core.aggregation import adaptive_guards
from fl_core.rounds.silo_round import SiloRuntime, measure_global
from fl_core.training.clinical import clinical_metrics
from fl_core.types.interfaces import LocalData
from fl_core.types.metric_parts import CLINICAL_PART, METRICS
from fl_core.types.values import Bundle, State
from silo.storage.tasks import LocalEvaluation


def own_evaluation(classes: tuple[str, ...], measured: Bundle) -> LocalEvaluation:
    """Return counts per class from a task's measurements; all 0 if the task measures nothing, as in a census."""
    if METRICS not in measured:
        zeros = (0.0,) * len(classes)
        return LocalEvaluation(classes, zeros, zeros)
    metrics, clinical = measured[METRICS], measured.get(CLINICAL_PART)
    correct, examples = tuple(metrics.total["correct"].tolist()), tuple(metrics.weight.tolist())
    return LocalEvaluation(
        classes, correct, examples, clinical=None if clinical is None else clinical_metrics(clinical)
    )


def measure_exactly(runtime: SiloRuntime, msg: State, exact: LocalData, n_classes: int) -> Bundle:
    """Measure the received model once more, without the noise of a private run.

    No update contains this result, so it costs no budget.
    """
    state = adaptive_guards.method_state(msg, adaptive_guards.groups(runtime.guards))
    return measure_global(runtime.method, runtime.reset_model(), state, exact, n_classes, runtime.layout)
