"""FedDC: FedDyn's drift with SCAFFOLD's control variates.

Gao, Fu, Li, Chen, Xu and Xu, "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction",
CVPR 2022, equations 4 to 8, with h_k = m_k of feddyn.py:

    CE(w) + alpha_k/2 ||w + h_k - w^t||^2 + <w, c/omega_k - c_k>
    control="code":  c_k+ = c_k - c/omega_k - (w_k - w^t) / (eta A_k)     as released: SCAFFOLD's option II
    control="paper": c_k+ =                 - (w_k - w^t) / (eta A_k)     as printed: the round's own mean step
    control="none":  c_k = c = 0, which is FedDyn
    c <- c + sum_k omega_k (c_k+ - c_k) / N                so c is the mean of omega_k c_k over all N silos

The two readings part from the third round on; both reach the optimum. eta is the learning rate of this round and A_k
how far the silo's own steps reach (the released code takes the undecayed rate and the average silo's steps). Model,
drift and the choice of the reported model are FedDyn's; at full participation its w is the paper's mean of w_k + h_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fl_core.methods.drift import common
from fl_core.methods.drift.feddyn import FedDyn
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Part, PartRule, RoundContext, State


@dataclass(frozen=True, kw_only=True)
class FedDC(FedDyn):
    """As FedDyn, except that each local step is corrected by c/omega_k - c_k.

    control: "code" (default), "paper" or "none". Guarantees: "none" is FedDyn bit for bit.
    """

    name: ClassVar[str] = "feddc"
    even_norms: ClassVar[bool] = False
    targets = FedDyn.targets
    control: Literal["code", "paper", "none"] = "code"

    @property
    def controlled(self) -> bool:
        return self.control != "none"

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        remedy = f"{common.SGD_ONLY}, or method.control=none"
        return {Capability.ADAPTIVE_OPTIMIZER: remedy} if self.controlled else {}

    @property
    def sends(self) -> tuple[str, ...]:
        return (*super().sends, "control") if self.controlled else super().sends

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Weigh variates by size."""
        return {**super().part_rules, "control": PartRule(self.weighing)}

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        start = super().init_server(model, context)
        return {**start, "c": common.zeros_of(model, self.shared)} if self.controlled else start

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:
        start = super().init_silo(model, context)
        return {**start, "c": common.zeros_of(model, self.shared)} if self.controlled else start

    def broadcast(self, server: State) -> State:
        msg = super().broadcast(server)
        return {**msg, "c": server["c"]} if self.controlled else msg

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        if not self.controlled:
            return super().local(model, msg, silo, data, context)
        c, silo_c = tensor_maps.scale(msg["c"], 1 / self.omega(msg, silo, data)), silo["c"]
        outcome, moved, steps = self.descend(model, msg, silo, data, context, shift=tensor_maps.sub(c, silo_c))
        length = data.lr * common.effective_steps_of(data, steps)
        left = c if self.control == "code" else silo_c
        change = {name: -v - moved[name] / length for name, v in left.items()}
        n = common.size_of(silo[common.SIZE], self.weight(data))
        return LocalResult(
            {**outcome.bundle, "control": Part.of(change, n)}, {**outcome.state, "c": tensor_maps.add(silo_c, change)}
        )

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        after = super().merge(server, total, context)
        if not self.controlled:
            return after
        census = server[common.CENSUS], after[common.CENSUS]
        return {**after, "c": common.updated_mean(server["c"], total["control"], *census, context.n_silos)}
