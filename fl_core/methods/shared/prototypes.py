"""Class prototypes: class means of features, measured at the silos as offsets from the last known ones.

    offset_k^c = sum_{n in D_k, y_n = c} (z_n - a_c)        a_c: the received prototype, 0 while it is unknown
    g_c        = a_c + sum_k offset_k^c / sum_k n_k^c       rows without a count keep their value

Offsets give the same mean as plain sums, and stay short once prototypes settle: a bound on their norm, which
differential privacy needs, then cuts off less.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_core.methods.fedavg import FedAvg
from fl_core.models.split_model import SplitModel
from fl_core.tensors import Tensor, nn, torch
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, ClassSums, Part, RoundContext, State, Tensors

PROTOTYPES = "prototypes"


def features_of(model: nn.Module) -> SplitModel:
    """Read a model as body, projection and head; a per-example wrapper passes these attributes on."""
    return model  # type: ignore[return-value]


def initial_prototypes(n_classes: int, d: int) -> dict[str, Tensor]:
    """Make the state before round 0: g (C, d) of zeros and known (C,), 1 where a prototype exists."""
    return {"g": torch.zeros(n_classes, d), "known": torch.zeros(n_classes)}


def local_sums(model: nn.Module, state: Tensors, data: LocalData) -> Part:
    """Sum z - a per class over the training examples, in eval mode and without augmentation: one joint query.

    Returns Part({"offset": (C, d)}, weight = examples per class (C,)).
    """
    model.eval()
    origin = state["g"]

    def offset(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = features_of(model).features(x)
        return z - origin.to(z.device)[y]

    sums = data.sum(ClassSums(offset, len(origin)))
    return Part({"offset": sums["sum"]}, sums["count"])


def empty_part(state: Tensors) -> Part:
    """Make the part of a silo that submits no prototypes: zeros of weight 0, no query."""
    return Part({"offset": torch.zeros_like(state["g"])}, torch.zeros_like(state["known"]))


def update(state: Tensors, part: Part) -> dict[str, Tensor]:
    """Move each prototype by its mean offset; rows of weight 0 stay as they are, known or not."""
    known = torch.maximum(state["known"], (part.weight > 0).float())
    return {"g": state["g"] + part.mean()["offset"], "known": known}


@dataclass(frozen=True, kw_only=True)
class PrototypeExchange(FedAvg):
    """As FedAvg, with prototypes that are measured after training, sent up and merged by class counts.

    Guarantees: if `uses_prototypes` is False, nothing is sent or computed in addition to FedAvg.
    """

    @property
    def uses_prototypes(self) -> bool:
        """Tell whether prototypes are measured and sent."""
        return True

    @property
    def sends(self) -> tuple[str, ...]:
        return (*super().sends, PROTOTYPES) if self.uses_prototypes else super().sends

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        start = super().init_server(model, context)
        if not self.uses_prototypes:
            return start
        return {**start, PROTOTYPES: initial_prototypes(context.n_classes, features_of(model).feature_dim)}

    def broadcast(self, server: State) -> State:
        msg = super().broadcast(server)
        return {**msg, PROTOTYPES: server[PROTOTYPES]} if self.uses_prototypes else msg

    def extras(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> dict[str, Part]:
        extra = super().extras(model, msg, data, context)
        if not self.uses_prototypes:
            return extra
        state = msg[PROTOTYPES]
        return {**extra, PROTOTYPES: local_sums(model, state, data) if context.prototypes else empty_part(state)}

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        after = super().merge(server, total, context)
        if not self.uses_prototypes:
            return after
        return {**after, PROTOTYPES: update(server[PROTOTYPES], total[PROTOTYPES])}
