"""Sums of clipped gradients: per unit for the terms of one example, per microbatch for terms that mix examples.

Two modes give the same sums; `mode_of` chooses the faster one that a model allows:

    bookkeeping  one backward pass for the gradients of the layers' outputs alone. A layer of few places gives its
                 norms by Gram matrices and then its clipped sum as one usual gradient; another its per-example
                 gradients. Autograd's own gradients of the parameters, which nobody wants, are never computed.
    hooks        per-example gradients of every layer, by Opacus' hooks beside autograd's

Bu, Wang, Zha and Karypis, "Differentially Private Optimization on Large Model at Small Cost", ICML 2023.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from privacy.mechanisms.noise import grid
from privacy.mechanisms.record import layer_gradients
from privacy.mechanisms.record.layer_gradients import conv_grad_sample as conv_grad_sample
from privacy.mechanisms.record.layer_gradients import trainable as trainable

log = logging.getLogger(__name__)

Gradients = list[Tensor]
"""One tensor per trainable parameter, in the order of `named_parameters`; sums are float64."""
PADDING = -1
"""The unit of a row that fills a batch up to its fixed shape: it is computed, and contributes nothing."""
MODES = ("bookkeeping", "hooks")


class ClippedGradientEngine(Protocol):
    """Sums a model's gradients, clipped per unit."""

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float, in_all: int = 0) -> Gradients:
        """Sum over units of clip_C(mean over the unit's examples of the gradient), in float64.

        losses: computes the examples' losses (n,) in one forward pass; units (n,) numbers their units from 0, rows of
        `PADDING` at the end   in_all: units of the whole sum that this one is a part of; these alone without it.
        Guarantees: a unit whose gradient is not finite contributes zero, and changes no other's share.
        """
        ...


class _Call(NamedTuple):
    """One pass of a batch through a layer."""

    layer: nn.Module
    x: Tensor
    out: Tensor


class GhostClipping:
    """`ClippedGradientEngine` from the layers' inputs and the gradients of their outputs."""

    def __init__(self, model: nn.Module, grouped: bool = False) -> None:
        self._grouped = grouped
        self._params = trainable(model)
        self._layers = list(_layers(model))
        self._calls: list[_Call] = []

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float, in_all: int = 0) -> Gradients:
        batch = _Batch.of(units)
        calls, grads = self._passed(losses)
        times = {layer: sum(c.layer is layer for c in calls) for layer in {c.layer for c in calls}}
        short: list[tuple[_Call, Tensor]] = []
        samples: dict[nn.Parameter, Tensor] = {}
        for call, dy in zip(calls, grads, strict=True):
            # Where units may have several examples, one of two must not change how all others of a batch are computed.
            if (
                not self._grouped
                and batch.one_row_each
                and times[call.layer] == 1
                and layer_gradients.prefers_ghost_norms(call.layer, dy)
            ):
                short.append((call, dy))
                continue
            sampler = layer_gradients.sampler_of(call.layer)
            assert sampler is not None  # `mode_of` saw to it
            for p, sample in sampler(call.layer, [call.x], dy).items():
                samples[p] = samples[p] + sample if p in samples else sample
        samples = {p: batch.by_unit(sample) for p, sample in samples.items()}
        square = units.new_zeros(len(units), dtype=torch.float64)
        for call, dy in short:
            square += layer_gradients.ghost_norms(call.layer, call.x, dy)
        if samples:
            square += grid.square_norms(list(samples.values()))
        factor, block = grid.factors(square, clip)[: batch.units], grid.block_of(max(in_all, batch.units))
        total = {p: grid.weighted_sum(factor, sample[: batch.units], block) for p, sample in samples.items()}
        for call, dy in short:
            total |= layer_gradients.weighted_gradient(call.layer, call.x[: batch.units], dy[: batch.units], factor)
        return [total[p] if p in total else _zero(p) for p in self._params]

    def _passed(self, losses: Callable[[], Tensor]) -> tuple[list[_Call], list[Tensor]]:
        hooks = [layer.register_forward_hook(self._note) for layer in self._layers]
        try:
            loss = losses().sum()
        finally:
            for hook in hooks:
                hook.remove()
            calls, self._calls = self._calls, []
        found = torch.autograd.grad(loss, [c.out for c in calls], allow_unused=True)
        both = [(call, dy) for call, dy in zip(calls, found, strict=True) if dy is not None]
        return [call for call, _ in both], [dy for _, dy in both]

    def _note(self, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if torch.is_grad_enabled():  # a reference pass without gradients is none of the batch's
            self._calls.append(_Call(layer, inputs[0].detach(), out))


class OpacusHooks:
    """`ClippedGradientEngine` from the per-example gradients of every layer, which Opacus' hooks gather."""

    def __init__(self, model: nn.Module, wrapped: GradSampleModule) -> None:
        self._wrapped = wrapped
        self._params = trainable(model)

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float, in_all: int = 0) -> Gradients:
        batch = _Batch.of(units)
        for p in self._params:
            p.grad_sample = None  # type: ignore[attr-defined]
        self._wrapped.enable_hooks()
        try:
            losses().sum().backward()  # type: ignore[no-untyped-call]
        finally:
            self._wrapped.disable_hooks()
        samples = [batch.by_unit(self._sample(p, len(units))) for p in self._params]
        factor = grid.factors(grid.square_norms(samples), clip)[: batch.units]
        block = grid.block_of(max(in_all, batch.units))
        total = [grid.weighted_sum(factor, s[: batch.units], block) for s in samples]
        for p in self._params:
            p.grad_sample, p.grad = None, None  # type: ignore[attr-defined]
        return total

    @staticmethod
    def _sample(p: nn.Parameter, rows: int) -> Tensor:
        sample: Tensor | None = p.grad_sample  # type: ignore[attr-defined]
        if sample is None:  # the loss does not depend on this parameter
            return p.new_zeros((rows, *p.shape))
        return sample.detach()


class _Batch(NamedTuple):
    """The units of a batch's rows. Norms are taken in the batch's own shape, as everything is that a unit adds."""

    of_row: Tensor
    sizes: Tensor
    units: int
    one_row_each: bool

    @classmethod
    def of(cls, units: Tensor) -> _Batch:
        real = int((units != PADDING).sum())
        found = int(units[:real].max()) + 1 if real else 0
        of_row = torch.where(units == PADDING, units.new_full((), len(units) - 1), units)  # no unit has this number
        sizes = torch.bincount(of_row, minlength=len(units)).clamp(min=1)
        return cls(of_row, sizes, found, found == real)

    def by_unit(self, sample: Tensor) -> Tensor:
        """Average per-example gradients (n, ...) over the examples of each unit; rows of no unit are left over."""
        if self.one_row_each:
            return sample
        total = torch.zeros_like(sample).index_add_(0, self.of_row, sample)
        return total / self.sizes.to(total.dtype).view(-1, *([1] * (sample.dim() - 1)))


def mode_of(model: nn.Module) -> str:
    """Choose the faster mode that works: bookkeeping where each parameter belongs to one layer with a sampler."""
    owners = [p for layer in _layers(model) for p in layer.parameters(recurse=False) if p.requires_grad]
    known = all(layer_gradients.sampler_of(layer) and not list(layer.children()) for layer in _layers(model))
    shared = len({*owners}) < len(owners)
    return "bookkeeping" if known and not shared else "hooks"


@contextmanager
def per_unit(model: nn.Module, mode: str | None = None, grouped: bool = False) -> Iterator[ClippedGradientEngine]:
    """Make a model ready for sums of clipped gradients, and leave it as it was.

    mode: of MODES, chosen without one   grouped: units are groups, which may have several examples each.
    """
    mode = mode or mode_of(model)
    log.info("per-example gradients: %s", mode)
    if mode == "bookkeeping":
        yield GhostClipping(model, grouped)
        return
    wrapped = GradSampleModule(model, loss_reduction="sum")
    wrapped.disable_hooks()
    try:
        yield OpacusHooks(model, wrapped)
    finally:
        wrapped.remove_hooks()
        for p in model.parameters():
            for name in ("grad_sample", "_forward_counter"):
                if hasattr(p, name):
                    delattr(p, name)


def clipped(loss: Tensor, params: Sequence[nn.Parameter], clip: float) -> Gradients:
    """Return the gradient of one loss, shortened to `clip`, in float64: the share of one microbatch.

    Zero where it is not finite.
    """
    found = torch.autograd.grad(loss, list(params), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
    whole = grid.contributions(torch.cat([g.flatten() for g in grads]).unsqueeze(0), clip)[0]
    return [part.view_as(p) for part, p in zip(torch.split(whole, [p.numel() for p in params]), params, strict=True)]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            yield module


def _zero(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=torch.float64)
