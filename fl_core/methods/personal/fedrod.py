"""FedROD: one body, a generic head for all classes and a private head for the own ones.

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022,
equations 6 to 9 and Algorithm 1. z are features, g_G the generic head's logits, g_P the private head's, n_k the silo's
class counts (fedlc.py):

    L_G = CE(g_G + gamma log n_k, y)                        over body and generic head, averaged as in FedAvg
    L_P = CE(stopgrad(g_G) + g_P(stopgrad(z)), y)           over the private head alone
    linear: g_P = phi_k z, phi_k stays at the silo          hyper: g_P = z nu(n_k / sum n_k), nu is averaged like w

"together" takes both steps on each batch, from the same z and g_G; "separate" runs the epochs of L_G, then as many of
L_P on the frozen body (FedNH's runs). The private head moves by plain SGD at the run's rate. The global model is body
and generic head; the personal one decides by g_G + g_P. With one class at a silo L_G is 0 and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import rng
from fl_core.methods.disjoint.fedlc import balanced_softmax
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.shared_body import copy_tensors, freeze_norms
from fl_core.methods.shared.prototypes import features_of
from fl_core.models.split_model import SplitModel
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import (
    Bundle,
    LocalResult,
    Losses,
    LossFn,
    Part,
    PartRule,
    RoundContext,
    SgdOptions,
    State,
    Tensors,
)
from fl_core.validate import Count, NonNegative

PART = "hyper"


class TwoHeads(nn.Module):
    """A model with a private head beside its own: logits (B, C) are g_G + g_P. It shares the model's modules."""

    def __init__(self, model: SplitModel, private: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.private = private.to(next(model.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        z = self.model.features(x)
        logits: Tensor = self.model.head(z) + self.private(z)
        return logits


class GeneratedHead(nn.Module):
    """A head that a network nu makes: W = nu(a) (d, C), logits z W, from the shares a (C,) of a silo's classes.

    nu is Linear(C, hidden)-ReLU-Linear(hidden, d C), both with bias; FedNH's code takes hidden = d.
    """

    def __init__(self, n_classes: int, feature_dim: int, hidden: int, shares: Tensor) -> None:
        super().__init__()
        self.nu = nn.Sequential(nn.Linear(n_classes, hidden), nn.ReLU(), nn.Linear(hidden, feature_dim * n_classes))
        self.register_buffer("shares", shares, persistent=False)
        self._shape = (feature_dim, n_classes)

    def weight(self) -> Tensor:
        """Make the head (d, C) that nu gives now."""
        made: Tensor = self.nu(self.get_buffer("shares"))
        return made.view(self._shape)

    def forward(self, z: Tensor) -> Tensor:
        return z @ self.weight()


@dataclass(frozen=True, kw_only=True)
class FedROD(FedAvg):
    """As FedAvg with balanced softmax, with a private head beside the generic one.

    Attributes:
        gamma: strength of the prior in L_G, >= 0
        variant: "linear" or "hyper"
        phase: "together" or "separate"
        private_init: phi_k starts as a "copy" of the generic head, or "zero"
        hidden: width of nu, 0 for d
        personal_body: the personal model's body and generic head, as trained here ("local") or as "received"

    Guarantees: gamma = 0 averages FedAvg's models bit for bit; the private head of "linear" never travels.
    """

    name: ClassVar[str] = "fedrod"
    bias_follows_classes: ClassVar[bool] = False
    has_personal_model: ClassVar[bool] = True
    gamma: NonNegative = 1.0
    variant: Literal["linear", "hyper"] = "linear"
    phase: Literal["together", "separate"] = "together"
    private_init: Literal["copy", "zero"] = "copy"
    hidden: Count = 0
    personal_body: Literal["local", "received"] = "local"

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Take a private head of the silo's own: the hypernetwork makes one head for a whole batch."""
        return {"variant": "linear"} if self.variant == "hyper" else {}

    @property
    def sends(self) -> tuple[str, ...]:
        return ("delta", PART) if self.variant == "hyper" else ("delta",)

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Weigh the hypernetwork as the model."""
        return {**super().part_rules, PART: PartRule(self.weighing)}

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:
        return (self.hidden or feature_dim) * (feature_dim + 1) * n_classes if self.variant == "hyper" else 0

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        split = features_of(model)
        nu = {PART: new_nu(split, self.hidden or split.feature_dim)} if self.variant == "hyper" else {}
        return {**super().init_server(model, context), **nu}

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        if self.variant == "hyper":
            return {}
        start = copy_tensors(features_of(model).head)
        return {"phi": start if self.private_init == "copy" else tensor_maps.zeros(start)}

    def broadcast(self, server: State) -> State:
        return dict(server)

    def private(self, model: nn.Module, msg: State, silo: State, data: LocalData) -> nn.Module:
        if self.variant == "linear":
            return linear(silo["phi"])
        split = features_of(model)
        head = GeneratedHead(
            split.n_classes, split.feature_dim, self.hidden or split.feature_dim, shares_of(data.class_counts())
        )
        tensor_maps.load_state(head.nu, msg[PART])
        return head

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        both = TwoHeads(features_of(model), self.private(model, msg, silo, data))
        if self.phase == "together":
            data.sgd(both, both_losses(data.class_counts(), self.gamma), SgdOptions(no_momentum=is_private))
        else:
            data.sgd(both, generic_loss(data.class_counts(), self.gamma), SgdOptions(only=is_generic))
            data.sgd(both, frozen_loss, SgdOptions(only=is_private, no_momentum=is_private))
        bundle = self.bundle(model, msg, data, context)
        if not isinstance(both.private, GeneratedHead):
            return LocalResult(bundle, {"phi": copy_tensors(both.private)})
        moved = tensor_maps.sub(copy_tensors(both.private.nu), msg[PART])
        phi = {"weight": both.private.weight().detach().T.contiguous().cpu()}
        return LocalResult({**bundle, PART: Part.of(moved, self.weight(data))}, {"phi": phi})

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        after = super().merge(server, total, context)
        return {**after, PART: tensor_maps.add(server[PART], total[PART].mean())} if PART in server else after

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        if self.personal_body == "received":
            tensor_maps.load_state(model, msg["w"])
            if self.variant == "hyper":
                return TwoHeads(features_of(model), self.private(model, msg, silo, data))
        head = linear(silo["phi"]) if "phi" in silo else self.private(model, msg, silo, data)
        return TwoHeads(features_of(model), head)


def new_nu(model: SplitModel, hidden: int) -> dict[str, Tensor]:
    """Draw nu's initial weights from a stream that the model's own initial weights name."""
    with rng.torch_scope(int(tensor_maps.digest(tensor_maps.copy_state(model))[:15], 16), "hypernetwork"):
        made = GeneratedHead(model.n_classes, model.feature_dim, hidden, torch.zeros(model.n_classes))
    return tensor_maps.copy_state(made.nu)


def linear(values: Tensors) -> nn.Linear:
    """Build a linear layer of given weights: weight (C, d) and, where the head has one, bias (C,)."""
    classes, d = values["weight"].shape
    layer = nn.Linear(d, classes, bias="bias" in values, device="meta").to_empty(device="cpu")
    tensor_maps.load_state(layer, values)
    return layer


def shares_of(counts: Tensor) -> Tensor:
    """Divide class counts (C,) by their sum; counts below 0, which noise can make, count as 0."""
    positive = counts.clamp(min=0.0)
    return positive / positive.sum().clamp(min=1.0)


def private_loss(z: Tensor, g: Tensor, y: Tensor, private: nn.Module) -> Tensor:
    """Return CE(stopgrad(g) + private(stopgrad(z)), y) per example (B,): a gradient for the private head alone."""
    logits: Tensor = g.detach() + private(z.detach())
    return cross_entropy(logits, y, reduction="none")


def generic_loss(counts: Tensor, gamma: float) -> LossFn:
    def loss(both: nn.Module, x: Tensor, y: Tensor) -> Losses:
        return Losses(balanced_softmax(_parts(both).model(x), y, counts, gamma))

    return loss


def both_losses(counts: Tensor, gamma: float) -> LossFn:
    """Make L_G + L_P on the same z and g_G; neither has a gradient for the other's parameters."""

    def loss(both: nn.Module, x: Tensor, y: Tensor) -> Losses:
        parts = _parts(both)
        z = parts.model.features(x)
        g: Tensor = parts.model.head(z)
        return Losses(balanced_softmax(g, y, counts, gamma) + private_loss(z, g, y, parts.private))

    return loss


def frozen_loss(both: nn.Module, x: Tensor, y: Tensor) -> Losses:
    freeze_norms(both)
    parts = _parts(both)
    with torch.no_grad():
        z = parts.model.features(x)
        g: Tensor = parts.model.head(z)
    return Losses(private_loss(z, g, y, parts.private))


def is_private(name: str) -> bool:
    return name.startswith("private.")


def is_generic(name: str) -> bool:
    return not is_private(name)


def _parts(both: nn.Module) -> TwoHeads:
    return cast(TwoHeads, both)  # or a per-example wrapper, which passes its attributes on
