"""Dry run of a method on synthetic examples, which shows the sums and steps that it requests in a round."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from fl_core.survey.answers import blank_answers
from fl_core.tensors import Tensor, nn, torch
from fl_core.training.local_data import sum_batch
from fl_core.training.schedule import effective_steps
from fl_core.types.enums import Coupling, Split
from fl_core.types.interfaces import Method
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import (
    AS_SCHEDULED,
    ClassSums,
    LossFn,
    MomentSums,
    Part,
    Query,
    RoundContext,
    SgdOptions,
    SurveySums,
    Tensors,
)
from privacy.mechanisms.record.independence import blanks, check_independence, check_rows

StepsOf = Callable[[float], int]
SIZE = 100.0
"""Declared size of the dry run's silo."""
_PROBED: set[Hashable] = set()
"""Checks that passed in this process, since hospitals and rounds of a simulation use the same losses."""


@dataclass(slots=True)
class DataRequirements:
    """The requests of one round: steps of each training, sums over training examples, and whether counts are requested.

    closing: steps of each training in the closing evaluation   weights: of parts with one weight, for a silo of `SIZE`
    examples   moments: round -> share of 1 / z^2, for rounds that request second moments or a mean
    survey: the round that answers a survey, -1 for none.
    """

    steps: list[int] = field(default_factory=list)
    closing: list[int] = field(default_factory=list)
    class_sums: int = 0
    example_sums: int = 0
    counts: bool = False
    moments: dict[int, float] = field(default_factory=dict)
    survey: int = -1
    weights: dict[str, float] = field(default_factory=dict)


class _RecordingLocalData:
    """Local data without examples that record all requests."""

    def __init__(
        self, schema: Schema, train: TrainConfig, steps_of: StepsOf, needs: DataRequirements, probe: bool, round: int
    ) -> None:
        self.lr, self.batch_size = train.lr, train.batch_size
        self._schema, self._train, self._steps_of, self._needs, self._probe = schema, train, steps_of, needs, probe
        self._round = round

    @property
    def multi_label(self) -> bool:
        return self._schema.multi_label

    def planned_steps(self, epochs: float | None = None) -> int:
        return self._steps_of(self._train.epochs if epochs is None else epochs)

    def effective_steps(self, steps: int, mu: float = 0.0) -> float:
        return effective_steps(self._train, steps, self.lr * mu)

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        if self._probe:
            check_independence(model, loss, self._schema, self.batch_size)
        self._needs.steps.append(self.planned_steps(options.epochs) if options.steps is None else options.steps)
        return self._needs.steps[-1]

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        del bound
        if isinstance(query, SurveySums):
            self._needs.survey = self._round
            return blank_answers(query)
        x, y = blanks(self._schema, 2, 0)
        if isinstance(query, ClassSums):
            if self._probe:
                check_rows(query, self._schema)
            self._needs.class_sums += split is Split.TRAIN
            width = query.vectors(x, y).shape[1]
            made_up = torch.randn(query.n_classes, width, generator=torch.Generator().manual_seed(0))
            return {"sum": made_up, "count": torch.ones(query.n_classes)}
        if isinstance(query, MomentSums):
            if self._probe:
                check_rows(query, self._schema)
            self._needs.moments[self._round] = query.share
            return sum_batch(query, x, y)
        self._needs.example_sums += split is Split.TRAIN
        return sum_batch(query, x, y)

    def size(self) -> float:
        return SIZE

    def class_counts(self) -> Tensor:
        self._needs.counts = True
        return torch.full((len(self._schema.classes),), SIZE / len(self._schema.classes))

    def contributes(self) -> Tensor:
        return self.class_counts() >= 0.5


def dry_run(
    method: Method,
    model: nn.Module,
    schema: Schema,
    train: TrainConfig,
    steps_of: StepsOf,
    probe: bool = True,
    personal: bool = False,
) -> DataRequirements:
    """Run two rounds of a method and return the requests of the second. The first one gives the method prototypes.

    If a method has a fixed number of exchanges, all are run, and their requests are returned together.
    steps_of: epochs -> steps   probe: also check that each example's loss is independent of the others, once per
    process for a method, network and batch size; raises as `check_independence`   personal: include personal models,
    which some methods train further.
    """
    context = RoundContext(n_silos=1, n_classes=len(schema.classes), rounds=4, cohort=1)
    needs, subject = DataRequirements(), (type(method), method, str(model), schema, train.batch_size, personal)
    probe = probe and subject not in _PROBED
    server, silo = method.init_server(model, context), method.init_silo(model, context)
    for t in range(max(2, method.exchanges)):
        needs = (
            DataRequirements(counts=needs.counts, moments=needs.moments, survey=needs.survey)
            if method.exchanges
            else DataRequirements()
        )
        at_server = replace(context, round=t)
        at_silo = at_server.for_silo(0, 0)
        data = _RecordingLocalData(schema, train, steps_of, needs, probe, t)
        msg = method.broadcast(server)
        bundle, silo = method.local(model, msg, silo, data, at_silo)
        if personal and not method.personal_at_end:
            method.personal(model, msg, silo, data, at_silo)
        needs.weights = {name: float(part.weight) for name, part in bundle.items() if not part.weight.dim()}
        server = method.merge(
            server, {n: _stacked(p) if n in method.unsummed_parts else p for n, p in bundle.items()}, at_server
        )
    if personal and method.personal_at_end:
        last, at_end = DataRequirements(), replace(context, round=context.rounds).for_silo(0, 0)
        data = _RecordingLocalData(schema, train, steps_of, last, probe, context.rounds)
        method.personal(model, method.broadcast(server), silo, data, at_end)
        needs.closing, needs.counts = last.steps, needs.counts or last.counts
        needs.class_sums, needs.example_sums = (
            needs.class_sums + last.class_sums,
            needs.example_sums + last.example_sums,
        )
    if probe:
        _PROBED.add(subject)
    return needs


def _stacked(part: Part) -> Part:
    return Part({key: v.unsqueeze(0) for key, v in part.total.items()}, part.weight.unsqueeze(0))


def treatment(coupling: Coupling, coupled: str) -> bool:
    return coupling is Coupling.BATCH and coupled != "off"
