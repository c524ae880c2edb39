"""The models of the papers on the examples of the papers: what `coordinator models` lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_core.models import ModelFacts, describe
from fl_core.types.values import Schema

GRAY, COLOUR, LESION, TINY = (1, 28, 28), (3, 32, 32), (3, 200, 200), (3, 64, 64)


@dataclass(frozen=True, slots=True)
class Setting:
    """One model as one paper uses it. shape: of an example; classes: their number C."""

    paper: str
    data: str
    model: str
    shape: tuple[int, ...]
    classes: int
    options: Mapping[str, object] = field(default_factory=dict)

    def facts(self) -> ModelFacts:
        """Count the model's numbers."""
        return describe(self.model, Schema(self.shape, tuple(map(str, range(self.classes)))), self.options)


SETTINGS = (
    Setting("FedMR", "fmnist", "resnet18", GRAY, 10),
    Setting("FedMR", "svhn, cifar10", "resnet18", COLOUR, 10),
    Setting("FedMR", "cifar100", "wrn28_10", COLOUR, 100),
    Setting("FedMR", "isic2019", "efficientnet_b0", LESION, 8),
    Setting("FedGELA", "svhn, cifar10", "resnet18", COLOUR, 10, {"projection": [84]}),
    Setting("FedGELA", "cifar100", "resnet18", COLOUR, 100, {"projection": [512]}),
    Setting("FedGELA", "isic2019", "efficientnet_b0", LESION, 8, {"projection": [84]}),
    Setting("FedGELA", "svhn", "simple_cnn", COLOUR, 10, {"projection": [84]}),
    Setting("FedGELA", "svhn", "resnet50", COLOUR, 10, {"projection": [84]}),
    Setting("FedGELA", "shakespeare", "char_lstm", (80,), 80),
    Setting("FedNH", "cifar10", "conv2_cifar", COLOUR, 10),
    Setting("FedNH", "cifar100", "conv2_cifar", COLOUR, 100),
    Setting("FedNH", "tinyimagenet", "resnet18", TINY, 200, {"norm": "group", "head_bias": False}),
    Setting("FedRS, MAP", "cifar10", "tfcnn", COLOUR, 10),
    Setting("FedRS", "cifar10", "vgg11", COLOUR, 10),
    Setting("FedRS", "cifar10", "vgg11", COLOUR, 10, {"norm": "batch"}),
    Setting("FedRS", "cifar100", "vgg16", COLOUR, 100),
    Setting("MAP", "fmnist", "mlp_net", GRAY, 10),
    Setting("FedRS, MAP", "mnist, fmnist", "lenet", GRAY, 10),
    Setting("MAP", "cifar10", "vgg8", COLOUR, 10),
    Setting("MAP", "cifar100", "vgg8", COLOUR, 100, {"norm": "batch"}),
    Setting("MAP", "cifar100", "vgg11", COLOUR, 100),
    Setting("MAP", "cinic10", "resnet20", COLOUR, 10),
    Setting("MAP", "cinic10", "resnet56", COLOUR, 10),
    Setting("FedCD (its baselines)", "cifar10", "simple_cnn", COLOUR, 10, {"projection": [84, 256]}),
    Setting("FedCD (its baselines)", "cifar100", "resnet50", COLOUR, 100, {"projection": [2048, 256]}),
    Setting("FedCD (its baselines)", "emnist", "simple_cnn", GRAY, 26, {"projection": [84, 256]}),
)
"""FedGELA's fixed head counts as the trained one of its baselines; FedCD's fine head has three rows per class."""
