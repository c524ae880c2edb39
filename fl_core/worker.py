"""A silo's whole round. The same code runs in simulation and in a hospital."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fl_core import trees
from fl_core.fixed_point import check_layout
from fl_core.protocols import Guard, Method, SiloData
from fl_core.types import Bundle, ClassSums, Layout, Outcome, Part, Split, State, TaskKind, Tensors, Turn

METRICS = "metrics"
"""The part that every bundle carries: correct answers over test examples, per class."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a silo works with in one run: the method, a scratch model, its outgoing guards and the agreed layout.

    initial: the run's initial weights, read off `model` when they are not given.
    """

    method: Method
    model: nn.Module
    layout: Layout
    guards: Sequence[Guard] = ()
    initial: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.initial:
            object.__setattr__(self, "initial", {name: v.cpu() for name, v in trees.read(self.model).items()})

    def fresh(self) -> nn.Module:
        """Return the scratch model with the run's initial weights."""
        trees.write(self.model, self.initial)
        return self.model


def work(bench: Bench, msg: State, state: State | None, data: SiloData, turn: Turn, kind: TaskKind) -> Outcome:
    """Evaluate what was broadcast, train if asked to, and guard what leaves.

    Returns the bundle that may leave and the silo's next state, the old one where training diverged; the caller
    commits it at the round's close, as `Method.mirrored` says. `bench.model` is scratch: it gets the run's initial
    weights before every use.
    Raises ProtocolError (E-WIRE-02) when the method's bundle does not have the run's layout.
    """
    method, fed = bench.method, turn.fed
    state = method.init_silo(bench.fresh(), fed) if state is None else state
    bundle: dict[str, Part] = {METRICS: measure_global(method, bench.fresh(), msg, data, fed.n_classes)}
    layout = {METRICS: bench.layout[METRICS]}
    if kind is TaskKind.TRAIN:
        local, trained = method.local(bench.fresh(), msg, state, data, turn)
        bundle |= local
        state = trained if _finite(local, trained) else state
        layout = dict(bench.layout)
    check_layout(bundle, layout)
    guarded: Bundle = bundle
    for guard in bench.guards:
        guarded = guard.outgoing(guarded, turn.silo, fed.round)
    return Outcome(guarded, state)


def measure_global(method: Method, model: nn.Module, msg: State, data: SiloData, n_classes: int) -> Part:
    """Evaluate the federation's own model; without one the part has weight 0, and no accuracy is made up."""
    if method.has_global_model:
        return evaluate(method.global_model(model, msg), data, n_classes)
    return Part({"correct": torch.zeros(n_classes)}, torch.zeros(n_classes))


def _finite(bundle: Bundle, state: State) -> bool:
    parts = (part.total for part in bundle.values())
    return all(trees.all_finite(values) for values in (*parts, *state.values()))


def evaluate(model: nn.Module, data: SiloData, n_classes: int) -> Part:
    """Count correct answers per class on the silo's test split, as one joint query.

    Returns Part({"correct": (C,)}, weight = test examples per class (C,)): an accuracy is a mean of parts, taken
    over the union of all silos' test sets and never a mean of accuracies.
    """
    model.eval()

    def correct(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(x)
        return (logits.argmax(1) == y).float().unsqueeze(1)

    sums = data.sum(ClassSums(correct, n_classes), bound=1.0, split=Split.TEST)
    return Part({"correct": sums["sum"].squeeze(1)}, sums["count"])
