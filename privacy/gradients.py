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

from privacy import grid, samplers
from privacy.samplers import conv_grad_sample as conv_grad_sample
from privacy.samplers import trainable as trainable

log = logging.getLogger(__name__)

Gradients = list[Tensor]
"""One tensor per trainable parameter, in the order of `named_parameters`; sums are float64."""
PADDING = -1
"""The unit of a row that fills a batch up to its fixed shape: it is computed, and contributes nothing."""
MODES = ("bookkeeping", "hooks")


class PerUnit(Protocol):
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


class Bookkeeping:
    """`PerUnit` from the layers' inputs and the gradients of their outputs."""

    def __init__(self, model: nn.Module) -> None:
        self._params = trainable(model)
        self._layers = list(_layers(model))
        self._calls: list[_Call] = []

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float, in_all: int = 0) -> Gradients:
        """Sum clipped gradients, as the protocol says."""
        real = _real(units)
        calls, grads = self._passed(losses)
        sizes = torch.bincount(units[:real])
        alone = len(sizes) == real
        times = {layer: sum(c.layer is layer for c in calls) for layer in {c.layer for c in calls}}
        short: list[tuple[_Call, Tensor]] = []
        samples: dict[nn.Parameter, Tensor] = {}
        for call, dy in zip(calls, grads, strict=True):
            if alone and times[call.layer] == 1 and samplers.is_shorter(call.layer, dy):
                short.append((call._replace(x=call.x[:real]), dy[:real]))
                continue
            sampler = samplers.sampler_of(call.layer)
            assert sampler is not None  # `mode_of` saw to it
            for p, sample in sampler(call.layer, [call.x], dy).items():
                samples[p] = samples[p] + sample if p in samples else sample
        samples = {p: _of_units(sample[:real], units[:real], sizes) for p, sample in samples.items()}
        square = units.new_zeros(len(sizes), dtype=torch.float64)
        for call, dy in short:
            square += samplers.squares(call.layer, call.x, dy)
        factor = grid.factors(square + grid.square_norms(list(samples.values())) if samples else square, clip)
        block = grid.block_of(max(in_all, len(sizes)))
        total = {p: grid.weighted_sum(factor, sample, block) for p, sample in samples.items()}
        for call, dy in short:
            total |= samplers.weighted(call.layer, call.x, dy, factor)
        return [total[p] if p in total else _zero(p) for p in self._params]

    def _passed(self, losses: Callable[[], Tensor]) -> tuple[list[_Call], list[Tensor]]:
        """Run the batch forwards and backwards: the layers that had influence, and their outputs' gradients."""
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


class Hooks:
    """`PerUnit` from the per-example gradients of every layer, which Opacus' hooks gather."""

    def __init__(self, model: nn.Module, wrapped: GradSampleModule) -> None:
        self._wrapped = wrapped
        self._params = trainable(model)

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float, in_all: int = 0) -> Gradients:
        """Sum clipped gradients, as the protocol says."""
        real = _real(units)
        for p in self._params:
            p.grad_sample = None  # type: ignore[attr-defined]
        self._wrapped.enable_hooks()
        try:
            losses().sum().backward()  # type: ignore[no-untyped-call]
        finally:
            self._wrapped.disable_hooks()
        sizes = torch.bincount(units[:real])
        samples = [self._sample(p, units[:real], sizes) for p in self._params]
        factor = grid.factors(grid.square_norms(samples), clip)
        block = grid.block_of(max(in_all, len(sizes)))
        total = [grid.weighted_sum(factor, s, block) for s in samples]
        for p in self._params:
            p.grad_sample, p.grad = None, None  # type: ignore[attr-defined]
        return total

    @staticmethod
    def _sample(p: nn.Parameter, units: Tensor, sizes: Tensor) -> Tensor:
        sample: Tensor | None = p.grad_sample  # type: ignore[attr-defined]
        if sample is None:  # the loss does not depend on this parameter
            return p.new_zeros((len(sizes), *p.shape))
        return _of_units(sample.detach()[: len(units)], units, sizes)


def mode_of(model: nn.Module) -> str:
    """Choose the faster mode that works: bookkeeping where each parameter belongs to one layer with a sampler."""
    owners = [p for layer in _layers(model) for p in layer.parameters(recurse=False) if p.requires_grad]
    known = all(samplers.sampler_of(layer) and not list(layer.children()) for layer in _layers(model))
    shared = len({*owners}) < len(owners)
    return "bookkeeping" if known and not shared else "hooks"


@contextmanager
def per_unit(model: nn.Module, mode: str | None = None) -> Iterator[PerUnit]:
    """Make a model ready for sums of clipped gradients, and leave it as it was; mode: of MODES, chosen without one."""
    mode = mode or mode_of(model)
    log.info("per-example gradients: %s", mode)
    if mode == "bookkeeping":
        yield Bookkeeping(model)
        return
    wrapped = GradSampleModule(model, loss_reduction="sum")
    wrapped.disable_hooks()
    try:
        yield Hooks(model, wrapped)
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
    """List the modules that hold trainable parameters of their own."""
    for module in model.modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            yield module


def _of_units(sample: Tensor, units: Tensor, sizes: Tensor) -> Tensor:
    """Average per-example gradients (n, ...) over the examples of each unit."""
    if len(sizes) == len(units):
        return sample
    total = sample.new_zeros((len(sizes), *sample.shape[1:])).index_add_(0, units, sample)
    return total / sizes.to(total.dtype).view(-1, *([1] * (sample.dim() - 1)))


def _real(units: Tensor) -> int:
    """Count the rows before the padding."""
    return int((units != PADDING).sum())


def _zero(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=torch.float64)
