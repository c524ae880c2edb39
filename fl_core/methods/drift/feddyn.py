"""FedDyn: a regulariser that follows the rounds, so that silo optima meet the global one.

Acar, Zhao, Matas Navarro, Mattina, Whatmough and Saligrama, "Federated Learning Based on Dynamic Regularization",
ICLR 2021, Algorithm 1, in the form of drifts m_k = -g_k / alpha_k (g_k: the paper's linear term):

    w_k     = argmin CE(w) + alpha_k/2 ||w - (w^t - m_k)||^2     alpha_k = alpha / omega_k, omega_k = n_k / mean size
    m_k+    = m_k + (w_k - w^t)          kept when the round's close names the silo, else discarded
    m      <- m + sum_k (w_k - w^t) / N                          so m is the mean of m_k over all N silos
    a       = w^t + sum_k (w_k - w^t) / |R|,   w^{t+1} = a + m   R: the silos whose update arrived

The sums are uniform: sizes enter by alpha_k (omega_k = 1 while no silo is met, and with weights="uniform"; common.py).
Two models come out of a round: the cloud's w, where the next round starts, and the average a, which has the lower loss
until both meet, and alone fits the averaged buffers of BatchNorm. The paper plots averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from fl_core.methods.drift import common
from fl_core.methods.prototype_aided import PrototypeAided
from fl_core.types import tensor_maps
from fl_core.types.enums import Weighing
from fl_core.types.interfaces import LocalData
from fl_core.types.values import (
    Bundle,
    LocalResult,
    Part,
    PartRule,
    PenaltyFn,
    RoundContext,
    SgdOptions,
    State,
    Tensors,
)
from fl_core.validate import Positive


@dataclass(frozen=True, kw_only=True)
class FedDyn(PrototypeAided):
    """Dynamic regularisation.

    alpha: strength, > 0; the authors' grid is 0.1, 0.01, 0.001
    report: which model is evaluated and exported. "average" sends m down beside it, so that silos can start from the
        cloud's; "cloud" sends one model, as much as FedAvg.
    Guarantees: both train alike; m is the mean of all silos' m_k, whatever updates were lost.
    """

    name: ClassVar[str] = "feddyn"
    bias_follows_classes: ClassVar[bool] = False
    server_tracks_state: ClassVar[bool] = True
    targets = PrototypeAided.targets
    alpha: Positive = 0.01
    report: Literal["average", "cloud"] = "average"

    @property
    def sends(self) -> tuple[str, ...]:
        return (*super().sends, "buffers", common.CENSUS)

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Count each silo once in the mean; sizes enter by alpha_k."""
        rules = {**super().part_rules, "buffers": PartRule(self.weighing), common.CENSUS: common.CENSUS_RULE}
        return {**rules, "delta": PartRule(Weighing.ONCE)}

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        return {
            **super().init_server(model, context),
            "m": common.zeros_of(model, self.shared),
            common.CENSUS: common.empty_census(),
        }

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        return {"m": common.zeros_of(model, self.shared), common.SIZE: common.report_size()}

    def broadcast(self, server: State) -> State:
        """Send the reported model, what leads from there to the cloud's, and the census."""
        msg = {**super().broadcast(server), common.CENSUS: server[common.CENSUS]}
        return {**msg, "m": server["m"]} if self.report == "average" else msg

    @staticmethod
    def start(msg: State) -> dict[str, Tensor]:
        """Return the cloud model, with the buffers of the average."""
        lead = msg.get("m", {})
        return {name: v + lead[name] if name in lead else v for name, v in msg["w"].items()}

    def omega(self, msg: State, silo: State, data: LocalData) -> float:
        mean = common.mean_size(msg[common.CENSUS])
        return common.size_of(silo[common.SIZE], self.weight(data)) / mean if mean else 1.0

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        return self.descend(model, msg, silo, data, context)[0]

    def descend(
        self,
        model: nn.Module,
        msg: State,
        silo: State,
        data: LocalData,
        context: RoundContext,
        shift: Tensors | None = None,
    ) -> tuple[LocalResult, dict[str, Tensor], int]:
        """Do the silo's half with a shift of the gradient; return it with w_k - w^t and the steps taken."""
        start = self.start(msg)
        tensor_maps.load_state(model, start)
        loss, pulled = (
            self.objective(model, msg, data, context),
            pull(model, silo["m"], self.alpha / self.omega(msg, silo, data)),
        )
        steps = data.sgd(model, loss, SgdOptions(penalty=pulled, shift=shift))
        moved, buffers = common.split(self.model_delta(model, {"w": start}), silo["m"])
        n = common.size_of(silo[common.SIZE], self.weight(data))
        bundle = {
            "delta": Part.of(moved),
            "buffers": Part.of(buffers, self.weight(data)),
            common.CENSUS: common.size_part(silo[common.SIZE], n),
            **self.extras(model, msg, data, context),
        }
        return (
            LocalResult(bundle, {"m": tensor_maps.add(silo["m"], moved), common.SIZE: common.report_size(n)}),
            moved,
            steps,
        )

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        if not (arrived := float(total["delta"].weight)) > 0:
            return server
        mean = dict(total["delta"].mean())  # read once: it is used three times
        m = tensor_maps.add(server["m"], mean, arrived / context.n_silos)
        step = {**tensor_maps.add(mean, server["m"] if self.report == "average" else m), **total["buffers"].mean()}
        after = super().merge(server, {**total, "delta": Part.of(step)}, context)
        return {**after, "m": m, common.CENSUS: common.total_size(server[common.CENSUS], total[common.CENSUS])}


def pull(model: nn.Module, m: Tensors, alpha: float) -> PenaltyFn:
    """Make alpha/2 ||w - (w^t - m)||^2, w^t being the parameters that `model` has now."""
    anchor = {name: p - m[name].to(p.device) for name, p in tensor_maps.trainable(model).items() if name in m}

    def penalty(current: nn.Module) -> Tensor:
        near = {name: p for name, p in current.named_parameters() if name in anchor}
        return 0.5 * alpha * tensor_maps.squared_distance(near, anchor)

    return penalty
