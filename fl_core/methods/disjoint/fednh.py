"""FedNH: a uniform, non-parametric head.

Dai, Chen, Li, Heinecke, Sun and Xu, "Tackling Data Heterogeneity in Federated Learning with Class Prototypes",
AAAI 2023, equations 1 to 4 and Algorithm 1 (first prototypes: class_vectors.py).

    W^0   = unit rows whose smallest distance is as large as can be                          (1)
    min   CE(s W^t h), h = f(x) / ||f(x)||        over f and s; W^t stays                    (2)
    mu_k^c = sum_{y_n = c} h_n / ||.||            with the trained model, in eval mode       (3)
    a_c   = sum_k n_k^c mu_k^c / ||.||
    w_c   = rho w_c + (1 - rho) a_c, / ||.||      classes without a report keep theirs       (4)

f and s are averaged uniformly. The text takes s as a constant, its appendix and the released code train it from 1 (CNN)
or 20 (ResNet). Clients' means, their average and w_c are each brought to length 1, as in the code, which starts from
orthogonal rows (`init`). Where the model's features end in a ReLU, as in the paper, no entry of h is below 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_core.methods.fedavg import FedAvg
from fl_core.methods.shared import class_vectors
from fl_core.methods.shared.class_vectors import CLASSIFIER, EPS, SCALE, FixedHead
from fl_core.methods.shared.prototypes import PROTOTYPES, features_of
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, ClassSums, LocalResult, Part, RoundContext, SgdOptions, State, Tensors
from fl_core.validate import NonNegative, Positive, UnitInterval


@dataclass(frozen=True, kw_only=True)
class FedNH(FedAvg):
    """As FedAvg, except that the head is made of class prototypes, which move by the features' means.

    Attributes:
        rho: how much of a prototype is kept, in [0, 1]
        scale: s at the start
        fix_scaling: a constant s instead of a trained one, 30 in the paper; 0: trained
        init: "uniform" or "orthogonal" (needs as many features as classes)

    Guarantees: prototypes do not change in local training, and have length 1 after every round.
    """

    name: ClassVar[str] = "fednh"
    has_personal_model: ClassVar[bool] = True
    weights: Literal["samples", "uniform"] = "uniform"
    rho: UnitInterval = 0.9
    scale: Positive = 1.0
    fix_scaling: NonNegative = 0.0
    init: Literal["uniform", "orthogonal"] = "uniform"

    @property
    def sends(self) -> tuple[str, ...]:
        return ("delta", PROTOTYPES)

    def shared(self, name: str) -> bool:
        return not name.startswith(("head.", CLASSIFIER, *([SCALE] if self.fix_scaling else [])))

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:
        return n_classes**2 if self.init == "uniform" and n_classes > 2 * feature_dim else 0

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        place = class_vectors.uniform if self.init == "uniform" else class_vectors.orthogonal
        rows = place(context.n_classes, features_of(model).feature_dim, class_vectors.seed_of(model)).float()
        return {
            "w": tensor_maps.select(tensor_maps.copy_state(self._net(model, rows)), self.shared),
            PROTOTYPES: {"w": rows},
        }

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        """Keep the trained scale for the personal model; it is no tensor of the model."""
        return {"scale": {SCALE: torch.full((1,), self.fix_scaling or self.scale)}}

    def broadcast(self, server: State) -> State:
        return dict(server)

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:  # noqa: ARG002
        net = self._received(model, msg)
        data.sgd(net, self.loss, SgdOptions(only=self.shared))
        bundle = {"delta": self.delta(net, msg, data), PROTOTYPES: self._directions(net, msg, data, context)}
        return LocalResult(bundle, {"scale": {SCALE: net.scale.factor.detach().clone().cpu()}})

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        w, part = server[PROTOTYPES]["w"], total[PROTOTYPES]
        return {**super().merge(server, total, context), PROTOTYPES: {"w": rotated_head(w, part, self.rho)}}

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        return self._received(model, msg)

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        net = self._net(model, msg[PROTOTYPES]["w"])
        tensor_maps.load_state(net, silo["scale"])
        return net

    def exported(self, server: State) -> Tensors:
        constant = {SCALE: torch.tensor([self.fix_scaling])} if self.fix_scaling else {}
        return {**server["w"], **constant, CLASSIFIER: server[PROTOTYPES]["w"]}

    def _net(self, model: nn.Module, rows: Tensor) -> FixedHead:
        return FixedHead(features_of(model), rows, self.fix_scaling or self.scale, trained=not self.fix_scaling)

    def _received(self, model: nn.Module, msg: State) -> FixedHead:
        net = self._net(model, msg[PROTOTYPES]["w"])
        tensor_maps.load_state(net, msg["w"])
        return net

    @staticmethod
    def _directions(net: FixedHead, msg: State, data: LocalData, context: RoundContext) -> Part:
        """Return Part(n_k^c mu_k^c (C, d), n_k^c (C,)); zeros where this silo submits no prototypes."""
        rows = msg[PROTOTYPES]["w"]
        if not context.prototypes:
            return Part({"w": torch.zeros_like(rows)}, torch.zeros(len(rows)))
        net.eval()

        def unit(x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
            with torch.no_grad():
                return net.features(x)

        sums = data.sum(ClassSums(unit, len(rows)), bound=1.0)
        return Part.of({"w": normalize(sums["sum"], dim=1, eps=EPS)}, sums["count"].clamp(min=0.0))


def rotated_head(w: Tensor, part: Part, rho: float) -> Tensor:
    """Return the prototypes (C, d) after a round; rows of weight 0, or that cancel out, keep their bytes."""
    a = normalize(part.total["w"].double(), dim=1, eps=EPS)  # the weights cancel: a mean has its sum's direction
    moved = rho * w.double() + (1.0 - rho) * a
    turns = (part.weight > 0) & (moved.norm(dim=1) > EPS)
    return torch.where(turns.unsqueeze(1), normalize(moved, dim=1, eps=EPS).float(), w)
