"""FedNH's Conv2Cifar, MOON's SimpleCNN, and the TFCNN and LeNet of FedRS, FedPHP and MAP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fl_core.models.split_model import HeadOptions, SplitModel, image_shape, kaiming
from fl_core.types.records import Schema


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
            *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
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
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        body = kaiming(nn.Sequential(*layers, nn.Flatten()))
        return self.complete(body, 64 * (side // 8) ** 2, schema)


@dataclass(frozen=True, slots=True)
class LeNet(HeadOptions):
    """conv5x5(1,16)-ReLU-pool2-conv5x5(16,16)-ReLU-pool2, flattened; head without bias.

    9,392 parameters on 1x28x28 with 10 classes, feature 256 (400 on 32x32). projection (2,) gives the plane that
    FedRS draws. Source: FedRS (Li and Zhan, 2021) and MAP.
    """

    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        channels, side = image_shape("lenet", schema, channels={1, 3}, sizes={28, 32})
        body = nn.Sequential(
            *(nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
        )
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
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(16 * left * left, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
        )
        return self.complete(body, 84, schema)
