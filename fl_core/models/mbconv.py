"""EfficientNet-B0's features from torchvision's blocks, with a choice of normalisation and nothing in place."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from torchvision.models.efficientnet import EfficientNet, MBConv, MBConvConfig
from torchvision.ops import FrozenBatchNorm2d

# expand ratio, kernel, stride, channels in, channels out, layers: table 1 of the paper
STAGES = (
    (1, 3, 1, 32, 16, 1),
    (6, 3, 2, 16, 24, 2),
    (6, 5, 2, 24, 40, 2),
    (6, 3, 2, 40, 80, 3),
    (6, 5, 1, 80, 112, 3),
    (6, 5, 2, 112, 192, 4),
    (6, 3, 1, 192, 320, 1),
)


class _Block(MBConv):  # type: ignore[misc]  # torchvision has no annotations
    """MBConv whose residual sum is out of place: torchvision's `+=` breaks hooks that keep activations."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.block(input)
        return self.stochastic_depth(out) + input if self.use_res_connect else out


def b0_features(norm: str, groups: int, stochastic_depth: float) -> nn.Module:
    """Make the features (B, 3, H, W) -> (B, 1280, H/32, W/32).

    norm: "batch", "group" (gcd(groups, channels) groups) or "frozen" (BatchNorm with fixed statistics and scale).
    """
    stages = [MBConvConfig(*stage, block=_Block) for stage in STAGES]
    net = EfficientNet(stages, 0.0, stochastic_depth, num_classes=2, norm_layer=_norm_layer(norm, groups))
    for module in net.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    features: nn.Module = net.features
    return features


def _norm_layer(norm: str, groups: int) -> Callable[[int], nn.Module]:
    if norm == "batch":
        return nn.BatchNorm2d
    if norm == "frozen":
        return lambda channels: FrozenBatchNorm2d(channels)
    return lambda channels: nn.GroupNorm(math.gcd(groups, channels), channels)
