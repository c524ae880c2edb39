"""Sums of clipped gradients: per unit for the terms of one example, per microbatch for terms that mix examples.

Per-example gradients come from Opacus' hooks, with a sampler of ours for grouped convolutions: Opacus' own takes the
full product of output and input channels and then its block diagonal, which is quadratic in the channels of a depthwise
convolution (17 to 20 times a plain step for EfficientNet-B0; with ours 2).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample as opacus_conv
from opacus.grad_sample.utils import register_grad_sampler
from opacus.utils.tensor_utils import unfold2d
from torch import Tensor, nn

# The first layer's input needs no gradient, and its hook says so at every step.
warnings.filterwarnings("ignore", message="Full backward hook is firing")

Gradients = list[Tensor]
"""One tensor per trainable parameter, in the order of `named_parameters`."""
_SAFE = 1.0 + 1e-6
"""Norms are computed in float32: the clip is by so much shorter that rounding cannot make it longer."""


def conv_grad_sample(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
    """Return per-example gradients of a convolution, exact, at a cost linear in the groups.

    activations: [x (n, i, *space)]; backprops (n, o, *space'). Only Conv2d with groups is ours; the rest is Opacus'.
    """
    if not isinstance(layer, nn.Conv2d) or layer.groups == 1 or len(activations[0]) == 0:
        result: dict[Tensor, Tensor] = opacus_conv(layer, activations, backprops)
        return result
    n, groups = len(backprops), layer.groups
    patches = unfold2d(
        activations[0].to(backprops.dtype), kernel_size=layer.kernel_size, padding=layer.padding, stride=layer.stride,
        dilation=layer.dilation,
    )  # fmt: skip
    found: dict[Tensor, Tensor] = {}
    if layer.weight.requires_grad:
        x = patches.reshape(n, groups, -1, patches.shape[-1])
        dy = backprops.reshape(n, groups, layer.out_channels // groups, -1)
        found[layer.weight] = torch.einsum("ngoq,ngpq->ngop", dy, x).reshape(n, *layer.weight.shape)
    if layer.bias is not None and layer.bias.requires_grad:
        found[layer.bias] = backprops.reshape(n, layer.out_channels, -1).sum(2)
    return found


register_grad_sampler([nn.Conv1d, nn.Conv2d, nn.Conv3d])(conv_grad_sample)


class PerUnit:
    """Per-example gradients of a model, gathered per unit, clipped and summed."""

    def __init__(self, model: nn.Module, wrapped: GradSampleModule) -> None:
        self._wrapped = wrapped
        self._params = trainable(model)

    def clipped_sum(self, losses: Callable[[], Tensor], units: Tensor, clip: float) -> Gradients:
        """Sum over units of clip_C(mean over the unit's examples of the gradient).

        losses: computes the examples' losses (n,) in one forward pass; units (n,) numbers their units from 0.
        """
        for p in self._params:
            p.grad_sample = None  # type: ignore[attr-defined]
        self._wrapped.enable_hooks()
        try:
            losses().sum().backward()  # type: ignore[no-untyped-call]
        finally:
            self._wrapped.disable_hooks()
        sizes = torch.bincount(units)
        samples = [self._of_units(p, units, sizes) for p in self._params]
        squares = torch.stack([s.flatten(1).square().sum(1) for s in samples]).sum(0)
        factor = (clip / (squares.sqrt() * _SAFE)).clamp(max=1.0)
        total = [torch.einsum("u,u...->...", factor.to(s.dtype), s) for s in samples]
        for p in self._params:
            p.grad_sample, p.grad = None, None  # type: ignore[attr-defined]
        return total

    @staticmethod
    def _of_units(p: nn.Parameter, units: Tensor, sizes: Tensor) -> Tensor:
        sample: Tensor | None = p.grad_sample  # type: ignore[attr-defined]
        if sample is None:  # the loss does not depend on this parameter
            return p.new_zeros((len(sizes), *p.shape))
        if len(sizes) == len(units):
            return sample.detach()
        total = sample.new_zeros((len(sizes), *p.shape)).index_add_(0, units, sample.detach())
        return total / sizes.to(total.dtype).view(-1, *([1] * p.dim()))


@contextmanager
def per_unit(model: nn.Module) -> Iterator[PerUnit]:
    """Put the hooks on a model, and take them off again."""
    wrapped = GradSampleModule(model, loss_reduction="sum")
    wrapped.disable_hooks()
    try:
        yield PerUnit(model, wrapped)
    finally:
        wrapped.remove_hooks()
        for p in model.parameters():
            for name in ("grad_sample", "_forward_counter"):
                if hasattr(p, name):
                    delattr(p, name)


def clipped(loss: Tensor, params: Sequence[nn.Parameter], clip: float) -> Gradients:
    """Return the gradient of one loss, shortened to `clip`: the share of one microbatch."""
    found = torch.autograd.grad(loss, list(params), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    factor = (clip / (norm * _SAFE)).clamp(max=1.0)
    return [g * factor for g in grads]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """List the trainable parameters in the order of their names."""
    return [p for _, p in model.named_parameters() if p.requires_grad]
