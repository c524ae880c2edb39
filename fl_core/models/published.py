"""The models of the papers on the examples of the papers: what `coordinator models` lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_core.models import ModelFacts, describe
from fl_core.types.records import Schema

GRAY, COLOUR, LESION, TINY = (1, 28, 28), (3, 32, 32), (3, 200, 200), (3, 64, 64)


@dataclass(frozen=True, slots=True)
class PublishedSetting:
    """One model as one paper uses it. shape: of an example; classes: their number C."""

    paper: str
    data: str
    model: str
    shape: tuple[int, ...]
    classes: int
    options: Mapping[str, object] = field(default_factory=dict)

    def facts(self) -> ModelFacts:
        return describe(self.model, Schema(self.shape, tuple(map(str, range(self.classes)))), self.options)


SETTINGS = (
    PublishedSetting("FedMR", "fmnist", "resnet18", GRAY, 10),
    PublishedSetting("FedMR", "svhn, cifar10", "resnet18", COLOUR, 10),
    PublishedSetting("FedMR", "cifar100", "wrn28_10", COLOUR, 100),
    PublishedSetting("FedMR", "isic2019", "efficientnet_b0", LESION, 8),
    PublishedSetting("FedGELA", "svhn, cifar10", "resnet18", COLOUR, 10, {"projection": [84]}),
    PublishedSetting("FedGELA", "cifar100", "resnet18", COLOUR, 100, {"projection": [512]}),
    PublishedSetting("FedGELA", "isic2019", "efficientnet_b0", LESION, 8, {"projection": [84]}),
    PublishedSetting("FedGELA", "svhn", "simple_cnn", COLOUR, 10, {"projection": [84]}),
    PublishedSetting("FedGELA", "svhn", "resnet50", COLOUR, 10, {"projection": [84]}),
    PublishedSetting("FedGELA", "shakespeare", "char_lstm", (80,), 80),
    PublishedSetting("FedNH", "cifar10", "conv2_cifar", COLOUR, 10),
    PublishedSetting("FedNH", "cifar100", "conv2_cifar", COLOUR, 100),
    PublishedSetting("FedNH", "tinyimagenet", "resnet18", TINY, 200, {"norm": "group", "head_bias": False}),
    PublishedSetting("FedRS, MAP", "cifar10", "tfcnn", COLOUR, 10),
    PublishedSetting("FedRS", "cifar10", "vgg11", COLOUR, 10),
    PublishedSetting("FedRS", "cifar10", "vgg11", COLOUR, 10, {"norm": "batch"}),
    PublishedSetting("FedRS", "cifar100", "vgg16", COLOUR, 100),
    PublishedSetting("MAP", "fmnist", "mlp_net", GRAY, 10),
    PublishedSetting("FedRS, MAP", "mnist, fmnist", "lenet", GRAY, 10),
    PublishedSetting("MAP", "cifar10", "vgg8", COLOUR, 10),
    PublishedSetting("MAP", "cifar100", "vgg8", COLOUR, 100, {"norm": "batch"}),
    PublishedSetting("MAP", "cifar100", "vgg11", COLOUR, 100),
    PublishedSetting("MAP", "cinic10", "resnet20", COLOUR, 10),
    PublishedSetting("MAP", "cinic10", "resnet56", COLOUR, 10),
    PublishedSetting("FedCD (its baselines)", "cifar10", "simple_cnn", COLOUR, 10, {"projection": [84, 256]}),
    PublishedSetting("FedCD (its baselines)", "cifar100", "resnet50", COLOUR, 100, {"projection": [2048, 256]}),
    PublishedSetting("FedCD (its baselines)", "emnist", "simple_cnn", GRAY, 26, {"projection": [84, 256]}),
)
"""FedGELA's fixed head counts as the trained one of its baselines; FedCD's fine head has three rows per class."""
