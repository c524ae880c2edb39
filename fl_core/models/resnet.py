"""ResNet (He et al., 2016) and WRN-28-10. In the CIFAR form the stem has no max-pool, as MOON and FedMR use it.

conv3x3(cin,w)-norm-ReLU, stages of blocks of which the first halves the side from the second stage on, a 1x1
convolution with norm where the shape changes, global average pool.

| name     | stages x blocks     | widths         | feature | papers                                  |
|----------|---------------------|----------------|---------|-----------------------------------------|
| resnet18 | 2, 2, 2, 2          | 64 .. 512      | 512     | FedMR, FedGELA; FedNH (norm=group)      |
| resnet50 | 3, 4, 6, 3 (bottle) | 64 .. 512      | 2048    | FedGELA; FedCD (projection=[2048, 256]) |
| resnet20 | 3, 3, 3             | 16, 32, 64     | 64      | MAP                                     |
| resnet56 | 9, 9, 9             | 16, 32, 64     | 64      | MAP                                     |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.models.pretrained import PublishedNames
from fl_core.models.split_model import HeadOptions, SplitModel, image_shape, kaiming
from fl_core.types.records import Schema

Norm = Callable[[int], nn.Module]
_STEMS = {"cifar": (3, 1, 1), "imagenet": (7, 2, 3)}
"""Kernel, stride and padding of the first convolution."""
_TORCHVISION = ("resnet18", "resnet50")
_WIDE_STEM, _WIDE_WIDTHS, _WIDE_BLOCKS = 16, (160, 320, 640), 4


class ResNetLayout(NamedTuple):
    """What tells the depths apart: blocks per stage, their inner widths, and whether they are bottlenecks."""

    name: str
    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    bottleneck: bool = False


class BasicBlock(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)); the sum is out of place, hooks may keep its terms."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), norm(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), norm(after))
        self.shortcut = _shortcut(before, after, stride, norm)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.second(self.first(x)) + self.shortcut(x))
        return out


def _shortcut(before: int, after: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))


class Bottleneck(nn.Module):
    """relu(norm(conv1x1(relu(norm(conv3x3(relu(norm(conv1x1(x)))))))) + shortcut(x)); the 3x3 has the stride."""

    expansion = 4

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        inner = after // self.expansion
        self.first = nn.Sequential(nn.Conv2d(before, inner, 1, bias=False), norm(inner), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), norm(inner), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(inner, after, 1, bias=False), norm(after))
        self.shortcut = _shortcut(before, after, stride, norm)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.third(self.second(self.first(x))) + self.shortcut(x))
        return out


@dataclass(frozen=True, slots=True)
class ResNet18(HeadOptions):
    """CIFAR ResNet-18: 11,173,962 parameters with 3 channels and 10 classes.

    norm: "batch", or "group" with `groups` groups (FedNH: 2), which keeps no buffers and mixes no examples.
    head_bias: False for FedNH, FedRS and MAP.
    stem: "cifar" (conv3x3), or "imagenet" (conv7x7 of stride 2, then a max-pool), which is torchvision's network and
    suits images of 64 pixels or more.
    """

    norm: str = "batch"
    groups: int = 2
    stem: str = "cifar"
    omitted_at_default: ClassVar[frozenset[str]] = HeadOptions.omitted_at_default | {"stem"}
    _plan: ClassVar[ResNetLayout] = ResNetLayout("resnet18", (2, 2, 2, 2), (64, 128, 256, 512))

    def build(self, schema: Schema) -> SplitModel:
        plan = self._plan
        before = plan.widths[0]
        validate.one_of("E-CFG-02", plan.name, ("batch", "group"), norm=self.norm)
        validate.one_of("E-CFG-02", plan.name, tuple(_STEMS), stem=self.stem)
        if self.groups < 1 or before % self.groups:
            raise ConfigError(
                "E-CFG-02", f"{plan.name}.groups: expected a divisor of {before}, found {self.groups}: change it"
            )
        channels, _ = image_shape(plan.name, schema, channels={1, 3}, sizes=range(8, 1025))
        kernel, stride, padding = _STEMS[self.stem]
        stem = nn.Conv2d(channels, before, kernel, stride, padding, bias=False)
        layers: list[nn.Module] = [stem, self._norm(before), nn.ReLU()]
        if self.stem == "imagenet":
            layers.append(nn.MaxPool2d(3, 2, 1))
        for stage, (blocks, width) in enumerate(zip(plan.blocks, plan.widths, strict=True)):
            after = width * (Bottleneck.expansion if plan.bottleneck else 1)
            for block in range(blocks):
                kind = Bottleneck if plan.bottleneck else BasicBlock
                layers.append(kind(before, after, 2 if stage and not block else 1, self._norm))
                before = after
        body = kaiming(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        return self.complete(body, before, schema)

    def published_names(self) -> tuple[PublishedNames, ...]:
        """Return torchvision's names, which are timm's; the CIFAR form has another stem, which begins anew."""
        plan = self._plan
        if plan.name not in _TORCHVISION:
            return ()
        prefixes, place = {"bn1.": "body.1."}, 3
        if self.stem == "imagenet":
            prefixes["conv1."], place = "body.0.", 4
        inner = ("first", "second", "third") if plan.bottleneck else ("first", "second")
        for stage, blocks in enumerate(plan.blocks, start=1):
            for block in range(blocks):
                theirs, ours = f"layer{stage}.{block}", f"body.{place}"
                for number, name in enumerate(inner, start=1):
                    prefixes |= {f"{theirs}.conv{number}.": f"{ours}.{name}.0."}
                    prefixes |= {f"{theirs}.bn{number}.": f"{ours}.{name}.1."}
                prefixes |= {f"{theirs}.downsample.{i}.": f"{ours}.shortcut.{i}." for i in (0, 1)}
                place += 1
        if self.stem == "imagenet":
            return (PublishedNames(prefixes, ("fc.",)),)
        return (PublishedNames(prefixes, ("fc.", "conv1."), ("body.0.",)),)

    def _norm(self, width: int) -> nn.Module:
        return nn.BatchNorm2d(width) if self.norm == "batch" else nn.GroupNorm(self.groups, width)


@dataclass(frozen=True, slots=True)
class ResNet50(ResNet18):
    """CIFAR ResNet-50: 23,520,842 parameters with 3 channels and 10 classes."""

    _plan: ClassVar[ResNetLayout] = ResNetLayout("resnet50", (3, 4, 6, 3), (64, 128, 256, 512), bottleneck=True)


@dataclass(frozen=True, slots=True)
class ResNet20(ResNet18):
    """ResNet-20 with 1x1 shortcuts, head without bias: 272,464 parameters with 3 channels and 10 classes."""

    head_bias: bool = False
    _plan: ClassVar[ResNetLayout] = ResNetLayout("resnet20", (3, 3, 3), (16, 32, 64))


@dataclass(frozen=True, slots=True)
class ResNet56(ResNet18):
    """ResNet-56 with 1x1 shortcuts, head without bias: 855,760 parameters with 3 channels and 10 classes."""

    head_bias: bool = False
    _plan: ClassVar[ResNetLayout] = ResNetLayout("resnet56", (9, 9, 9), (16, 32, 64))


class WideBlock(nn.Module):
    """conv(relu(bn(dropout(conv(relu(bn(x))))))) + shortcut(x); the second convolution has the stride."""

    def __init__(self, before: int, after: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, after, 3, padding=1), nn.Dropout(dropout)),
            *(nn.BatchNorm2d(after), nn.ReLU(), nn.Conv2d(after, after, 3, stride, padding=1)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.path(x) + self.shortcut(x)
        return out


@dataclass(frozen=True, slots=True)
class WideResNet2810(HeadOptions):
    """WRN-28-10: 36,546,980 parameters with 3 channels and 100 classes, feature 640.

    Zagoruyko and Komodakis (2016), in the form whose size FedMR reports: every convolution has a bias.
    Convolutions 28 with bias, widths 160/320/640, last BatchNorm of momentum 0.9. dropout: inside every block.
    """

    dropout: float = 0.3

    def build(self, schema: Schema) -> SplitModel:
        validate.between("E-CFG-02", "wrn28_10", 0, 0.99, dropout=self.dropout)
        channels, _ = image_shape("wrn28_10", schema, channels={1, 3}, sizes=range(8, 1025))
        layers: list[nn.Module] = [nn.Conv2d(channels, _WIDE_STEM, 3, padding=1)]
        before = _WIDE_STEM
        for stage, after in enumerate(_WIDE_WIDTHS):
            for block in range(_WIDE_BLOCKS):
                layers.append(WideBlock(before, after, 2 if stage and not block else 1, self.dropout))
                before = after
        layers += [nn.BatchNorm2d(before, momentum=0.9), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        body = kaiming(nn.Sequential(*layers))
        return self.complete(body, before, schema)
