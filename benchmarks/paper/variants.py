"""What figures alone need: variants of methods that the papers try and leave, and a spiral with unequal arms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_core.datasets.partition.by_class import Labels
from fl_core.extensions import loading
from fl_core.methods.disjoint.fedgela import FedGELA
from fl_core.methods.disjoint.fedmr import FedMR, PrototypeTargets
from fl_core.training.local_data import LocalDataWrapper
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LossFn, RoundContext, State
from fl_core.validate import NonNegative


@dataclass(frozen=True, kw_only=True)
class OneHotFedMR(FedMR):
    """As FedMR, except that the prototype of class c is the c-th unit vector, known from the first round on.

    Needs as many features as classes.
    """

    name: ClassVar[str] = "fedmr_one_hot"
    prototypes: bool = False

    def _references(self, msg: State, data: LocalData) -> PrototypeTargets | None:
        n_classes, d = msg["w"]["head.weight"].shape
        known = torch.ones(n_classes, dtype=torch.bool)
        negatives = data.class_counts() > 0 if self.negatives == "observed" else known
        return PrototypeTargets(torch.eye(n_classes, d), known, negatives)


@dataclass(frozen=True, kw_only=True)
class PhiFedGELA(FedGELA):
    """As FedGELA, with phi_k^c = C g(q_c) / sum_c g(q_c), q_c = n_k^c / n_k: other forms of its Table 6.

    power: g(q) = q^power (1: FedGELA itself); 0: the exponential g(q) = exp(C q) - 1. No missing class counts in any.
    The paper's are normalised over silos, which takes a sum that silos share: here each normalises by itself.
    """

    name: ClassVar[str] = "fedgela_phi"
    power: NonNegative = 1.0

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:
        return super().objective(model, msg, _Reweighed(data, self.power), context)

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:
        return super().personal(model, msg, silo, _Reweighed(data, self.power), context)


def reweighed(counts: Tensor, power: float) -> Tensor:
    """Return counts (C,) of the same sum whose shares are g's: see `PhiFedGELA`."""
    present = counts.clamp(min=0.0)
    q = present / present.sum().clamp(min=1.0)
    g = q**power if power else (len(q) * q).expm1()
    return present.sum() * g / g.sum().clamp(min=1e-12)


class _Reweighed(LocalDataWrapper):
    def __init__(self, data: LocalData, power: float) -> None:
        super().__init__(data)
        self._power = power

    def class_counts(self) -> Tensor:
        return reweighed(super().class_counts(), self._power)


@dataclass(frozen=True)
class UnevenClasses:
    """One silo; of each class it has `ratio` times as many training examples as of the class before."""

    silos: int = 1
    ratio: float = 0.5

    def partition(self, train: Labels, test: Labels, n_classes: int, seed: int) -> list[tuple[Labels, Labels]]:
        """Keep examples that are spread over the length of an arm, the same for every seed."""
        del seed
        kept = []
        for c in range(n_classes):
            of_class = np.flatnonzero(train == c)
            places = np.linspace(0, len(of_class) - 1, max(2, round(len(of_class) * self.ratio**c)))
            kept.append(of_class[places.round().astype(np.int64)])
        return [(np.concatenate(kept), np.arange(len(test)))]


@contextmanager
def known() -> Iterator[None]:
    """Let method=memory:OneHotFedMR, method=memory:PhiFedGELA and federation=memory:UnevenClasses compose inside.

    By their place they would be identified by all files of this package, to which a study writes its results.
    """
    kinds = (("method", OneHotFedMR), ("method", PhiFedGELA), ("partition", UnevenClasses))
    with ExitStack() as stack:
        for kind, value in kinds:
            digest = loading.class_digest(value)
            stack.enter_context(loading.registered(kind, value, f"memory:{value.__name__}", digest))
        yield
