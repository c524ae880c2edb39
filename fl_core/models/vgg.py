"""VGG for 32x32 images. Simonyan and Zisserman (2015), as FedRS, FedPHP and MAP use it: one linear layer at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_core import validate
from fl_core.models.split_model import HeadOptions, SplitModel, image_shape, kaiming
from fl_core.types.records import Schema

FEATURES = 512
# channels of the convolutions before each of the five poolings
STAGES = {
    "vgg8": ((64,), (128,), (256,), (512,), (512,)),
    "vgg11": ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    "vgg16": ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)),
}


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
        for stage in STAGES[name]:
            for after in stage:
                layers.append(nn.Conv2d(before, after, 3, padding=1))
                layers += [nn.BatchNorm2d(after)] if self.norm == "batch" else []
                layers.append(nn.ReLU())
                before = after
            layers.append(nn.MaxPool2d(2))
        body = kaiming(nn.Sequential(*layers, nn.Flatten()))
        return self.complete(body, FEATURES, schema)


@dataclass(frozen=True, slots=True)
class Vgg11(Vgg8):
    """VGG-11: 9,225,600 parameters with 10 classes; FedRS and MAP use it with and without norm."""

    _depth: ClassVar[str] = "vgg11"


@dataclass(frozen=True, slots=True)
class Vgg16(Vgg8):
    """VGG-16; with norm=batch (the default) and 100 classes 14,774,336 parameters, as FedRS uses it."""

    norm: str = "batch"
    _depth: ClassVar[str] = "vgg16"
