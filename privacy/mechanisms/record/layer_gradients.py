"""Per-example gradients of single layers, and the squares of their norms without them.

Opacus' sampler for grouped convolutions takes the full product of output and input channels and then its block
diagonal, which is quadratic in the channels of a depthwise convolution (17 to 20 times a plain step for
EfficientNet-B0; with ours 2). Norms follow from two Gram matrices over the T places of a sequence or an image, with
X (p, T) the layer's inputs per place and G (o, T) the gradients of its outputs:

    ||G X^T||_F^2 = sum_tt' (X^T X)_tt' (G^T G)_tt'      T^2 (o + p) products, where G X^T itself takes T o p

Bu, Mao and Xu, "Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy",
NeurIPS 2022, who choose the cheaper of the two layer by layer, as `prefers_ghost_norms` does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample as opacus_conv
from opacus.grad_sample.utils import register_grad_sampler
from opacus.utils.tensor_utils import unfold2d
from torch import Tensor, nn

# The first layer's input needs no gradient, and the hook of Opacus says so at every step.
warnings.filterwarnings("ignore", message="Full backward hook is firing")

_ROUNDOFF = 2.0**-53

Sampler = Callable[[nn.Module, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]


def conv_grad_sample(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
    """Return per-example gradients of a convolution, exact, at a cost linear in the groups.

    activations: [x (n, i, *space)]; backprops (n, o, *space'). Only Conv2d with groups is ours; the rest is Opacus'.
    """
    if not isinstance(layer, nn.Conv2d) or layer.groups == 1 or len(activations[0]) == 0:
        result: dict[Tensor, Tensor] = opacus_conv(layer, activations, backprops)
        return result
    n, groups = len(backprops), layer.groups
    patches = _patches(layer, activations[0].to(backprops.dtype))
    found: dict[Tensor, Tensor] = {}
    if layer.weight.requires_grad:
        x = patches.reshape(n, groups, -1, patches.shape[-1])
        dy = backprops.reshape(n, groups, layer.out_channels // groups, -1)
        found[layer.weight] = torch.einsum("ngoq,ngpq->ngop", dy, x).reshape(n, *layer.weight.shape)
    if layer.bias is not None and layer.bias.requires_grad:
        found[layer.bias] = backprops.reshape(n, layer.out_channels, -1).sum(2)
    return found


register_grad_sampler([nn.Conv1d, nn.Conv2d, nn.Conv3d])(conv_grad_sample)


def sampler_of(layer: nn.Module) -> Sampler | None:
    found: Sampler | None = GradSampleModule.GRAD_SAMPLERS.get(type(layer))
    return found


def prefers_ghost_norms(layer: nn.Module, backprops: Tensor) -> bool:
    if isinstance(layer, nn.Linear):
        places = math.prod(backprops.shape[1:-1])
        return places == 1 or 2 * places * (layer.in_features + layer.out_features) < layer.weight.numel()
    if not isinstance(layer, nn.Conv2d) or layer.groups != 1 or isinstance(layer.padding, str):
        return False
    inputs = layer.weight[0].numel()
    return 2 * math.prod(backprops.shape[2:]) * (layer.out_channels + inputs) < layer.weight.numel()


def ghost_norms(layer: nn.Module, x: Tensor, backprops: Tensor) -> Tensor:
    """Bound the squared norms (n,), float64, of a layer's per-example gradients, for layers that `prefers_ghost_norms`.

    Places that cancel can make the rounding error larger than the sum itself: a bound on that error is added, 1e-10 of
    the norm for a model that is not hostile.
    """
    inputs, grads = _places(layer, x, backprops)
    found = grads.new_zeros(len(grads))
    if layer.weight.requires_grad:
        found += ((inputs.mT @ inputs) * (grads.mT @ grads)).sum((1, 2)).clamp(min=0.0)
        apart = (inputs.square().sum(1).sqrt() * grads.square().sum(1).sqrt()).sum(1)  # sum_t |x_t| |dy_t|
        terms = len(grads) * grads.shape[2] + grads.shape[2] ** 2 + inputs.shape[1] + grads.shape[1]
        found += 4 * terms * _ROUNDOFF * apart.square()
    if layer.bias is not None and layer.bias.requires_grad:
        found += (grads.sum(2).abs() + grads.shape[2] * _ROUNDOFF * grads.abs().sum(2)).square().sum(1)
    return found


def weighted_gradient(layer: nn.Module, x: Tensor, backprops: Tensor, factor: Tensor) -> dict[nn.Parameter, Tensor]:
    """Return sum_n factor_n g_n, float64, of per-example gradients g_n; one of factor 0 may hold anything."""
    inputs, grads = _places(layer, x, backprops)
    grads = torch.where(factor.view(-1, 1, 1) > 0, grads * factor.view(-1, 1, 1), torch.zeros_like(grads))
    params = {name: p for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    found: dict[nn.Parameter, Tensor] = {}
    if (weight := params.get("weight")) is not None:
        if bool((factor == 0).any()):
            inputs = torch.where(factor.view(-1, 1, 1) > 0, inputs, torch.zeros_like(inputs))
        wide = inputs.transpose(0, 1).flatten(1), grads.transpose(0, 1).flatten(1)  # (p, n T), (o, n T)
        found[weight] = (wide[1] @ wide[0].T).view(weight.shape)
    if (bias := params.get("bias")) is not None:
        found[bias] = grads.sum((0, 2))
    return found


def _places(layer: nn.Module, x: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's inputs (n, p, T) and output gradients (n, o, T) per place, in float64."""
    if isinstance(layer, nn.Conv2d):
        patches = _patches(layer, x.to(backprops.dtype))
        return patches.double(), backprops.reshape(len(backprops), layer.out_channels, -1).double()
    n = len(backprops)
    inputs, grads = x.reshape(n, -1, x.shape[-1]).mT, backprops.reshape(n, -1, backprops.shape[-1]).mT
    return inputs.double(), grads.double()


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Unfold x (n, i, h, w) to what each output place sees (n, i * kernel, places)."""
    found: Tensor = unfold2d(
        x, kernel_size=layer.kernel_size, padding=layer.padding, stride=layer.stride, dilation=layer.dilation
    )
    return found


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for _, p in model.named_parameters() if p.requires_grad]
