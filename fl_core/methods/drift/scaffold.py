"""SCAFFOLD: control variates take the drift out of every local step.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1 with option II.

    g      <- grad CE(w) - c_k + c                       every local step, before the momentum buffer
    c_k+    = c_k - c + (w^t - w_k) / (eta A_k)          kept when the round's close names the silo, else discarded
    w^{t+1} = w^t + eta_g sum_k n_k (w_k - w^t) / sum_k n_k    over the silos whose update arrived
    c      <- c + sum_k pi_k (c_k+ - c_k)                pi_k = n_k / sum over all N silos, so c = sum_k pi_k c_k

eta is the learning rate of this round and A_k how far the silo's steps reach: K without momentum. With momentum the
paper's K eta lets the variates grow by |1 - A_k / K| per round, and a correction outside the buffer is biased. Without
momentum nothing is lost against the paper: `schedule` sets train.momentum to 0; 0.9 is exact, too, but not the paper's.

The paper weighs silos uniformly (weights="uniform"); sizes of silos not met yet: common.py. Buffers have no variates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_core.methods.drift import common
from fl_core.methods.fedavg import FedAvg
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Part, PartRule, RoundContext, SgdOptions, State
from fl_core.validate import Count, Positive


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    """As FedAvg, except that each local step is corrected by c - c_k.

    server_lr: eta_g, > 0
    least_steps: what A_k counts as at least; 5 in the authors' program, which so makes the variates of shorter rounds
    smaller than the mean gradient

    Guarantees: the first round is FedAvg's bit for bit (server_lr = 1); once every silo was met, c is the mean of all
    silos' c_k, whatever updates were lost.
    """

    name: ClassVar[str] = "scaffold"
    bias_follows_classes: ClassVar[bool] = False
    server_tracks_state: ClassVar[bool] = True
    schedule: ClassVar[Mapping[str, float]] = {"momentum": 0.0}
    targets = FedAvg.targets
    server_lr: Positive = 1.0
    least_steps: Count = 0
    omitted_at_default: ClassVar[frozenset[str]] = frozenset({"least_steps"})

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        return {Capability.ADAPTIVE_OPTIMIZER: common.SGD_ONLY}

    @property
    def sends(self) -> tuple[str, ...]:
        return (*super().sends, "control", common.CENSUS)

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Weigh variates as the model."""
        return {**super().part_rules, "control": PartRule(self.weighing), common.CENSUS: common.CENSUS_RULE}

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        return {
            **super().init_server(model, context),
            "c": common.zeros_of(model, self.shared),
            common.CENSUS: common.empty_census(),
        }

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {"c": common.zeros_of(model, self.shared), common.SIZE: common.report_size()}

    def broadcast(self, server: State) -> State:
        return {**super().broadcast(server), "c": server["c"]}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        shift = tensor_maps.sub(msg["c"], silo["c"])
        steps = data.sgd(model, self.objective(model, msg, data, context), SgdOptions(shift=shift))
        delta = self.model_delta(model, msg)
        length = data.lr * max(common.effective_steps_of(data, steps), self.least_steps)
        change = {name: -c - delta[name] / length for name, c in msg["c"].items()}
        n = common.size_of(silo[common.SIZE], self.weight(data))
        bundle = {
            "delta": Part.of(delta, self.weight(data)),
            "control": Part.of(change, n),
            common.CENSUS: common.size_part(silo[common.SIZE], n),
            **self.extras(model, msg, data, context),
        }
        return LocalResult(bundle, {"c": tensor_maps.add(silo["c"], change), common.SIZE: common.report_size(n)})

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        mean, c = total["delta"].mean(), server["c"]
        step = {name: self.server_lr * v if name in c else v for name, v in mean.items()}
        census = common.total_size(server[common.CENSUS], total[common.CENSUS])
        after = common.updated_mean(c, total["control"], server[common.CENSUS], census, context.n_silos)
        return {**server, "w": tensor_maps.add(server["w"], step), "c": after, common.CENSUS: census}
