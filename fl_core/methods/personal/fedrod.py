"""FedROD: one body, a generic head for all classes and a private head for the own ones.

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022,
equations 6 to 9 and Algorithm 1. z are features, g_G the generic head's logits, g_P the private head's, n_k the silo's
class counts (logit_adjustment.py, two_heads.py):

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
from typing import ClassVar

from torch import nn

from fl_core import validate
from fl_core.methods.building_blocks.prototypes import features_of
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.personal.shared_body import kept
from fl_core.methods.personal.two_heads import (
    Generated,
    TwoHeads,
    both_losses,
    frozen_loss,
    generic_loss,
    is_generic,
    is_private,
    linear,
    new_nu,
    shares_of,
)
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Part, RoundContext, SgdOptions, State

PART = "hyper"


@dataclass(frozen=True, kw_only=True)
class FedROD(FedAvg):
    """As FedAvg with balanced softmax, with a private head beside the generic one.

    gamma: strength of the prior in L_G, >= 0   variant: "linear" or "hyper"   phase: "together" or "separate"
    private_init: phi_k starts as a "copy" of the generic head, or "zero"   hidden: width of nu, 0 for d
    personal_body: the personal model's body and generic head, as trained here ("local") or as "received".

    Guarantees: gamma = 0 averages FedAvg's models bit for bit; the private head of "linear" never travels.
    """

    name: ClassVar[str] = "fedrod"
    has_personal_model: ClassVar[bool] = True
    gamma: float = 1.0
    variant: str = "linear"
    phase: str = "together"
    private_init: str = "copy"
    hidden: int = 0
    personal_body: str = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.at_least("E-CFG-02", self.name, 0, gamma=self.gamma, hidden=self.hidden)
        validate.one_of(
            "E-CFG-02",
            self.name,
            variant=(self.variant, ("linear", "hyper")),
            phase=(self.phase, ("together", "separate")),
            private_init=(self.private_init, ("copy", "zero")),
            personal_body=(self.personal_body, ("local", "received")),
        )

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Take a private head of the silo's own: the hypernetwork makes one head for a whole batch."""
        return {"variant": "linear"} if self.variant == "hyper" else {}

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up, part by part."""
        return ("delta", PART) if self.variant == "hyper" else ("delta",)

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Start from the initialised model, and from an initial hypernetwork."""
        split = features_of(model)
        nu = {PART: new_nu(split, self.hidden or split.feature_dim)} if self.variant == "hyper" else {}
        return {**super().init_server(model, context), **nu}

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        """Start the private head; a hypernetwork makes it when it is needed."""
        if self.variant == "hyper":
            return {}
        start = kept(features_of(model).head)
        return {"phi": start if self.private_init == "copy" else tensor_maps.zeros(start)}

    def broadcast(self, server: State) -> State:
        """Send the model and, where there is one, the hypernetwork."""
        return dict(server)

    def private(self, model: nn.Module, msg: State, silo: State, data: LocalData) -> nn.Module:
        """Build the private head with which a round begins."""
        if self.variant == "linear":
            return linear(silo["phi"])
        split = features_of(model)
        head = Generated(
            split.n_classes, split.feature_dim, self.hidden or split.feature_dim, shares_of(data.class_counts())
        )
        tensor_maps.load_state(head.nu, msg[PART])
        return head

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        """Train both predictors; send the generic one's difference, keep the private head."""
        tensor_maps.load_state(model, msg["w"])
        both = TwoHeads(features_of(model), self.private(model, msg, silo, data))
        if self.phase == "together":
            data.sgd(both, both_losses(data.class_counts(), self.gamma), SgdOptions(no_momentum=is_private))
        else:
            data.sgd(both, generic_loss(data.class_counts(), self.gamma), SgdOptions(only=is_generic))
            data.sgd(both, frozen_loss, SgdOptions(only=is_private, no_momentum=is_private))
        bundle = {"delta": self.delta(model, msg, data), **self.extras(model, msg, data, context)}
        if not isinstance(both.private, Generated):
            return LocalResult(bundle, {"phi": kept(both.private)})
        moved = tensor_maps.sub(kept(both.private.nu), msg[PART])
        phi = {"weight": both.private.weight().detach().T.contiguous().cpu()}
        return LocalResult({**bundle, PART: Part.of(moved, self.weight(data))}, {"phi": phi})

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        """Average the hypernetwork like the model."""
        after = super().merge(server, total, context)
        return {**after, PART: tensor_maps.add(server[PART], total[PART].mean())} if PART in server else after

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Return the model that decides by both heads."""
        if self.personal_body == "received":
            tensor_maps.load_state(model, msg["w"])
            if self.variant == "hyper":
                return TwoHeads(features_of(model), self.private(model, msg, silo, data))
        return TwoHeads(features_of(model), linear(silo["phi"]))
