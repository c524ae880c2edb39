"""Sums of clipped gradients: per unit for the terms of one example, per microbatch for terms that mix examples.

Two modes give the same sums; `mode_of` chooses the faster one that a model permits:

bookkeeping  one backward pass for the gradients of the layers' outputs. A layer with few places gets its norms from
             Gram matrices and then its clipped sum as one ordinary gradient; other layers get per-example
             gradients. Autograd's own parameter gradients, which are not needed, are never computed.
hooks        per-example gradients of every layer, by Opacus' hooks beside autograd's

Bu, Wang, Zha and Karypis, "Differentially Private Optimization on Large Model at Small Cost", ICML 2023.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from privacy.mechanisms.noise import grid
from privacy.postponed_import import postpone

postpone("opacus")  # before any of its modules is imported
from opacus.grad_sample import GradSampleModule  # noqa: E402
from opacus.grad_sample.conv import compute_conv_grad_sample as opacus_conv  # noqa: E402
from opacus.grad_sample.utils import register_grad_sampler  # noqa: E402
from opacus.utils.tensor_utils import unfold2d  # noqa: E402

log = logging.getLogger(__name__)
# The first layer's input needs no gradient; Opacus' hook would warn about it at every step.
warnings.filterwarnings("ignore", message="Full backward hook is firing")

_ROUNDOFF = 2.0**-53

Gradients = list[Tensor]
"""One tensor per trainable parameter, in the order of `named_parameters`; sums are float64."""
PADDING = -1
"""Unit number of rows that pad a batch to its fixed shape; they are computed, but contribute nothing."""
MODES = ("bookkeeping", "hooks")


class ClippedGradientEngine(Protocol):
    """Sums a model's gradients, clipped per unit."""

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float, in_all: int = 0) -> Gradients:
        """Sum over units of clip_C(mean over the unit's examples of the gradient), in float64.

        losses: computes the examples' losses (n,) in one forward pass   units: (n,), the number of each example's unit,
        from 0; rows of `PADDING` are at the end   in_all: number of units in the whole sum, if this call computes only
        a part of it. Guarantees: a unit whose gradient is not finite contributes zero and does not change others.
        """
        ...


class _Call(NamedTuple):
    """One forward pass of a batch through a layer."""

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
            # If units may have several examples, a unit must not change the computation of the other units.
            if (
                not self._grouped
                and batch.one_row_each
                and times[call.layer] == 1
                and prefers_ghost_norms(call.layer, dy)
            ):
                short.append((call, dy))
                continue
            sampler = sampler_of(call.layer)
            assert sampler is not None  # `mode_of` ensures it
            for p, sample in sampler(call.layer, [call.x], dy).items():
                samples[p] = samples[p] + sample if p in samples else sample
        samples = {p: batch.by_unit(sample) for p, sample in samples.items()}
        square = units.new_zeros(len(units), dtype=torch.float64)
        for call, dy in short:
            square += ghost_norms(call.layer, call.x, dy)
        if samples:
            square += grid.square_norms(list(samples.values()))
        factor, block = grid.factors(square, clip)[: batch.units], grid.block_of(max(in_all, batch.units))
        total = {p: grid.weighted_sum(factor, sample[: batch.units], block) for p, sample in samples.items()}
        for call, dy in short:
            total |= weighted_gradient(call.layer, call.x[: batch.units], dy[: batch.units], factor)
        return [total[p] if p in total else _zero(p) for p in self._params]

    def _passed(self, losses: Callable[[], Tensor]) -> tuple[list[_Call], list[Tensor]]:
        hooks = [layer.register_forward_hook(self._note) for layer in self._layers]
        try:
            loss = losses().sum()
        finally:
            for hook in hooks:
                hook.remove()
            calls, self._calls = self._calls, []
        slopes = torch.autograd.grad(loss, [c.out for c in calls], allow_unused=True)
        both = [(call, dy) for call, dy in zip(calls, slopes, strict=True) if dy is not None]
        return [call for call, _ in both], [dy for _, dy in both]

    def _note(self, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if torch.is_grad_enabled():  # a reference pass without gradients, not part of the batch
            self._calls.append(_Call(layer, inputs[0].detach(), out))


class OpacusHooks:
    """`ClippedGradientEngine` from the per-example gradients of every layer, collected by Opacus' hooks."""

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
    """The units of a batch's rows. Norms are computed in the batch's own shape, like all contributions of units."""

    of_row: Tensor
    sizes: Tensor
    units: int
    one_row_each: bool

    @classmethod
    def of(cls, units: Tensor) -> _Batch:
        real = int((units != PADDING).sum())
        n_units = int(units[:real].max()) + 1 if real else 0
        of_row = torch.where(units == PADDING, units.new_full((), len(units) - 1), units)  # no unit has this number
        sizes = torch.bincount(of_row, minlength=len(units)).clamp(min=1)
        return cls(of_row, sizes, n_units, n_units == real)

    def by_unit(self, sample: Tensor) -> Tensor:
        """Average per-example gradients (n, ...) over the examples of each unit; rows without a unit are dropped."""
        if self.one_row_each:
            return sample
        total = torch.zeros_like(sample).index_add_(0, self.of_row, sample)
        return total / self.sizes.to(total.dtype).view(-1, *([1] * (sample.dim() - 1)))


def mode_of(model: nn.Module) -> str:
    """Choose the faster mode that works: bookkeeping if each parameter belongs to one layer with a sampler."""
    owners = [p for layer in _layers(model) for p in layer.parameters(recurse=False) if p.requires_grad]
    supported = all(sampler_of(layer) and not list(layer.children()) for layer in _layers(model))
    shared = len({*owners}) < len(owners)
    return "bookkeeping" if supported and not shared else "hooks"


@contextmanager
def per_unit(model: nn.Module, mode: str | None = None, grouped: bool = False) -> Iterator[ClippedGradientEngine]:
    """Prepare a model for sums of clipped gradients, and restore it afterwards.

    mode: of MODES, chosen if None   grouped: units are groups, which may have several examples each.
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
    """Return the gradient of one loss, clipped to `clip`, in float64: the contribution of one microbatch.

    Zero if it is not finite.
    """
    slopes = torch.autograd.grad(loss, list(params), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(params, slopes, strict=True)]
    whole = grid.contributions(torch.cat([g.flatten() for g in grads]).unsqueeze(0), clip)[0]
    return [part.view_as(p) for part, p in zip(torch.split(whole, [p.numel() for p in params]), params, strict=True)]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            yield module


def _zero(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=torch.float64)


# ---- single layers ---------------------------------------------------------------------------------------------------
#
# Opacus' sampler for grouped convolutions takes the full product of output and input channels and then its block
# diagonal, which is quadratic in the channels of a depthwise convolution (17 to 20 times a plain step for
# EfficientNet-B0; with ours 2). Norms follow from two Gram matrices over the T places of a sequence or an image, with
# X (p, T) the layer's inputs per place and G (o, T) the gradients of its outputs:
#
#     ||G X^T||_F^2 = sum_tt' (X^T X)_tt' (G^T G)_tt'      T^2 (o + p) products, where G X^T itself takes T o p
#
# Bu, Mao and Xu, "Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy",
# NeurIPS 2022, who choose the cheaper of the two layer by layer, as `prefers_ghost_norms` does.
#
# These products are float64. A computed sum of K products is off by up to gamma_K = K u / (1 - K u) times the sum of
# their sizes (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1), here gamma_K sum_n f_n a_n with
# a_n = sum_t |x_t| |dy_t|, which for a hostile model has no limit in terms of a gradient's norm. In float64 the term
# that `ghost_norms` adds limits f_n a_n. In float32 (u = 2^-24) `grid.FLOATS` would leave blocks of K = 8388 / (units
# a_n / |g_n|) products, which takes as long as float64 from 64 units on (benchmarks/steps).

Sampler = Callable[[nn.Module, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]


def conv_grad_sample(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
    """Return per-example gradients of a convolution, exact, at a cost linear in the groups.

    activations: [x (n, i, *space)]; backprops (n, o, *space'). Conv2d is ours; Opacus does the others.
    """
    if not isinstance(layer, nn.Conv2d):
        from torch.distributed import fsdp  # noqa: F401  # half a second; Opacus' sampler looks into it unimported

        result: dict[Tensor, Tensor] = opacus_conv(layer, activations, backprops)
        return result
    n, groups = len(backprops), layer.groups
    patches = _patches(layer, activations[0].to(backprops.dtype))
    samples: dict[Tensor, Tensor] = {}
    if layer.weight.requires_grad:
        x = patches.reshape(n, groups, -1, patches.shape[-1])
        dy = backprops.reshape(n, groups, layer.out_channels // groups, -1)
        samples[layer.weight] = torch.einsum("ngoq,ngpq->ngop", dy, x).reshape(n, *layer.weight.shape)
    if layer.bias is not None and layer.bias.requires_grad:
        samples[layer.bias] = backprops.reshape(n, layer.out_channels, -1).sum(2)
    return samples


register_grad_sampler([nn.Conv1d, nn.Conv2d, nn.Conv3d])(conv_grad_sample)


def sampler_of(layer: nn.Module) -> Sampler | None:
    sampler: Sampler | None = GradSampleModule.GRAD_SAMPLERS.get(type(layer))
    return sampler


def prefers_ghost_norms(layer: nn.Module, backprops: Tensor) -> bool:
    if isinstance(layer, nn.Linear):
        places = math.prod(backprops.shape[1:-1])
        return places == 1 or 2 * places * (layer.in_features + layer.out_features) < layer.weight.numel()
    if not isinstance(layer, nn.Conv2d) or layer.groups != 1 or isinstance(layer.padding, str):
        return False
    inputs = layer.weight[0].numel()
    return 2 * math.prod(backprops.shape[2:]) * (layer.out_channels + inputs) < layer.weight.numel()


def ghost_norms(layer: nn.Module, x: Tensor, backprops: Tensor) -> Tensor:
    """Bound the squared norms (n,), float64, of a layer's per-example gradients, for layers with `prefers_ghost_norms`.

    If places cancel, the rounding error can exceed the sum itself: a bound on that error is added, 1e-10 of the norm
    for a model that is not adversarial.
    """
    inputs, grads = _places(layer, x, backprops)
    norms, places = grads.new_zeros(len(grads)), grads.shape[1]
    if layer.weight.requires_grad:
        of_inputs, of_grads = inputs @ inputs.mT, grads @ grads.mT
        norms += (of_inputs * of_grads).sum((1, 2)).clamp(min=0.0)
        squares = of_inputs.diagonal(dim1=1, dim2=2) * of_grads.diagonal(dim1=1, dim2=2)
        apart = squares.sqrt().sum(1)  # sum_t |x_t| |dy_t|
        terms = len(grads) * places + places**2 + inputs.shape[2] + grads.shape[2]
        norms += 4 * terms * _ROUNDOFF * apart.square()
    if layer.bias is not None and layer.bias.requires_grad:
        norms += (grads.sum(1).abs() + places * _ROUNDOFF * grads.abs().sum(1)).square().sum(1)
    return norms


def weighted_gradient(layer: nn.Module, x: Tensor, backprops: Tensor, factor: Tensor) -> dict[nn.Parameter, Tensor]:
    """Return sum_n factor_n g_n, float64, of per-example gradients g_n. A g_n with factor 0 may contain anything."""
    inputs, grads = _places(layer, x, backprops)
    grads = torch.where(factor.view(-1, 1, 1) > 0, grads * factor.view(-1, 1, 1), torch.zeros_like(grads))
    params = {name: p for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    gradients: dict[nn.Parameter, Tensor] = {}
    if (weight := params.get("weight")) is not None:
        if bool((factor == 0).any()):
            inputs = torch.where(factor.view(-1, 1, 1) > 0, inputs, torch.zeros_like(inputs))
        whole = grads.flatten(0, 1).T @ inputs.flatten(0, 1)
        if isinstance(layer, nn.Conv2d):
            whole = whole.view(layer.out_channels, *layer.kernel_size, layer.in_channels).movedim(3, 1)
        gradients[weight] = whole
    if (bias := params.get("bias")) is not None:
        gradients[bias] = grads.sum((0, 1))
    return gradients


def _places(layer: nn.Module, x: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's inputs (n, T, p) and output gradients (n, T, o) per place, in float64.

    Of a convolution p is (kernel, i) with channels last: what one row of the kernel sees lies together, so that patches
    are copied a row at a time, at once in the precision and the order of the products.
    """
    n = len(backprops)
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(n, -1, x.shape[-1]).double(), backprops.reshape(n, -1, backprops.shape[-1]).double()
    assert not isinstance(layer.padding, str)  # `prefers_ghost_norms` ensures it
    (up, left), (down, right), (wide, high) = layer.padding, layer.stride, layer.dilation
    rows, columns = backprops.shape[2:]
    padded = x.new_zeros(n, x.shape[2] + 2 * up, x.shape[3] + 2 * left, x.shape[1], dtype=torch.float64)
    padded[:, up : up + x.shape[2], left : left + x.shape[3]] = x.permute(0, 2, 3, 1)
    of_image, of_row, of_column, _ = padded.stride()
    patches = padded.as_strided(
        (n, rows, columns, *layer.kernel_size, x.shape[1]),
        (of_image, down * of_row, right * of_column, wide * of_row, high * of_column, 1),
    )
    grads = backprops.flatten(2).mT.to(torch.float64, memory_format=torch.contiguous_format)
    return patches.reshape(n, rows * columns, -1), grads


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Unfold x (n, i, h, w) to the inputs of each output place (n, i * kernel, places)."""
    patches: Tensor = unfold2d(
        x, kernel_size=layer.kernel_size, padding=layer.padding, stride=layer.stride, dilation=layer.dilation
    )
    return patches


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for _, p in model.named_parameters() if p.requires_grad]
