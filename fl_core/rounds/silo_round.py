"""A silo's whole round. The same code runs in simulation and in a hospital."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fl_core.aggregation import adaptive_guards
from fl_core.aggregation.contributor_floor import census, census_layout
from fl_core.aggregation.fixed_point import check_layout
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.flat_blocks import FlatLayout
from fl_core.aggregation.round_sum import require_direction
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck
from fl_core.errors import ProtocolError
from fl_core.tensors import nn, torch
from fl_core.training.evaluation import consent, evaluate_global, evaluate_own, evaluate_personal, withheld
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Guard, LocalData, Method
from fl_core.types.metric_parts import (
    BY_HOSPITAL,
    CLINICAL_PART,
    CLOSING_PARTS,
    GLOBAL_PARTS,
    METRIC_PARTS,
    METRICS,
    OWN,
    PAIRED,
    PERSONAL,
    PERSONAL_PARTS,
)
from fl_core.types.secagg import CLASSES
from fl_core.types.values import Bundle, Layout, Part, RoundContext, State, Tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Masking:
    """The check and layout of an update before masking, since it cannot be checked afterwards.

    check: as the coordinator's of a plain run, `sizes` in the members' order   layouts: of each kind of round
    rows: updates have rows of classes   signs: as `NormClipped.signs`   private: the update is noisy.
    """

    check: UpdateCheck
    layouts: Mapping[TaskKind, FlatLayout]
    rows: bool
    signs: bool = False
    private: bool = False

    def flat(self, update: Bundle, kind: TaskKind, context: RoundContext, msg: State) -> Bundle:
        """Return the two blocks of an update, on the grid. The number of clipped values is in this silo's log only.

        In a private run an update that is not finite becomes zeros: an error would reveal it. Otherwise raises as
        `UpdateCheck.check`, and RefusedError (E-RUN-44) as `require_direction`; no update is sent then. The error that
        is sent contains no number of the update; the silo's log does.
        """
        layout, here = self.layouts[kind], "this hospital"
        sizes, coarse = dict[str, DeclaredSize](), frozenset[str]()
        if self.check.sizes:
            name, size = list(self.check.sizes.items())[context.silo]
            sizes, coarse = {here: size}, frozenset({here} if name in self.check.coarse else ())
        check = replace(self.check, layout=layout.layout, sizes=sizes, coarse=coarse)
        update = _finite_or_zero(update) if self.private else update
        try:
            measured = check.check(update, here)
        except ProtocolError as error:
            log.warning("update withheld: %s", error)
            raise ProtocolError(
                error.code, f"{here} withheld its own update, which exceeds the run's limits: see its log"
            ) from None
        if self.signs:
            require_direction(measured, here, msg.get("w", {}).get("head.bias"))
        encoder = FixedPoint(layout.grid)
        units = encoder.outgoing(update, context.silo, context.round)
        if encoder.clipped:
            log.warning("%d numbers of the update exceeded the run's bounds and were clipped", encoder.clipped)
        return layout.flatten(units)


def _finite_or_zero(update: Bundle) -> Bundle:
    """Return an update, or if it is not finite, zeros of known weight for its trained parts."""
    trained = [part for name, part in update.items() if name not in METRIC_PARTS]
    if all(tensor_maps.all_finite({**part.total, "": part.weight}) for part in trained):
        return update
    zeros = {
        name: Part({key: torch.zeros_like(v) for key, v in part.total.items()}, part.weight.nan_to_num(0.0, 0.0, 0.0))
        for name, part in update.items()
        if name not in METRIC_PARTS
    }
    return {**update, **zeros}


@dataclass(frozen=True, slots=True)
class SiloRuntime:
    """A silo's objects of one run: the method, a scratch model, its outgoing guards and the agreed layout.

    initial: the run's initial weights, copied from `model` if not given   withholds: parts of the evaluation that this
    hospital measures but does not send   masking: in a masked run, the check and layout of updates
    own: the silo's local model, if a run asks for it and it exists.
    """

    method: Method
    model: nn.Module
    layout: Layout
    guards: Sequence[Guard] = ()
    initial: Tensors = field(default_factory=dict)
    withholds: frozenset[str] = frozenset()
    masking: Masking | None = None
    own: nn.Module | None = None

    def __post_init__(self) -> None:
        if not self.initial:
            object.__setattr__(
                self, "initial", {name: v.cpu() for name, v in tensor_maps.copy_state(self.model).items()}
            )

    def reset_model(self) -> nn.Module:
        tensor_maps.load_state(self.model, self.initial)
        return self.model


class SiloRound(NamedTuple):
    """A silo's round: the bundle that may leave, the next state, and the measurements, before any guard.

    measured: the parts of `GLOBAL_PARTS` in the run.
    """

    bundle: Bundle
    state: State
    measured: Bundle


def run_silo_round(
    runtime: SiloRuntime, msg: State, state: State | None, data: LocalData, context: RoundContext, kind: TaskKind
) -> SiloRound:
    """Evaluate the broadcast, train if required, measure the personal model if the round has one, apply all guards.

    Returns the bundle that may leave and the silo's next state, or its old state if training diverged. The caller
    commits it at the round's close (see `Method.server_tracks_state`). `runtime.model` is scratch: it gets the run's
    initial weights before every use.
    Raises ProtocolError (E-WIRE-06) if the method's bundle does not have the run's layout; RefusedError, before any
    example is read, on a guard's setting that the plan does not cover.
    """
    method, masking = runtime.method, runtime.masking
    if kind.census:
        assert masking is not None
        answer = census(data, context, rows=masking.rows)
        return SiloRound(masking.flat(answer, kind, context, msg), state or {}, {})
    guards = adaptive_guards.guards_for_round(runtime.guards, msg)
    guard_parts = adaptive_guards.groups(runtime.guards)
    msg = adaptive_guards.method_state(msg, guard_parts)
    state = method.init_silo(runtime.reset_model(), context) if state is None else state
    measured = measure_global(method, runtime.reset_model(), msg, data, context.n_classes, runtime.layout)
    bundle = dict(measured)
    layout = round_layout(method, runtime.layout, kind)
    model, new_state = runtime.model, state
    if kind.trains:
        local, new_state = method.local(runtime.reset_model(), msg, state, data, context)
        bundle |= local
        state = new_state if new_state is state or _finite(local, new_state) else state
    elif PERSONAL in layout:
        model = runtime.reset_model()
    if PERSONAL in layout:
        bundle |= evaluate_personal(method.personal(model, msg, new_state, data, context), data, context.n_classes)
    if OWN in layout:
        received = method.global_model(runtime.reset_model(), msg)
        bundle |= evaluate_own(received, runtime.own, data, context.n_classes, PAIRED in layout)
    if BY_HOSPITAL in layout:
        bundle[BY_HOSPITAL] = consent()
    bundle |= {name: withheld(bundle[name]) for name in runtime.withholds & set(bundle)}
    check_layout(bundle, {name: spec for name, spec in layout.items() if name not in guard_parts})
    guarded: Bundle = bundle
    for guard in guards:
        guarded = guard.outgoing(guarded, context.silo, context.round)
    if masking is not None:
        guarded = masking.flat(guarded, kind, context, msg)
    return SiloRound(guarded, state, measured)


def require_expected(method: Method, update: Bundle, round: int) -> None:
    """Raise ProtocolError (E-RUN-47) if a round removes an earlier contribution and this update is not that one."""
    if (expected := method.expects(round)) and (fingerprint := method.fingerprint(update)) != expected:
        raise ProtocolError(
            "E-RUN-47",
            f"the sums ({fingerprint[:16]}) differ from those that were added to the run ({expected[:16]}): serve "
            "the same records as in that run, or train again without this hospital",
        )


def round_layout(method: Method, layout: Layout, kind: TaskKind) -> Layout:
    """Select the layout of bundles of one kind of round; personal models are measured in only one kind.

    A hospital's own numbers are shown only for the closing evaluation: those of every round would reveal images.
    """
    if kind.census:
        return census_layout(*layout[METRICS].weight_shape)
    train = kind.trains
    sent = {*GLOBAL_PARTS, *CLOSING_PARTS} if not train else set(layout) - {*PERSONAL_PARTS, *CLOSING_PARTS}
    measured = set(PERSONAL_PARTS) if train != method.personal_at_end else set[str]()
    return {name: spec for name, spec in layout.items() if name in sent | measured}


def class_rows(layout: FlatLayout) -> frozenset[str]:
    """Return the parts whose rows reveal single classes, except evaluation results."""
    return frozenset(p for p in layout.layout if layout.block_of(p) == CLASSES and p not in METRIC_PARTS)


def measure_global(
    method: Method, model: nn.Module, msg: State, data: LocalData, n_classes: int, parts: Collection[str]
) -> dict[str, Part]:
    """Evaluate the global model, for the parts of the run; if the method has none, they have weight 0."""
    classifier = method.global_model(model, msg) if method.has_global_model else None
    return evaluate_global(classifier, data, n_classes, CLINICAL_PART in parts)


def _finite(bundle: Bundle, state: State) -> bool:
    parts = (part.total for part in bundle.values())
    return all(tensor_maps.all_finite(values) for values in (*parts, *state.values()))
