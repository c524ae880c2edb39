"""The inherited private model (HPM): a silo's own moving average of its models, which teaches the next one.

Li, Zhan, Shao, Li and Song, "FedPHP: Federated Personalization with Inherited Private Models", ECML PKDD 2021, and Li,
Song, Li, Li, Shao, Yang and Zhan, "MAP", TKDE 2024, Algorithm 1.

    L       = (1 - lam) CE + lam L_transfer(theta; theta_p)       CE alone in a silo's first round: no HPM yet
    theta_p <- mu_n theta_p + (1 - mu_n) theta_k                  after training, in the silo's n-th round
    mu_n    = min(mu_max, mu_macro (n - 1) / max(floor(Q T), 1))  Q T: rounds that a silo may expect to be asked in

All parameters and BatchNorm statistics are mixed. Where the network has BatchNorm, the statistics of a mixed model are
measured again on the training set: those of two models do not mix.

L_transfer, from a teacher to the model in training, is by logits (KD) or by features (MMD; FedPHP). o (B, C) and h (B,
d) are the student's, o_p and h_p the teacher's, detached.

    KD   tau^2 KL( softmax(o_p/tau) || softmax(o/tau) )
    MMD  || mean phi(h) - mean phi(h_p) ||^2 in the space of five Gaussian kernels, diagonals included
         K = sum_{i=0..4} exp(-D / b_i),  b_i = 2^(i-2) b,  b the mean of D over pairs of the 2B features, detached
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.modules.batchnorm import _BatchNorm

from fl_core.methods.fedavg import FedAvg
from fl_core.methods.shared import prototypes
from fl_core.models.split_model import frozen_copy
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import LocalData
from fl_core.types.values import ExampleSums, Losses, LossFn, RoundContext, State, Tensors
from fl_core.validate import Positive, UnitInterval

HPM = "inherited"
COUNT = "participations"


@dataclass(frozen=True, kw_only=True)
class InheritedModel(FedAvg):
    """Base of methods with an inherited private model.

    Attributes:
        lam: weight of the transfer, 0 to 1
        transfer: "kd" (logits) or "mmd" (features)
        tau: temperature of KD
        kd: "kl", or "ce_asym" of the official code, without tau^2
        kd_tau2: False leaves out the factor tau^2
        mu_macro: mu_n after Q T rounds
        mu_max: upper limit of mu_n, 1 in the paper and 0.9 in the code
        recompute_bn: measure BatchNorm statistics of a mixed model again
        recompute_first: also those of a silo's first model, which is no mixture, as the authors' program does

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
    recompute_first: bool = False
    omitted_at_default: ClassVar[frozenset[str]] = frozenset({"recompute_first"})

    @property
    def coupling(self) -> Coupling:
        return Coupling.BATCH if self.transfer == "mmd" and self.lam else Coupling.EXAMPLE

    def transfer_loss(self, model: nn.Module, silo: State) -> LossFn:
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
                return Losses(ce, self.lam * mmd(z, z_p))
            return Losses(ce + self.lam * self._kd_terms(o, o_p))

        return loss

    def _kd_terms(self, o: Tensor, o_p: Tensor) -> Tensor:
        if self.kd == "ce_asym":
            return asymmetric_terms(o, o_p, self.tau)
        return kd_terms(o, o_p, self.tau, scaled=self.kd_tau2)

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
        mixture = 0.0 < mu < 1.0 or (HPM not in silo and self.recompute_first)
        if mixture and self.recompute_bn and prototypes.features_of(model).has_batch_norm:
            mixed = frozen_copy(model, mine)
            recompute(mixed, data)
            mine = {name: v.cpu() for name, v in tensor_maps.copy_state(mixed).items()}
        return {HPM: mine, COUNT: {"n": torch.tensor([float(n)])}}

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Load the HPM; before a silo's first round there is none, and `model` is what it has."""
        if HPM in silo:
            tensor_maps.load_state(model, silo[HPM])
        return model


# ---- knowledge transfer: KD and MMD ----------------------------------------------------------------------------------

KERNELS = 5


def kd_terms(o: Tensor, o_p: Tensor, tau: float, *, scaled: bool = True) -> Tensor:
    """Return KD of each example (B,); `scaled` multiplies by tau^2, which keeps the gradient's size for any tau."""
    log_p, log_q = torch.log_softmax(o_p / tau, dim=1), torch.log_softmax(o / tau, dim=1)
    terms = kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
    return tau**2 * terms if scaled else terms


def asymmetric_terms(o: Tensor, o_p: Tensor, tau: float) -> Tensor:
    """Return the official code's form (B,): cross entropy of the teacher at tau against the student at 1."""
    return -(torch.softmax(o_p / tau, dim=1) * torch.log_softmax(o, dim=1)).sum(1)


def mmd(h: Tensor, h_p: Tensor) -> Tensor:
    """Return MMD, a scalar >= 0; 0 for equal features."""
    x, n = torch.cat([h, h_p]), len(h)
    # squared differences, not |a|^2 + |b|^2 - 2ab: that form gives a small number for equal points, here it is 0
    d = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    b = d.detach().sum() / (len(x) ** 2 - len(x)) + 1e-8
    k = torch.stack([torch.exp(-d / (b * 2.0 ** (i - KERNELS // 2))) for i in range(KERNELS)]).sum(0)
    return (k[:n, :n] + k[n:, n:] - k[:n, n:] - k[n:, :n]).mean()


# ---- statistics of BatchNorm, measured on the training set -----------------------------------------------------------


class _ReachedError(Exception):
    """Ends a forward pass at the layer whose input is measured."""

    def __init__(self, layer: str, rows: Tensors) -> None:
        self.layer, self.rows = layer, rows


def recompute(model: nn.Module, data: LocalData) -> None:
    """Set every layer's running mean and variance to those of its input over the training set, in place.

    One `sum` query without augmentation per layer, in the order in which the network reaches them, up to that layer:
    those before it normalise by the statistics that were just measured. Moments are sums over examples in float64,
    around the old mean, which keeps digits. Those of a single example are none: the old ones stay. Leaves the model in
    eval mode.

    Guarantees: neither the order of the examples nor how they are batched matters, up to the rounding of features.
    """
    model.eval()
    pending = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    while pending:
        reached: set[str] = set()
        sums = data.sum(ExampleSums(lambda x, _, seen=reached: _moments(model, pending, x, seen)))  # type: ignore[misc]
        if not reached:
            return  # no examples, or layers that the network does not use
        layer = pending.pop(reached.pop())
        if float(sums["examples"]) > 1:
            n = float(sums["numbers"])
            mean, square = sums["mean"] / n, sums["square"] / n
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean += mean.to(layer.running_mean)
            layer.running_var.copy_((square - mean.square()).clamp_min(0.0) * n / (n - 1))


def _moments(model: nn.Module, layers: Mapping[str, _BatchNorm], x: Tensor, reached: set[str]) -> Tensors:
    """Pass one batch to the first of the layers; return per example its numbers per channel and two moments' sums."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def stop(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, _BatchNorm)
            assert layer.running_mean is not None
            v = args[0].double().reshape(len(x), layer.num_features, -1)  # (B, channels, places)
            v = v - layer.running_mean.double().view(-1, 1)
            one = v.new_ones(len(x))
            sums = {"examples": one, "numbers": v.shape[2] * one, "mean": v.sum(2), "square": v.square().sum(2)}
            raise _ReachedError(name, sums)

        return stop

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        model(x)
    except _ReachedError as found:
        reached.add(found.layer)
        return found.rows
    finally:
        for hook in hooks:
            hook.remove()
    return {}
