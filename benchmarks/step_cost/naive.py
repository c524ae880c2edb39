"""L_intra as one would first write it: a loop over classes, with each class's d x d correlation matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fl_core.methods.disjoint.fedmr import FedMR
from fl_core.types.interfaces import SiloData
from fl_core.types.values import Losses, LossFn, State, Turn


def intra_loop(z: Tensor, y: Tensor, n_classes: int, eps: float) -> Tensor:
    """Return L_intra of features z (B, d): the mean over classes c with n_c >= 2 of ||M_c||_F^2."""
    terms = []
    for c in range(n_classes):
        own = z[y == c]
        if len(own) < 2:
            continue
        standardised = (own - own.mean(0)) / (own.var(0) + eps).sqrt()
        correlation = standardised.T @ standardised / (len(own) - 1)
        terms.append(correlation.square().sum())
    return torch.stack(terms).mean() if terms else z.sum() * 0.0


@dataclass(frozen=True, kw_only=True)
class LoopFedMR(FedMR):
    """FedMR with the loop in the place of its L_intra."""

    def objective(self, model: nn.Module, msg: State, data: SiloData, turn: Turn) -> LossFn:
        """Make equation 5; the features of the batch are caught on their way into the head."""
        rest = FedMR.objective(replace(self, mu1=0.0), model, msg, data, turn)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            caught: list[Tensor] = []
            hook = model.head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
            try:
                found = rest(model, x, y)
            finally:
                hook.remove()
            intra = self.mu1 * intra_loop(caught[0], y, turn.fed.n_classes, self.eps)
            return Losses(found.per_example, intra if found.coupled is None else found.coupled + intra)

        return loss
