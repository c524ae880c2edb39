"""MOON: features are pulled to those of the received model and pushed from those of the silo's own last model.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021. With z the input of the head, z_glob that
of the received model and z_j those of the silo's last models, both frozen and in eval mode,

    l_i = -log( exp(cos(z, z_glob)/tau) / (exp(cos(z, z_glob)/tau) + sum_j exp(cos(z, z_j)/tau)) )
    CE(w) + mu mean_i l_i

A silo that takes part for the first time has no last model and trains without the term; the authors' code contrasts
with a copy of the received model (the same gradients) or with an untrained one. The cosine with a zero vector is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, softplus

from fl_core.methods.prototype_aided import PrototypeAided
from fl_core.methods.shared import prototypes
from fl_core.models.split_model import CachedFeatures, SplitModel, frozen_copy
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LocalResult, Losses, LossFn, RoundContext, State
from fl_core.validate import NonNegative, Positive, PositiveCount


def model_contrast(z: Tensor, z_glob: Tensor, z_last: Tensor, tau: float) -> Tensor:
    """Return l_i (B,) for features z and z_glob (B, d) and those of J last models, z_last (J, B, d)."""
    pull = cosine_similarity(z, z_glob, dim=1, eps=1e-8) / tau
    push = cosine_similarity(z.unsqueeze(0), z_last, dim=2, eps=1e-8) / tau
    return softplus(torch.logsumexp(push, dim=0) - pull)


@dataclass(frozen=True, kw_only=True)
class Moon(PrototypeAided):
    """As FedAvg, except that local training contrasts its features with those of two kinds of earlier models.

    mu: weight of the contrast, >= 0; 5 served the authors for CIFAR-10, 1 for CIFAR-100   tau: its temperature
    last: how many of the silo's last models are kept. Each is kept even if its upload was lost, for any time.

    Guarantees: mu = 0 is FedAvg bit for bit, and so is every silo's first round.
    """

    name: ClassVar[str] = "moon"
    targets = PrototypeAided.targets
    mu: NonNegative = 1.0
    tau: Positive = 0.5
    last: PositiveCount = 1

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        loss, kept = self.objective(model, msg, data, context), [silo[group] for group in sorted(silo)]
        if self.mu and kept:
            loss = self._contrasted(loss, frozen_copy(model), [frozen_copy(model, values) for values in kept])
        data.sgd(model, loss)
        trained = {name: v.cpu() for name, v in tensor_maps.copy_state(model).items()}
        bundle = self.bundle(model, msg, data, context)
        return LocalResult(bundle, {f"last_{j:03}": v for j, v in enumerate([trained, *kept][: self.last])})

    def _contrasted(self, plain: LossFn, received: SplitModel, last: Sequence[SplitModel]) -> LossFn:
        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            z = prototypes.features_of(model).features(x)
            with torch.no_grad():
                z_glob, z_last = received.features(x), torch.stack([m.features(x) for m in last])
            base = plain(CachedFeatures(model, z), x, y)
            return base._replace(per_example=base.per_example + self.mu * model_contrast(z, z_glob, z_last, self.tau))

        return loss
