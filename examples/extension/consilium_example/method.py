"""FedAvg with label smoothing: a silo that has seen two classes of ten grows less sure that there are no others.

Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, "Rethinking the Inception Architecture for Computer Vision", CVPR 2016,
section 7.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn.functional import cross_entropy

from consilium.extending import FedAvg, LocalData, Losses, LossFn, RoundContext, State, UnitInterval


@dataclass(frozen=True, kw_only=True)
class Smoothed(FedAvg):
    """FedAvg whose labels are 1 - s on the class of an example and s / C on every class."""

    name: ClassVar[str] = "smoothed"
    smoothing: UnitInterval = 0.1

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:
        return lambda model, x, y: Losses(cross_entropy(model(x), y, reduction="none", label_smoothing=self.smoothing))
