"""Per-example gradients of single layers, and the squares of their norms without them.

Opacus' sampler for grouped convolutions takes the full product of output and input channels and then its block
diagonal, which is quadratic in the channels of a depthwise convolution (17 to 20 times a plain step for
EfficientNet-B0; with ours 2). Norms follow from two Gram matrices over the T places of a sequence or an image, with
X (p, T) the layer's inputs per place and G (o, T) the gradients of its outputs:

    ||G X^T||_F^2 = sum_tt' (X^T X)_tt' (G^T G)_tt'      T^2 (o + p) products, where G X^T itself takes T o p

Bu, Mao and Xu, "Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy",
NeurIPS 2022, who choose the cheaper of the two layer by layer, as `is_shorter` does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample as opacus_conv
from opacus.grad_sample.utils import register_grad_sampler
from opacus.utils.tensor_utils import unfold2d
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

# The first layer's input needs no gradient, and the hook of Opacus says so at every step.
warnings.filterwarnings("ignore", message="Full backward hook is firing")

_PIECE = 4096

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
    """Return what computes a layer's per-example gradients from its input and its output's gradient, if anything."""
    found: Sampler | None = GradSampleModule.GRAD_SAMPLERS.get(type(layer))
    return found


def is_shorter(layer: nn.Module, backprops: Tensor) -> bool:
    """Tell whether norms by Gram matrices, in float64, cost less than per-example gradients."""
    if isinstance(layer, nn.Linear):
        places = math.prod(backprops.shape[1:-1])
        return places == 1 or 2 * places * (layer.in_features + layer.out_features) < layer.weight.numel()
    if not isinstance(layer, nn.Conv2d) or layer.groups != 1 or isinstance(layer.padding, str):
        return False
    inputs = layer.weight[0].numel()
    return 2 * math.prod(backprops.shape[2:]) * (layer.out_channels + inputs) < layer.weight.numel()


def squares(layer: nn.Module, x: Tensor, backprops: Tensor) -> Tensor:
    """Return the squared norms (n,), float64, of a layer's per-example gradients without computing these.

    For layers that `is_shorter` accepts. In float64 because the sum over pairs of places has terms of both signs: its
    error would otherwise be as large as a small norm.
    """
    n = len(backprops)
    if isinstance(layer, nn.Conv2d):
        inputs, grads = _patches(layer, x.to(backprops.dtype)), backprops.reshape(n, layer.out_channels, -1)
    else:
        inputs, grads = x.reshape(n, -1, x.shape[-1]).mT, backprops.reshape(n, -1, backprops.shape[-1]).mT
    inputs, grads = inputs.double(), grads.double()
    found = grads.new_zeros(n)
    if layer.weight.requires_grad:
        found += ((inputs.mT @ inputs) * (grads.mT @ grads)).sum((1, 2)).clamp(min=0.0)
    if layer.bias is not None and layer.bias.requires_grad:
        found += grads.sum(2).square().sum(1)
    return found


def weighted(layer: nn.Module, x: Tensor, backprops: Tensor, factor: Tensor) -> dict[nn.Parameter, Tensor]:
    """Return sum_n factor_n g_n of a layer's per-example gradients g_n, as its usual gradient for scaled outputs."""
    dy = backprops * factor.to(backprops.dtype).reshape(-1, *([1] * (backprops.dim() - 1)))
    params = {name: p for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    found: dict[nn.Parameter, Tensor] = {}
    conv = layer if isinstance(layer, nn.Conv2d) else None
    if (weight := params.get("weight")) is not None:
        if conv is not None:
            strides = conv.stride, conv.padding, conv.dilation
            found[weight] = conv2d_weight(x.to(dy), weight.shape, dy, *strides)  # type: ignore[no-untyped-call]
        else:
            found[weight] = dy.reshape(-1, dy.shape[-1]).T @ x.to(dy).reshape(-1, x.shape[-1])
    if (bias := params.get("bias")) is not None:
        found[bias] = dy.sum((0, 2, 3)) if conv is not None else dy.reshape(-1, dy.shape[-1]).sum(0)
    return found


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Unfold x (n, i, h, w) to what each output place sees (n, i * kernel, places)."""
    found: Tensor = unfold2d(
        x, kernel_size=layer.kernel_size, padding=layer.padding, stride=layer.stride, dilation=layer.dilation
    )
    return found


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """List the trainable parameters in the order of their names."""
    return [p for _, p in model.named_parameters() if p.requires_grad]


def square_norms(samples: Sequence[Tensor]) -> Tensor:
    """Return the squared joint norms (u,), float64, of gradients (u, ...), one per parameter."""
    return torch.stack([_square(s.flatten(1)) for s in samples]).sum(0)


def _square(rows: Tensor) -> Tensor:
    """Return the squared norms of rows (u, P), float64.

    A float32 norm of millions of numbers is wrong by up to 1e-3, so it is taken of pieces alone (1e-7).
    """
    whole = rows.shape[1] // _PIECE * _PIECE
    found: Tensor = torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square()
    if whole:
        pieces = rows[:, :whole].reshape(len(rows), -1, _PIECE)
        found = found + torch.linalg.vector_norm(pieces, dim=2).double().square().sum(1)
    return found
