"""EfficientNet-B0 on any input size. Tan and Le (2019), built from torchvision's blocks.

FedMR on skin lesions: features 1280 - dropout - Linear(1280, 640) - Linear(640, 8); FedGELA: projection (84,).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torchvision.models.efficientnet import EfficientNet, MBConv, MBConvConfig
from torchvision.ops import FrozenBatchNorm2d

from fl_core import validate
from fl_core.models.pretrained import TorchvisionNames
from fl_core.models.split_model import HeadOptions, SplitModel, image_shape
from fl_core.types.records import Schema

FEATURES = 1280


@dataclass(frozen=True, slots=True)
class EfficientNetB0(HeadOptions):
    """torchvision's EfficientNet-B0 features, dropout, a projection and a linear head.

    weights:    "none": the weights that a run begins with are no option of its model, but in the manifest's start.
    norm:       "batch"; "group" (gcd(groups, channels) groups), to train from scratch without mixing examples;
                "frozen": BatchNorm with fixed statistics and scale, for pretrained weights without mixing examples.
    dropout:    before the projection.   stochastic_depth: of the last block, rising linearly from 0.
    """

    weights: str = "none"
    norm: str = "batch"
    groups: int = 32
    projection: tuple[int, ...] = (640,)
    dropout: float = 0.2
    stochastic_depth: float = 0.2

    def build(self, schema: Schema) -> SplitModel:
        validate.one_of("E-CFG-02", "efficientnet_b0", weights=(self.weights, ("none",)))
        validate.one_of("E-CFG-02", "efficientnet_b0", norm=(self.norm, ("batch", "group", "frozen")))
        validate.between("E-CFG-02", "efficientnet_b0", 1, 320, groups=self.groups)
        validate.between("E-CFG-02", "efficientnet_b0", 0, 0.99, dropout=self.dropout)
        validate.between("E-CFG-02", "efficientnet_b0", 0, 0.99, stochastic_depth=self.stochastic_depth)
        image_shape("efficientnet_b0", schema, channels={3}, sizes=range(32, 2049))

        features = b0_features(self.norm, self.groups, self.stochastic_depth)
        body = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(self.dropout))
        return self.complete(body, FEATURES, schema)

    def torchvision_names(self) -> TorchvisionNames:
        return TorchvisionNames({"features.": "body.0."}, ("classifier.",))


# ---- blocks ----------------------------------------------------------------------------------------------------------

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
