"""FedNova: differences are divided by how far the silo's steps reach before they are averaged.

Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020, equations 5 to 9.

    d_k     = (w_k - w^t) / A_k                     A_k: the scalar run of the silo's optimizer, mu's pull included
    tau     = sum_k n_k A_k / sum_k n_k             or of the plain step counts K_k (tau="steps")
    w^{t+1} = w^t + tau sum_k n_k d_k / sum_k n_k   over the silos whose update arrived

A product of two means, so a sum over silos is enough and hides each silo's number of steps. Buffers are averaged as
they are. With server momentum g the update u becomes v <- g v + u, w <- w + v (buffers excluded).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from fl_core.methods.drift import common
from fl_core.methods.drift.fedprox import proximal
from fl_core.methods.prototype_aided import PrototypeAided
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Part, PartRule, RoundContext, SgdOptions, State
from fl_core.validate import NonNegative, below, bounded


@dataclass(frozen=True, kw_only=True)
class FedNova(PrototypeAided):
    """As FedAvg, except that silos with more steps do not pull harder.

    mu: strength of FedProx's pull in local training (0: none)   tau: "effective" or "steps"
    server_momentum: in [0, 1). Guarantees: with equal A_k and without server momentum it is FedAvg (mu = 0) or FedProx,
    within rounding.
    """

    name: ClassVar[str] = "fednova"
    targets = PrototypeAided.targets
    mu: NonNegative = 0.0
    tau: Literal["effective", "steps"] = "effective"
    server_momentum: Annotated[NonNegative, bounded(below, 1)] = 0.0

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        return {Capability.ADAPTIVE_OPTIMIZER: common.SGD_ONLY}

    @property
    def sends(self) -> tuple[str, ...]:
        return (*super().sends, "buffers", "steps")

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Weigh buffers and steps as the model."""
        weighed = {"buffers": PartRule(self.weighing), "steps": PartRule(self.weighing, steps="tau")}
        return {**super().part_rules, **weighed}

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        start = super().init_server(model, context)
        if not self.server_momentum:
            return start
        return {**start, "momentum": common.zeros_of(model, self.shared)}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        steps = data.sgd(model, self.objective(model, msg, data, context), SgdOptions(penalty=proximal(model, self.mu)))
        length, n = common.effective_steps_of(data, steps, self.mu), self.weight(data)
        trained, buffers = common.split(self.model_delta(model, msg), tensor_maps.trainable(model))
        bundle = {
            "delta": Part.of({name: v / length for name, v in trained.items()}, n),
            "buffers": Part.of(buffers, n),
            "steps": Part.of({"tau": torch.tensor([length if self.tau == "effective" else float(steps)])}, n),
            **self.extras(model, msg, data, context),
        }
        return LocalResult(bundle, silo)

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        if not total["delta"].weight > 0:
            return server
        update = tensor_maps.scale(total["delta"].mean(), float(total["steps"].mean()["tau"]))
        momentum: State = {}
        if self.server_momentum:
            update = tensor_maps.add(update, server["momentum"], self.server_momentum)
            momentum = {"momentum": update}
        step = {**update, **total["buffers"].mean()}
        return {**super().merge(server, {**total, "delta": Part.of(step)}, context), **momentum}
