"""FedCD: fine-grained prototypes, rebalanced and regularised local training, class-level aggregation of the head.

Long, Xue, Chu, Zhang, Wu, Zang and Du, "FedCD: A Classifier Debiased Federated Learning Framework for Non-IID Data",
ACM MM 2023, equations 1 to 15 (losses: fedcd_loss.py, fine classes: fine_grained.py, head: acla.py, first clusters:
kmeans.py).

    theta, phi, P^k <- SGD on L                            P^k starts from P^g
    theta = sum_k p_k theta_k,   phi = ACLA(phi_k)
    P^g_j = sum_k n^k_j P^k_j / sum_k n^k_j                n^k_j: the silo's examples nearest to fine class j

theta, phi, P^g and sum_k n^k_j go down; theta, phi, P^k and n^k_j go up. A class of which no fine class is known yet is
clustered by each silo that holds it, on the received model, before it trains: in the first round all of them.
What the paper leaves open: aggregation by sums, assignment by the nearest P^g anew in every batch, prototypes in every
batch with their importance scaled to it (others: `importance`). No official code is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_core import rng
from fl_core.methods.building_blocks import class_level_aggregation, class_vectors, fine_grained
from fl_core.methods.building_blocks.fine_grained import Anchors, FineModel
from fl_core.methods.building_blocks.kmeans import clusters
from fl_core.methods.building_blocks.prototypes import PROTOTYPES, features_of
from fl_core.methods.disjoint.fedcd.losses import Objective, decay
from fl_core.methods.disjoint.fedcd.options import FedCDOptions
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, LocalResult, Part, RoundContext, SgdOptions, State, Tensors


@dataclass(frozen=True, kw_only=True)
class FedCD(FedCDOptions):
    """As FedAvg, except that classes are split, prototypes rebalance local training and the head is merged by classes.

    The options: fedcd_options.py. Guarantees: nothing is kept at a silo between rounds.
    """

    name: ClassVar[str] = "fedcd"

    def shared(self, name: str) -> bool:
        """Average what makes features, and the head where it has no rule of its own."""
        return not name.startswith(("head.", "prototypes.")) and (
            name != class_level_aggregation.HEAD or self.acla == "fedavg"
        )

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Start with an evenly random head, as a linear layer has, and without prototypes."""
        split = features_of(model)
        rows, d = context.n_classes * self.fine, split.feature_dim
        head = torch.rand(rows, d, generator=rng.stream(class_vectors.seed_of(model), "fine head"))
        w = tensor_maps.select(
            tensor_maps.copy_state(FineModel(split, self.fine, self.aggregation)),
            lambda name: name != class_level_aggregation.HEAD,
        )
        return {
            "w": {**w, class_level_aggregation.HEAD: (2 * head - 1) / d**0.5},
            PROTOTYPES: fine_grained.unknown(rows, d),
        }

    def broadcast(self, server: State) -> State:
        """Send the model, the prototypes and what they stand for."""
        return dict(server)

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        """Find the silo's anchors, train everything at once, count again and send."""
        anchors = self._anchors(self._received(model, msg), msg[PROTOTYPES], data, context)
        net = self._received(model, msg, anchors.points)
        objective = self._objective(msg, anchors, data, context)
        penalty = objective.penalty if objective.n and bool(objective.count.any()) else None
        data.sgd(
            net, objective.loss, SgdOptions(penalty=penalty, only=lambda name: self.hpc or name != "prototypes.weight")
        )
        sums, counts = fine_grained.census(net, anchors, data, self.fine)
        trained = {name: v.cpu() for name, v in tensor_maps.copy_state(net).items()}
        moved = tensor_maps.sub(tensor_maps.select(trained, msg["w"].__contains__), msg["w"])
        points = trained["prototypes.weight"] if self.hpc else sums / counts.clamp(min=1.0).unsqueeze(1)
        weight = counts if context.prototypes else torch.zeros_like(counts)
        bundle = {
            "delta": Part.of(tensor_maps.select(moved, self.shared), self.weight(data)),
            PROTOTYPES: Part.of({"p": points - msg[PROTOTYPES]["p"]}, weight),
        }
        if self.acla != "fedavg":
            known = Anchors(msg[PROTOTYPES]["p"], msg[PROTOTYPES]["known"] > 0)
            bundle[class_level_aggregation.PART] = class_level_aggregation.outgoing(
                self.acla, moved[class_level_aggregation.HEAD], trained[class_level_aggregation.HEAD], known, counts
            )
        return LocalResult(bundle, silo)

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:  # noqa: ARG002
        """Average features by examples, prototypes by their counts, the head by its rule."""
        w, after = server["w"], fine_grained.merged(server[PROTOTYPES], total[PROTOTYPES], self.fine)
        w = {**w, **tensor_maps.add(tensor_maps.select(w, self.shared), total["delta"].mean())}
        if self.acla != "fedavg":
            w[class_level_aggregation.HEAD] = class_level_aggregation.merged(
                self.acla,
                w[class_level_aggregation.HEAD],
                total[class_level_aggregation.PART],
                after["p"],
                after["known"],
            )
        return {**server, "w": w, PROTOTYPES: after}

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        """Classify with the fine head."""
        return self._received(model, msg)

    def _received(self, model: nn.Module, msg: State, points: Tensor | None = None) -> FineModel:
        net = FineModel(features_of(model), self.fine, self.aggregation, points)
        tensor_maps.load_state(net, msg["w"])
        return net

    def _anchors(self, net: FineModel, state: Tensors, data: LocalData, context: RoundContext) -> Anchors:
        """Take the known prototypes; cluster the silo's classes that have none."""
        known = state["known"] > 0
        of_class = fine_grained.by_class(known, self.fine).any(1)
        new = (data.class_counts().cpu() > 0) & ~of_class
        if not bool(new.any()):
            return Anchors(state["p"], known)
        net.eval()
        draw = rng.stream(context.seed, "round", context.round, "silo", context.silo, "clusters")
        found, _ = clusters(
            torch.no_grad()(net.features), data, net.n_classes, self.fine, draw, self.restarts, self.steps
        )
        rows = new.repeat_interleave(self.fine)
        return Anchors(torch.where(rows.unsqueeze(1), found.flatten(0, 1), state["p"]), known | rows)

    def _objective(self, msg: State, anchors: Anchors, data: LocalData, context: RoundContext) -> Objective:
        state = msg[PROTOTYPES]
        mu = decay(context.round, context.rounds, zero_based=self.zero_based) if self.hpc else 1.0
        n = 0.0 if self.importance in ("unscaled", "shuffle") else data.size()
        count = state["count"] * state["known"] * float(self.importance != "none")
        drawn = self._shuffled(count, data, context) if self.importance == "shuffle" else None
        return Objective(self, mu, msg["w"][class_level_aggregation.HEAD], anchors, state["p"], count, n, drawn)

    def _shuffled(self, count: Tensor, data: LocalData, context: RoundContext) -> Callable[[int], Tensor]:
        """Draw which prototypes join a batch: each one batch of an epoch on average."""
        draw = rng.stream(context.seed, "round", context.round, "silo", context.silo, "prototypes")
        return lambda batch: count * (torch.rand(len(count), generator=draw) < batch / data.size())
