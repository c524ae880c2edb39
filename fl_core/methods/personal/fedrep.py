"""FedRep: first the private head on the received body, then the body under that head.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1.

    psi_k   <- E_h epochs of SGD on CE over the head, from the stored psi_k, body theta^t frozen
    theta_k <- E_b epochs of SGD on CE over the body, from theta^t, head psi_k frozen

Each phase has an optimizer of its own, and what is frozen gets no step, no momentum and no decay: with one optimizer
for both, as released, "frozen" weights may go on moving by old momentum, depending on the version of torch.

GA is measured on the personal models, as for FedPer: with the initial head the averaged body only guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fl_core.methods.personal.fedper import FedPer
from fl_core.methods.personal.shared_body import freeze_norms, in_body, in_head
from fl_core.methods.shared.prototypes import features_of
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.targets import target_loss
from fl_core.types.values import Losses, RoundContext, SgdOptions, State
from fl_core.validate import Count, PositiveCount


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """As FedPer, except that head and body are trained one after the other.

    Attributes:
        head_epochs: E_h (the authors' 10)
        body_epochs: E_b, 0 for the run's own epochs
        frozen_norm: "eval" uses the received statistics of BatchNorm while the head is trained and leaves them as they
            are, "train" lets the frozen body's BatchNorm go on
        tune_epochs: epochs that a head is trained on the received body before its personal model is measured (the
            authors do so once, at the end, for at least 10); 0 measures what local training left

    Guarantees: with frozen_norm "eval" the first phase leaves the body as received, to the last bit.
    """

    name: ClassVar[str] = "fedrep"
    head_epochs: PositiveCount = 10
    body_epochs: Count = 0
    frozen_norm: Literal["eval", "train"] = "eval"
    tune_epochs: Count = 0

    def fit(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> None:
        data.sgd(model, self.head_loss, SgdOptions(epochs=self.head_epochs, only=in_head))
        data.sgd(
            model, self.objective(model, msg, data, context), SgdOptions(epochs=self.body_epochs or None, only=in_body)
        )

    def head_loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """Return the cross entropy of each example, without a gradient for the body."""
        if self.frozen_norm == "eval":
            freeze_norms(model)
        split = features_of(model)
        with torch.no_grad():
            z = split.features(x)
        return Losses(target_loss(split.head(z), y))

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Return body and head as trained, or the received body under a head that was trained further on it."""
        if self.tune_epochs:
            tensor_maps.load_state(model, {**msg["w"], **silo["head"]})
            data.sgd(model, self.head_loss, SgdOptions(epochs=self.tune_epochs, only=in_head))
        return model
