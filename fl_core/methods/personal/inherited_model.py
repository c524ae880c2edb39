"""The inherited private model (HPM): a silo's own moving average of its models, which teaches the next one.

Li, Zhan, Shao, Li and Song, "FedPHP: Federated Personalization with Inherited Private Models", ECML PKDD 2021, and Li,
Song, Li, Li, Shao, Yang and Zhan, "MAP", TKDE 2024, Algorithm 1; the transfer losses: distillation.py.

    L       = (1 - lam) CE + lam L_transfer(theta; theta_p)       CE alone in a silo's first round: no HPM yet
    theta_p <- mu_n theta_p + (1 - mu_n) theta_k                  after training, in the silo's n-th round
    mu_n    = min(mu_max, mu_macro (n - 1) / max(floor(Q T), 1))  Q T: rounds that a silo may expect to be asked in

All parameters and BatchNorm statistics are mixed. Where the network has BatchNorm, the statistics of a mixed model are
measured again on the training set: those of two models do not mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods.building_blocks import batch_norm, prototypes
from fl_core.methods.building_blocks.frozen_copies import frozen_copy
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.losses import distillation
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Losses, LossFn, RoundContext, State
from fl_core.validate import Positive, UnitInterval

HPM = "inherited"
COUNT = "participations"


@dataclass(frozen=True, kw_only=True)
class Inheriting(FedAvg):
    """What methods with an inherited private model share.

    lam: weight of the transfer, 0 to 1   transfer: "kd" (logits) or "mmd" (features)   tau: temperature of KD
    kd: "kl", or "ce_asym" of the official code, without tau^2   kd_tau2: False leaves out the factor tau^2
    mu_macro: mu_n after Q T rounds   mu_max: where mu_n is cut, 1 in the paper and 0.9 in the code
    recompute_bn: measure BatchNorm statistics of a mixed model again

    Silos weigh the same by default. Silo state: theta_p and n; a silo that lost them begins again with n = 1.
    """

    has_personal_model: ClassVar[bool] = True
    weights: Literal["samples", "uniform"] = "uniform"
    lam: UnitInterval = 0.1
    transfer: Literal["kd", "mmd"] = "kd"
    tau: Positive = 4.0
    kd: Literal["kl", "ce_asym"] = "kl"
    kd_tau2: bool = True
    mu_macro: UnitInterval = 0.9
    mu_max: UnitInterval = 1.0
    recompute_bn: bool = True

    @property
    def coupling(self) -> Coupling:
        return Coupling.BATCH if self.transfer == "mmd" and self.lam else Coupling.EXAMPLE

    def taught(self, model: nn.Module, silo: State) -> LossFn:
        """Make the loss with the transfer from the HPM; cross entropy alone while there is none."""
        if not self.lam or HPM not in silo:
            return self.loss
        teacher = frozen_copy(model, silo[HPM])

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            split = prototypes.features_of(model)
            z = split.features(x)
            o = split.head(z)
            with torch.no_grad():
                z_p = teacher.features(x)
                o_p = teacher.head(z_p)
            ce = (1.0 - self.lam) * cross_entropy(o, y, reduction="none")
            if self.transfer == "mmd":
                return Losses(ce, self.lam * distillation.mmd(z, z_p))
            return Losses(ce + self.lam * self._kd_terms(o, o_p))

        return loss

    def _kd_terms(self, o: Tensor, o_p: Tensor) -> Tensor:
        if self.kd == "ce_asym":
            return distillation.asymmetric_terms(o, o_p, self.tau)
        return distillation.kd_terms(o, o_p, self.tau, scaled=self.kd_tau2)

    def momentum(self, n: int, context: RoundContext) -> float:
        """Return mu_n of a silo's n-th round, n from 1."""
        expected = max(context.cohort * context.rounds // context.n_silos, 1)
        return min(self.mu_max, self.mu_macro * (n - 1) / expected)

    def inherit(self, model: nn.Module, silo: State, data: LocalData, context: RoundContext) -> State:
        """Mix the trained model into the HPM and count the round; the first HPM is the trained model itself."""
        n = 1 + (int(silo[COUNT]["n"]) if COUNT in silo else 0)
        mine: Mapping[str, Tensor] = {name: v.cpu() for name, v in tensor_maps.copy_state(model).items()}
        mu = self.momentum(n, context) if HPM in silo else 0.0
        if mu:
            mine = {name: mu * silo[HPM][name] + (1.0 - mu) * v for name, v in mine.items()}
        if 0.0 < mu < 1.0 and self.recompute_bn and prototypes.features_of(model).has_batch_norm:
            mixed = frozen_copy(model, mine)
            batch_norm.recompute(mixed, data)
            mine = {name: v.cpu() for name, v in tensor_maps.copy_state(mixed).items()}
        return {HPM: mine, COUNT: {"n": torch.tensor([float(n)])}}

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Load the HPM; before a silo's first round there is none, and `model` is what it has."""
        if HPM in silo:
            tensor_maps.load_state(model, silo[HPM])
        return model
