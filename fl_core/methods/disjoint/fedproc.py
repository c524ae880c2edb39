"""FedProc: prototypes first, the classifier later.

Mu, Shen, Cheng, Geng, Fu, Zhang and Zhang, "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data",
FGCS 2023, equations 6 to 9 (the loss and its schedule: prototype_aided.py).

A class without a prototype is left out of the contrast; an example of such a class has no contrast, and still counts in
the mean. T is the number of rounds of the run, and tau = 1 as released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fl_core.methods.prototype_aided import PrototypeAided


@dataclass(frozen=True, kw_only=True)
class FedProc(PrototypeAided):
    """FedAvg trained with a contrast to the classes' prototypes that fades over the rounds.

    Guarantees: with prototypes off it is FedAvg bit for bit, and so is every round before a prototype is known.
    """

    name: ClassVar[str] = "fedproc"
    prototypes: Literal["off", "mixture", "additive"] = "mixture"
