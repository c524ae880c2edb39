"""Papers of the methods: their citations, their claims, and the models they use (`coordinator models`).

The citation is parsed from the docstring of the method's module, which contains title, citation and equations.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from fl_core.methods.fedavg import FedAvg
from fl_core.models import ModelFacts, describe
from fl_core.types.enums import Capability, Coupling
from fl_core.types.records import Schema

_CITATION = re.compile(r'(?P<authors>[^"]+), "(?P<title>[^"]+?),?",? (?P<venue>.*\b(?:19|20)\d{2})(?:, (?P<where>.+))?')


@dataclass(frozen=True, slots=True)
class Paper:
    """A citation. where: equations and algorithms that the method follows; "" if the docstring names none."""

    authors: str
    title: str
    venue: str
    where: str


def paper_of(method: type[FedAvg]) -> Paper | None:
    """Return the paper of a method; None if the second paragraph of its module's docstring cites none."""
    paragraphs = (sys.modules[method.__module__].__doc__ or "").strip().split("\n\n")
    if len(paragraphs) < 2:
        return None
    sentence = re.split(r"\.(?:\s|$)| \(", " ".join(paragraphs[1].split()), maxsplit=1)[0]
    citation = _CITATION.match(sentence)
    if citation is None:
        return None
    where = re.split(r", (?:with|in) ", citation["where"] or "")[0]
    return Paper(citation["authors"], citation["title"], citation["venue"], where)


def needs(method: FedAvg) -> list[str]:
    """Return the method's requirements on a run, in words."""
    lacking = {
        Capability.SECURE_AGGREGATION: "updates that the server needs separately",
        Capability.DIFFERENTIAL_PRIVACY: "a run without record-level privacy",
        Capability.PARTIAL_PARTICIPATION: "every silo in every round",
        Capability.ADAPTIVE_OPTIMIZER: "SGD",
    }
    needed = [words for capability, words in lacking.items() if _lacks(method, capability)]
    if "prototypes" in method.sends:
        needed.append("prototypes of the silos")
    if method.coupling is Coupling.BATCH:
        needed.append("batches of several examples of a class")
    return needed


def _lacks(method: FedAvg, capability: Capability) -> bool:
    """Return whether the method lacks a capability. A private form supplies differential privacy."""
    private_form = capability is Capability.DIFFERENTIAL_PRIVACY and method.private_form
    return capability in method.unsupported and not private_form


@dataclass(frozen=True, slots=True)
class Claim:
    """A paper's claim on a method, and our measurement.

    Attributes:
        printed: the paper's number
        ours: points above FedAvg, and above the best baseline, with their 95 % intervals; "-" if not run
        verdict: holds, holds only against FedAvg, does not hold, or not decided; why: the reason for the verdict
        comparison, scale: source of our number in benchmarks/comparison
    """

    method: str
    claim: str
    printed: str
    ours: str
    verdict: str
    why: str
    comparison: str
    scale: str


def claims_of(method: str) -> list[Claim]:
    return [claim for claim in CLAIMS if claim.method == method]


def _claims() -> tuple[Claim, ...]:
    text = (resources.files("consilium.report") / "paper_claims.txt").read_text(encoding="utf-8")
    return tuple(Claim(*line.split("\t")) for line in text.splitlines() if not line.startswith("#"))


def _tables() -> Mapping[str, tuple[str, ...]]:
    text = (resources.files("consilium.report") / "paper_tables.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {name: tuple(tables) for name, *tables in rows}


TABLES: Mapping[str, tuple[str, ...]] = _tables()
"""Tables of `benchmarks/paper` by method; `python -m tests.regenerate` writes them."""
CLAIMS = _claims()
"""The papers' claims with our numbers, also from `tests.regenerate`; `benchmarks/paper/claims.py` lists the runs."""


GRAY, COLOUR, LESION, TINY = (1, 28, 28), (3, 32, 32), (3, 200, 200), (3, 64, 64)


@dataclass(frozen=True, slots=True)
class PublishedSetting:
    """A model as a paper uses it, on the paper's data. shape: of an example   classes: their number C."""

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
"""FedGELA's fixed head counts like the trained head of its baselines. FedCD's fine head has three rows per class."""
