"""FedLoGe: a body trained towards a sparse fixed frame, an averaged and a private head that are realigned by norms.

Xiao, Chen, Liu, Feng, Wu, Liu, Zhou, Yang and Liu, "FedLoGe: Joint Local and Generic Federated Learning under
Long-tailed Data", ICLR 2024 (by their released code). z are features, W (C, d) the static sparse frame (SSE-C), psi
the averaged head, phi_k the private one, B_k the classes that silo k has:

    SSE-C    W = argmax of the smallest angle between rows of length gamma, a share beta of each row being 0
    local    CE(W z) over the body, CE(psi(stopgrad z)) over psi, CE(phi_k(stopgrad z)) over phi_k, each by the same SGD
    server   body and psi are averaged as in FedAvg; W never moves, phi_k never travels
    global   psi_c <- rho psi_c / ||psi_c||                                        realignment of the averaged head
    personal (||phi_kc|| psi_c + phi_kc) z + both biases, over the classes of B_k    realignment by the private norms

beta = 0.6, gamma = 0.1 and rho = 1.7 are the authors' code. It differs from here in three things. Its frame is drawn
by Adam on the mean of each row's smallest angle, over zeros that fall anywhere in W; here each row has as many, so that
no class loses all features, and ||W W^T - C/(C-1) (I - 11^T/C)||^2 descends: where the zeros allow it, its minimum is
the simplex, whose angles are the largest that C vectors can have. Its frame has a random constant bias; here there
is none. It realigns once, after the last round, from its best round on test data; here the global model of every
round is realigned, and so are personal models: of the body and head that a round began with, and the private head
that it trained on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fl_core import rng
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.fedrod import TwoHeads, linear
from fl_core.methods.personal.shared_body import copy_tensors
from fl_core.methods.shared import class_vectors
from fl_core.methods.shared.class_vectors import EPS, ScaledClassifier
from fl_core.methods.shared.prototypes import features_of
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LocalResult, Losses, LossFn, RoundContext, State, Tensors
from fl_core.validate import HalfOpenUnit, NonNegative, Positive

FRAME = "frame"
PRIVATE = "phi"
WEIGHT, BIAS = "head.weight", "head.bias"
STEPS, STEP_SIZE = 500, 0.4


@dataclass(frozen=True, kw_only=True)
class FedLoGe(FedAvg):
    """As FedAvg, except that the body learns under a sparse fixed frame, and heads are trained beside it.

    sparsity: beta, the share of zeros in each row of the frame   length: gamma, of its rows
    norm: rho, the length of the global head's rows; 0 leaves the averaged head as it is

    classifier: what decides in the global model, the realigned "head" or the "frame", which the authors take where
    classes are balanced

    Guarantees: body and averaged head do not depend on private heads, unless one bound cuts the gradient of all
    (`train.clip_norm`, record-level privacy); the frame is the same for every silo and round.
    """

    name: ClassVar[str] = "fedloge"
    has_personal_model: ClassVar[bool] = True
    sparsity: HalfOpenUnit = 0.6
    length: Positive = 0.1
    norm: NonNegative = 1.7
    classifier: Literal["head", "frame"] = "head"

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        split = features_of(model)
        if not isinstance(split.head, nn.Linear):
            raise ConfigError("E-CFG-08", "the method needs a linear head: choose another model")
        seed = class_vectors.seed_of(model)
        frame = self.length * sparse_frame(context.n_classes, split.feature_dim, self.sparsity, seed)
        return {**super().init_server(model, context), FRAME: {"w": frame.float()}}

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {PRIVATE: copy_tensors(features_of(model).head)}

    def broadcast(self, server: State) -> State:
        return dict(server)

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        both = TwoHeads(features_of(model), linear(silo[PRIVATE]))
        data.sgd(both, three_losses(msg[FRAME]["w"]))
        return LocalResult(self.bundle(model, msg, data, context), {PRIVATE: copy_tensors(both.private)})

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        tensor_maps.load_state(model, self.exported(msg))
        return model

    def exported(self, server: State) -> Tensors:
        w = server["w"]
        if self.classifier == "frame":
            return {**w, WEIGHT: server[FRAME]["w"], **({BIAS: torch.zeros_like(w[BIAS])} if BIAS in w else {})}
        return {**w, WEIGHT: self.norm * normalize(w[WEIGHT], dim=1, eps=EPS)} if self.norm else w

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Join the received body and head with the silo's private head; classes without an example are left out."""
        tensor_maps.load_state(model, msg["w"])
        private, present = linear(silo[PRIVATE]), data.class_counts() > 0
        split = features_of(model)
        averaged = cast(nn.Linear, split.head).weight
        with torch.no_grad():
            averaged.mul_(private.weight.norm(dim=1, keepdim=True).to(averaged))
        return ScaledClassifier(TwoHeads(split, private), torch.ones(len(present)), ~present)


def three_losses(frame: Tensor) -> LossFn:
    """Make the sum of the three losses; each has a gradient for its own parameters alone. frame: W (C, d)."""

    def loss(both: nn.Module, x: Tensor, y: Tensor) -> Losses:
        parts = cast(TwoHeads, both)  # or a per-example wrapper, which passes its attributes on
        z = parts.model.features(x)
        still = z.detach()
        logits = (z @ frame.to(z).T, parts.model.head(still), parts.private(still))
        return Losses(torch.stack([cross_entropy(g, y, reduction="none") for g in logits]).sum(0))

    return loss


def sparse_frame(n_classes: int, d: int, sparsity: float, seed: int) -> Tensor:
    """Return unit vectors (C, d) in float64 with round(sparsity d) zeros each, as far apart as these zeros allow.

    Begins with a simplex frame whose entries were set to 0, and descends to the simplex's inner products.
    Raises ConfigError (E-CFG-23) as `class_vectors.etf`, and where two classes would have one vector.
    """
    full, draw = class_vectors.etf(n_classes, d, seed), rng.stream(seed, "sparse frame", d, n_classes)
    kept_entries = torch.ones(n_classes, d, dtype=torch.float64)
    for row in kept_entries:
        row[torch.randperm(d, generator=draw)[: round(sparsity * d)]] = 0.0
    w = normalize(full * kept_entries, dim=1, eps=EPS)
    wanted = full @ full.T
    for _ in range(STEPS):
        w = w - STEP_SIZE * ((w @ w.T - wanted) @ w) * kept_entries
    w = normalize(w, dim=1, eps=EPS)
    closest = float((w @ w.T - 2.0 * torch.eye(n_classes)).max())
    if not closest < 1.0 - 1e-6 or not bool((w.norm(dim=1) > 0.5).all()):
        raise ConfigError(
            "E-CFG-23",
            f"{d} features with a share of {sparsity:g} zeros do not allow a different vector for each of "
            f"{n_classes} classes: lower method.sparsity, or set model.projection to a wider one",
        )
    return w
