"""The papers' networks without residual blocks: fully connected, convolutional, VGG, LEAF's LSTM; and ours for digits.

MlpNet, SpiralMlp: MAP, FedNH   Conv2Cifar, SimpleCnn: FedNH, MOON   TfCnn, LeNet: FedRS, FedPHP, MAP   CharLstm: Caldas
et al. (2018), "LEAF: A Benchmark for Federated Settings"   VGG: Simonyan and Zisserman (2015) for 32x32 images, as
FedRS, FedPHP and MAP use it, with one linear layer at the end. Those for digits of 8x8 are fast on one CPU core,
without BatchNorm unless asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.models.split_model import MAX_LAYERS, HeadOptions, SplitModel, image_shape, kaiming
from fl_core.types.records import Schema

MAX_WIDTH = 4096
_EMBEDDING, _HIDDEN, _LAYERS = 8, 256, 2
_VGG_FEATURES = 512
# channels of the convolutions before each of the five poolings
_VGG_STAGES = {
    "vgg8": ((64,), (128,), (256,), (512,), (512,)),
    "vgg11": ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    "vgg16": ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)),
}


class MaxPool2(nn.MaxPool2d):
    """(B, C, H, W) -> (B, C, H // 2, W // 2), the largest number of each 2 x 2 block.

    Guarantees: the numbers are those of `nn.MaxPool2d(2)`, whichever way they are computed.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        # torch's loop over blocks on a CPU is not vectorised. With gradients, ties would share theirs in `maximum`.
        if torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_compiling():
            return functional.max_pool2d(x, 2)
        height, width = (side // 2 * 2 for side in x.shape[-2:])
        rows = torch.maximum(x[..., 0:height:2, :], x[..., 1:height:2, :])
        return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


@dataclass(frozen=True, slots=True)
class MlpNet(HeadOptions):
    """784-1024-1024-128, ReLU after each; head without bias: 1,985,920 parameters with 10 classes. Source: MAP.

    Hidden weights begin as N(0, 0.01) and hidden biases as 0, as in the paper's family of networks.
    """

    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        image_shape("mlp_net", schema, channels={1}, sizes={28})
        body = nn.Sequential(nn.Flatten(), *_layers((784, 1024, 1024, 128)))
        for module in body:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)
        return self.complete(body, 128, schema)


@dataclass(frozen=True, slots=True)
class DigitsMlp(HeadOptions):
    """64-64-32, ReLU after each, on 8x8 digits: 6,570 parameters with 10 classes."""

    def build(self, schema: Schema) -> SplitModel:
        image_shape("digits_mlp", schema, channels={1}, sizes={8})
        body = nn.Sequential(nn.Flatten(), *_layers((64, 64, 32)))
        return self.complete(body, 32, schema)


@dataclass(frozen=True, slots=True)
class SpiralMlp(HeadOptions):
    """Points of the plane through 8d-4d-2d (ReLU after each) to d, linear; head without bias.

    width: d; 2 lets features be drawn. 240 parameters with width 2 and 5 classes. Source: FedNH's motivating examples.
    """

    width: int = 2
    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        if self.width < 1:
            raise ConfigError("E-CFG-02", f"spiral_mlp.width: expected at least 1, found {self.width}: raise it")
        if prod(schema.shape) != 2 or len(schema.classes) < 2:
            raise ConfigError(
                "E-CFG-23",
                f"spiral_mlp takes points of 2 numbers in 2 or more classes, found {schema}: use data=spiral",
            )
        d = self.width
        body = nn.Sequential(nn.Flatten(), *_layers((2, 8 * d, 4 * d, 2 * d)), nn.Linear(2 * d, d))
        return self.complete(body, d, schema)


@dataclass(frozen=True, slots=True)
class TableMlp(HeadOptions):
    """Rows of a table, whose numbers lie in [-1, 1], through hidden layers with ReLU after each.

    hidden: their widths; 64 and 32 suit tables of tens of columns and thousands of rows. Without normalisation layers,
    so that every profile trains it: the declared ranges have scaled the inputs.
    """

    hidden: tuple[int, ...] = (64, 32)

    def build(self, schema: Schema) -> SplitModel:
        if not 1 <= len(self.hidden) <= MAX_LAYERS or not all(1 <= w <= MAX_WIDTH for w in self.hidden):
            raise ConfigError(
                "E-CFG-02",
                f"table_mlp.hidden: expected 1 to {MAX_LAYERS} widths from 1 to {MAX_WIDTH}, found "
                f"{list(self.hidden)[:MAX_LAYERS]}: change it",
            )
        if len(schema.shape) != 1 or len(schema.classes) < 2:
            raise ConfigError(
                "E-CFG-23",
                f"table_mlp takes rows of numbers in 2 or more classes, found {schema.shape}: use data=table",
            )
        body = nn.Sequential(*_layers((schema.shape[0], *self.hidden)))
        return self.complete(body, self.hidden[-1], schema)


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    return [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]


class LastHidden(nn.Module):
    """Characters (B, L), as numbers of the alphabet, to the last output (B, 256) of a two-layer LSTM."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, _EMBEDDING)
        self.lstm = nn.LSTM(_EMBEDDING, _HIDDEN, _LAYERS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L) to (B, 256); examples travel as floats, which hold these whole numbers exactly.

        A number outside of the alphabet is read as the nearest one, since an error would reveal such an example.
        """
        outputs, _ = self.lstm(self.embedding(x.long().clamp(0, self.embedding.num_embeddings - 1)))
        last: Tensor = outputs[:, -1]
        return last


@dataclass(frozen=True, slots=True)
class CharLstm(HeadOptions):
    """Embedding(C, 8)-LSTM(8, 256, 2 layers)-head of the last of L characters, over an alphabet of C.

    The alphabet is the label space: the next character is one of it. 819,920 parameters with LEAF's 80 characters
    (torch counts two biases per gate, of which one is redundant).
    """

    def build(self, schema: Schema) -> SplitModel:
        if len(schema.shape) != 1 or len(schema.classes) < 2:
            raise ConfigError(
                "E-CFG-23", f"char_lstm takes sequences over an alphabet, found {schema.shape}: use data=shakespeare"
            )
        body = LastHidden(len(schema.classes))
        return self.complete(body, _HIDDEN, schema)


@dataclass(frozen=True, slots=True)
class Conv2Cifar(HeadOptions):
    """conv5x5(3,64)-ReLU-pool2-conv5x5(64,64)-ReLU-pool2-FC(1600,384)-ReLU-FC(384,192)-ReLU-head without bias.

    797,952 parameters with 10 classes. Source: Dai et al. (2023), "Tackling Data Heterogeneity in Federated Learning
    with Class Prototypes" (FedNH), where every method has a head without bias.
    """

    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        image_shape("conv2_cifar", schema, channels={3}, sizes={32})
        body = nn.Sequential(
            *(nn.Conv2d(3, 64, 5), nn.ReLU(), MaxPool2()),
            *(nn.Conv2d(64, 64, 5), nn.ReLU(), MaxPool2()),
            nn.Flatten(),
            *(nn.Linear(64 * 5 * 5, 384), nn.ReLU()),
            *(nn.Linear(384, 192), nn.ReLU()),
        )
        return self.complete(body, 192, schema)


@dataclass(frozen=True, slots=True)
class TfCnn(HeadOptions):
    """Three times conv3x3-ReLU-pool2 (32, 64, 64 channels, padding 1), flattened; head without bias.

    66,560 parameters on 3x32x32 with 10 classes, feature 1024. Source: FedRS (Li and Zhan, 2021), FedPHP and MAP.
    """

    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        channels, side = image_shape("tfcnn", schema, channels={1, 3}, sizes={28, 32})
        layers: list[nn.Module] = []
        for before, after in ((channels, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), MaxPool2()]
        body = kaiming(nn.Sequential(*layers, nn.Flatten()))
        return self.complete(body, 64 * (side // 8) ** 2, schema)


def _norm(name: str, channels: int) -> list[nn.Module]:
    """Return the layer after a convolution: nothing where there is none."""
    layers: dict[str, list[nn.Module]] = {"batch": [nn.BatchNorm2d(channels)], "group": [nn.GroupNorm(8, channels)]}
    return layers.get(name, [])


@dataclass(frozen=True, slots=True)
class LeNet(HeadOptions):
    """conv5x5(1,16)-[norm]-ReLU-pool2-conv5x5(16,16)-[norm]-ReLU-pool2, flattened; head without bias.

    norm: "none", "batch" or "group" (8 groups) after each convolution. 9,392 parameters on 1x28x28 with 10 classes and
    "none", feature 256 (400 on 32x32). projection (2,) gives the plane that FedRS draws. Source: FedRS (Li and Zhan,
    2021) and MAP, without norm.
    """

    head_bias: bool = False
    norm: str = "none"
    omitted_at_default: ClassVar[frozenset[str]] = frozenset({*HeadOptions.omitted_at_default, "norm"})

    def build(self, schema: Schema) -> SplitModel:
        validate.one_of("E-CFG-02", "lenet", ("none", "batch", "group"), norm=self.norm)
        channels, side = image_shape("lenet", schema, channels={1, 3}, sizes={28, 32})
        layers: list[nn.Module] = []
        for before in (channels, 16):
            layers += [nn.Conv2d(before, 16, 5), *_norm(self.norm, 16), nn.ReLU(), MaxPool2()]
        body = nn.Sequential(*layers, nn.Flatten())
        left = ((side - 4) // 2 - 4) // 2
        return self.complete(kaiming(body), 16 * left * left, schema)


@dataclass(frozen=True, slots=True)
class SimpleCnn(HeadOptions):
    """conv5x5(cin,6)-ReLU-pool2-conv5x5(6,16)-ReLU-pool2-FC(400,120)-ReLU-FC(120,84)-ReLU-[projection]-head.

    FC(256,120) on 28x28 images. projection (84, 256) is FedCD's extractor. Source: Li, He and Song (2021),
    "Model-Contrastive Federated Learning" (MOON), section 4.1.
    """

    def build(self, schema: Schema) -> SplitModel:
        channels, side = image_shape("simple_cnn", schema, channels={1, 3}, sizes={28, 32})
        left = ((side - 4) // 2 - 4) // 2
        body = nn.Sequential(
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), MaxPool2()),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), MaxPool2()),
            nn.Flatten(),
            *(nn.Linear(16 * left * left, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
        )
        return self.complete(body, 84, schema)


@dataclass(frozen=True, slots=True)
class DigitsCnn(HeadOptions):
    """conv3x3(1,16)-norm-ReLU-conv3x3(16,32)-norm-ReLU-pool2-FC(512,64)-ReLU-[projection]-head, 1x8x8 images.

    norm: "group" (8 groups), "none" or "batch" after each convolution. 38,378 parameters with 10 classes and "group".

    GroupNorm is the default because it leaves the starting plateau soonest: after one epoch over 1,437 digits (SGD
    0.01, momentum 0.9, batches of 64) test accuracy is 0.73 and 0.69 (two seeds), against 0.09 and 0.10 without.
    """

    norm: str = "group"

    def build(self, schema: Schema) -> SplitModel:
        validate.one_of("E-CFG-02", "digits_cnn", ("group", "none", "batch"), norm=self.norm)
        image_shape("digits_cnn", schema, channels={1}, sizes={8})
        body = nn.Sequential(
            *self._block(1, 16),
            *self._block(16, 32),
            MaxPool2(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
        )
        return self.complete(body, 64, schema)

    def _block(self, before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), *_norm(self.norm, after), nn.ReLU()]


@dataclass(frozen=True, slots=True)
class DigitsLinear(HeadOptions):
    """Pixels at mean 0 and variance 1 in each image - Linear(64, 16) - head: 1,210 parameters with 10 classes.

    projection: widths of the linear layers before the head, ReLU between them; none is softmax regression.

    So few numbers that the noise of differential privacy, whose length grows with the root of their number, stays
    below the signal (Tramer and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)",
    ICLR 2021): the pixels are the features; trained are a linear projection, the layer that FedMR shapes, and the head.
    """

    projection: tuple[int, ...] = (16,)

    def build(self, schema: Schema) -> SplitModel:
        image_shape("digits_linear", schema, channels={1}, sizes={8})
        body = nn.Sequential(nn.Flatten(), nn.LayerNorm(64, elementwise_affine=False))
        return self.complete(body, 64, schema)


@dataclass(frozen=True, slots=True)
class Vgg8(HeadOptions):
    """Five times conv3x3-[norm]-ReLU-pool2, feature 512, head without bias: 3,915,904 parameters with 10 classes.

    norm: "none" or "batch" after each convolution (MAP's VGG8-BN on CIFAR100).
    """

    norm: str = "none"
    head_bias: bool = False
    _depth: ClassVar[str] = "vgg8"

    def build(self, schema: Schema) -> SplitModel:
        name = self._depth
        validate.one_of("E-CFG-02", name, ("none", "batch"), norm=self.norm)
        before, _ = image_shape(name, schema, channels={1, 3}, sizes={32})
        layers: list[nn.Module] = []
        for stage in _VGG_STAGES[name]:
            for after in stage:
                layers.append(nn.Conv2d(before, after, 3, padding=1))
                layers += [nn.BatchNorm2d(after)] if self.norm == "batch" else []
                layers.append(nn.ReLU())
                before = after
            layers.append(MaxPool2())
        body = kaiming(nn.Sequential(*layers, nn.Flatten()))
        return self.complete(body, _VGG_FEATURES, schema)


@dataclass(frozen=True, slots=True)
class Vgg11(Vgg8):
    """VGG-11: 9,225,600 parameters with 10 classes; FedRS and MAP use it with and without norm."""

    _depth: ClassVar[str] = "vgg11"


@dataclass(frozen=True, slots=True)
class Vgg16(Vgg8):
    """VGG-16; with norm=batch (the default) and 100 classes 14,774,336 parameters, as FedRS uses it."""

    norm: str = "batch"
    _depth: ClassVar[str] = "vgg16"
