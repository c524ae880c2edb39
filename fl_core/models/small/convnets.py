"""Small convolutional networks of the papers: FedNH's Conv2Cifar, and the TFCNN and LeNet of FedRS, FedPHP and MAP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fl_core.models.split_model import SplitModel, assemble, kaiming
from fl_core.models.validation import image_shape
from fl_core.types.records import Schema


@dataclass(frozen=True, slots=True)
class Conv2Cifar:
    """conv5x5(3,64)-ReLU-pool2-conv5x5(64,64)-ReLU-pool2-FC(1600,384)-ReLU-FC(384,192)-ReLU-head without bias.

    797,952 parameters with 10 classes. Source: Dai et al. (2023), "Tackling Data Heterogeneity in Federated Learning
    with Class Prototypes" (FedNH), where every method has a head without bias.
    """

    projection: tuple[int, ...] = ()
    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        """Make the model; raises ConfigError (E-CFG-23) on anything but 3x32x32."""
        image_shape("conv2_cifar", schema, channels={3}, sizes={32})
        body = nn.Sequential(
            *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(64 * 5 * 5, 384), nn.ReLU()),
            *(nn.Linear(384, 192), nn.ReLU()),
        )
        return assemble(body, 192, self.projection, len(schema.classes), head_bias=self.head_bias)


@dataclass(frozen=True, slots=True)
class TfCnn:
    """Three times conv3x3-ReLU-pool2 (32, 64, 64 channels, padding 1), flattened; head without bias.

    66,560 parameters on 3x32x32 with 10 classes, feature 1024. Source: FedRS (Li and Zhan, 2021), FedPHP and MAP.
    """

    projection: tuple[int, ...] = ()
    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        """Make the model; raises ConfigError (E-CFG-23) unless images are 28x28 or 32x32 with 1 or 3 channels."""
        channels, side = image_shape("tfcnn", schema, channels={1, 3}, sizes={28, 32})
        layers: list[nn.Module] = []
        for before, after in ((channels, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        body = kaiming(nn.Sequential(*layers, nn.Flatten()))
        return assemble(body, 64 * (side // 8) ** 2, self.projection, len(schema.classes), head_bias=self.head_bias)


@dataclass(frozen=True, slots=True)
class LeNet:
    """conv5x5(1,16)-ReLU-pool2-conv5x5(16,16)-ReLU-pool2, flattened; head without bias.

    9,392 parameters on 1x28x28 with 10 classes, feature 256 (400 on 32x32). projection (2,) gives the plane that
    FedRS draws. Source: FedRS (Li and Zhan, 2021) and MAP.
    """

    projection: tuple[int, ...] = ()
    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        """Make the model; raises ConfigError (E-CFG-23) unless images are 28x28 or 32x32 with 1 or 3 channels."""
        channels, side = image_shape("lenet", schema, channels={1, 3}, sizes={28, 32})
        body = nn.Sequential(
            *(nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
        )
        left = ((side - 4) // 2 - 4) // 2
        return assemble(kaiming(body), 16 * left * left, self.projection, len(schema.classes), head_bias=self.head_bias)
