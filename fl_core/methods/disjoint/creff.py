"""CReFF: FedAvg, and a classifier retrained at the server on synthetic features.

Shang, Lu, Huang and Wang, "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with
Federated Features", IJCAI 2022, Algorithm 1 (gradient_matching.py: gradients g, distance D).

    G_k[c]  = mean of g over the silo's examples of class c          received body and psi, before local training
    G[c]    = mean over the silos that hold class c, each counted once
    V       <- V - lr grad sum_c D(mean g(V_c, c), G[c])             `feature_steps` times; V_c: m features of class c
    psi     <- a fresh linear head, trained on V

The models are averaged as in FedAvg, with heads of their own, from which the silos go on. The global model is the
averaged body under psi. The released code estimates G_k[c] by ten random batches of the class; here it is their
expectation, taken over all of its examples in one query. The first psi is the model's initial head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_core import rng, validate
from fl_core.methods.building_blocks import class_vectors
from fl_core.methods.building_blocks.gradient_matching import matched, outer_gradient, retrained
from fl_core.methods.building_blocks.prototypes import features_of
from fl_core.methods.fedavg import FedAvg
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, ClassSums, LocalResult, Part, RoundContext, State, Tensors

PART, HEAD = "class_gradients", "head"


@dataclass(frozen=True, kw_only=True)
class CReFF(FedAvg):
    """As FedAvg, except that the classifier is retrained on federated features.

    features: m, per class   feature_steps, feature_lr: gradient matching   epochs, lr, batch: of the classifier; the
    released code's batch is that of local training. Guarantees: the silos' models are FedAvg's, bit for bit.
    """

    name: ClassVar[str] = "creff"
    features: int = 100
    feature_steps: int = 100
    feature_lr: float = 0.1
    epochs: int = 300
    lr: float = 0.01
    batch: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.at_least("E-CFG-02", self.name, 0, feature_steps=self.feature_steps, epochs=self.epochs)
        validate.at_least("E-CFG-02", self.name, 1, features=self.features, batch=self.batch)
        validate.positive("E-CFG-02", self.name, feature_lr=self.feature_lr, lr=self.lr)

    @property
    def sends(self) -> tuple[str, ...]:
        """Name what goes up, part by part."""
        return ("delta", PART)

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Start with normally drawn features and the model's own head."""
        split, seed = features_of(model), class_vectors.seed_of(model)
        shape = (context.n_classes, self.features, split.feature_dim)
        v = torch.randn(shape, generator=rng.stream(seed, "federated features"))
        head = {name: value.cpu() for name, value in tensor_maps.copy_state(split.head).items()}
        return {
            **super().init_server(model, context),
            HEAD: head,
            "features": {"v": v},
            "seed": {"s": torch.tensor(float(seed))},
        }

    def broadcast(self, server: State) -> State:
        """Send the model and the retrained classifier."""
        return {"w": server["w"], HEAD: server[HEAD]}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        """Measure the gradients of the received classifier, then train as FedAvg does."""
        tensor_maps.load_state(model, msg["w"])
        gradients = self._gradients(model, msg[HEAD], data)
        outcome = super().local(model, msg, silo, data, context)
        return LocalResult({**outcome.bundle, PART: gradients}, outcome.state)

    @staticmethod
    def _gradients(model: nn.Module, head: Tensors, data: LocalData) -> Part:
        """Average g per class, in eval mode: Part((C, C, d + 1), weight 1 where the silo holds the class)."""
        split, device = features_of(model), next(model.parameters()).device
        there = {name: v.to(device) for name, v in head.items()}
        model.eval()

        def vectors(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                return outer_gradient(split.features(x), y, there).flatten(1)

        sums = data.sum(ClassSums(vectors, split.n_classes))
        held = sums["count"] > 0.5
        mean = sums["sum"] / sums["count"].clamp(min=1.0).unsqueeze(1)
        return Part.of({"g": mean.view(len(mean), split.n_classes, -1)}, held.float())

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        """Average models; move the features towards the mean gradients and retrain the classifier."""
        after = super().merge(server, total, context)
        known = total[PART].weight > 0
        if not bool(known.any()):
            return after
        target, head = total[PART].mean()["g"], server[HEAD]
        v = matched(server["features"]["v"], head, target, known, self.feature_steps, self.feature_lr)
        random = rng.stream(int(server["seed"]["s"]), "round", context.round, "classifier")
        psi = retrained(v, "bias" in head, self.epochs, self.lr, self.batch, random)
        return {**after, HEAD: psi, "features": {"v": v}}

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        """Put the retrained classifier on the averaged body."""
        tensor_maps.load_state(model, {**msg["w"], **_under_head(msg[HEAD])})
        return model

    def exported(self, server: State) -> Tensors:
        """Export the averaged body and the retrained classifier."""
        return {**server["w"], **_under_head(server[HEAD])}


def _under_head(head: Tensors) -> dict[str, Tensor]:
    return {f"head.{name}": v for name, v in head.items()}
