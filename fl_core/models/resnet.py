"""The CIFAR form of ResNet-18. He et al. (2016); stem without max-pool as MOON and FedMR use it.

conv3x3(cin,64)-norm-ReLU, four stages of two basic blocks, widths 64/128/256/512, strides 1/2/2/2, a 1x1
convolution with norm where the shape changes, global average pool, feature 512.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fl_core.errors import ConfigError
from fl_core.models.options import image_shape, one_of
from fl_core.models.split import SplitModel, assemble
from fl_core.types import Schema

WIDTHS = (64, 128, 256, 512)
Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)); the sum is out of place, hooks may keep its terms."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), norm(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), norm(after))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, before, H, W) to (B, after, H/stride, W/stride)."""
        out: Tensor = self.relu(self.second(self.first(x)) + self.shortcut(x))
        return out


@dataclass(frozen=True, slots=True)
class ResNet18:
    """CIFAR ResNet-18: 11,173,962 parameters with 3 channels and 10 classes.

    norm: "batch", or "group" with `groups` groups (FedNH: 2), which keeps no buffers and mixes no examples.
    head_bias: False for FedNH, FedRS and MAP.
    """

    norm: str = "batch"
    groups: int = 2
    projection: tuple[int, ...] = ()
    head_bias: bool = True

    def build(self, schema: Schema) -> SplitModel:
        """Make the model for 1 or 3 channels; raises ConfigError (E-CFG-22, E-CFG-23)."""
        one_of("resnet18", "norm", self.norm, ("batch", "group"))
        if self.groups < 1 or WIDTHS[0] % self.groups:
            raise ConfigError("E-CFG-22", f"resnet18.groups: expected a divisor of 64, found {self.groups}: change it")
        channels, _ = image_shape("resnet18", schema, channels={1, 3}, sizes=range(8, 1025))
        layers: list[nn.Module] = [
            nn.Conv2d(channels, WIDTHS[0], 3, 1, 1, bias=False),
            self._norm(WIDTHS[0]),
            nn.ReLU(),
        ]
        before = WIDTHS[0]
        for stage, after in enumerate(WIDTHS):
            layers += [BasicBlock(before, after, 1 if stage == 0 else 2, self._norm)]
            layers += [BasicBlock(after, after, 1, self._norm)]
            before = after
        body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for module in body.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return assemble(body, before, self.projection, len(schema.classes), head_bias=self.head_bias)

    def _norm(self, width: int) -> nn.Module:
        return nn.BatchNorm2d(width) if self.norm == "batch" else nn.GroupNorm(self.groups, width)
