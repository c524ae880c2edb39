"""The layout of a run's bundles, derived by a dry run on blank examples."""

from __future__ import annotations

from fl_core.errors import ConfigError
from fl_core.rounds.manifest import EvaluationTerms
from fl_core.rounds.silo_round import SiloRuntime, measure_global, run_silo_round
from fl_core.tensors import Tensor, nn, torch
from fl_core.training.evaluation import consent, evaluate_personal, no_own_parts
from fl_core.training.local_data import NOTHING_TO_TRAIN, PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.clinical import BASIC, CLINICAL
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Method, RoundData
from fl_core.types.metric_parts import BY_HOSPITAL, GLOBAL_PARTS, METRICS
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import Bundle, Examples, Layout, PartSpec, RoundContext


class DummyExamples(Examples):
    """Two blank examples of the right shape."""

    def __init__(self, schema: Schema) -> None:
        n = len(schema.classes)
        self.labels = torch.zeros(2, n, dtype=torch.int64) if schema.multi_label else torch.arange(2) % n
        self._shape = schema.shape

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        del augment
        return torch.zeros(len(index), *self._shape), self.labels[index]


def derive_layout(
    method: Method,
    model: nn.Module,
    schema: Schema,
    personal: bool = False,
    metrics: str = BASIC,
    updates: bool = True,
    closing: Layout | None = None,
) -> Layout:
    """Run one local step on two blank examples and return the bundle's layout.

    personal: whether personal models are measured   metrics: which of METRICS_KINDS   updates: as `RunKind.updates`
    closing: from `closing_layout`.

    Guarantees: the layout does not depend on any silo's data; `model` is used as scratch.
    """
    context = RoundContext(n_silos=1, n_classes=len(schema.classes), cohort=1).for_silo(silo=0, seed=0)
    blank = DummyExamples(schema)
    data = PlainLocalData(RoundData(blank, blank, TrainConfig(batch_size=2, epochs=1, momentum=0.0), context))
    server = method.init_server(model, context)
    msg = method.broadcast(server)
    parts = GLOBAL_PARTS if metrics == CLINICAL else (METRICS,)
    measured = _layout(measure_global(method, model, msg, data, context.n_classes, parts))
    measured |= closing or {}
    if not updates:
        return dict(sorted(measured.items()))
    try:
        layout = _layout(method.local(model, msg, method.init_silo(model, context), data, context).bundle)
    except ConfigError as error:
        if error.message != NOTHING_TO_TRAIN:
            raise
        raise ConfigError(error.code, f"method {method.name}: {error.message}") from error
    if personal:
        layout |= _layout(evaluate_personal(model, data, context.n_classes))
    layout = dict(sorted((layout | measured).items()))
    scratch = tensor_maps.named_tensors(model)  # not reset, which would need a copy: numbers do not matter here
    runtime = SiloRuntime(method, model, layout, initial=scratch)
    run_silo_round(runtime, msg, None, data, context, TaskKind.TRAIN)  # the layout is stable: it fits itself
    return layout


def closing_layout(n_classes: int, terms: EvaluationTerms, masked: bool) -> Layout:
    """Return the layout of the closing evaluation's additional parts.

    Areas are compared if the run measures scores and has no masks.
    """
    layout = dict[str, PartSpec]()
    if terms.by_hospital:
        layout |= _layout({BY_HOSPITAL: consent()})
    return layout | (_layout(no_own_parts(n_classes, terms.metrics == CLINICAL and not masked)) if terms.beside else {})


def _layout(bundle: Bundle) -> dict[str, PartSpec]:
    return {name: PartSpec.of(part) for name, part in bundle.items()}
