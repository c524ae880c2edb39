"""FedGELA: a globally fixed ETF classifier, locally adapted.

Fan, Zhang, Yao, Han, Zhang and Wang, "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data",
NeurIPS 2023, equations 4 and 5 and Algorithm 1 (the frame: class_vectors.py).

    W      = sqrt(E_W) M, M^T M = C/(C-1) (I - 11^T/C)     drawn once, the same everywhere, never trained
    phi_k  = C n_k^c / n_k                                 per class, from the silo's training labels
    min_w  CE(h^T W diag(phi_k)), h = f(x) / ||f(x)||      the features alone are trained, and averaged as in FedAvg

A missing class has logit 0 at its silo and stays in the softmax. sum_k p_k phi_k = 1 where the silos together hold
balanced classes: the adapted classifiers then average to W. The frame travels as a seed and its two dimensions.

The paper takes sqrt(E_W) from 100 to 1000 (method=fedgela_paper: 100), its code multiplies BatchNorm features by 1e5.
The default, 1, is the best of 1, 2, 3, 5, 10 and 30 on class-disjoint digits with a linear and a convolutional network
(benchmarks/comparison), where phi_k, up to C, is a scale already: 10 is far behind FedAvg. Without `adapt`
10 is the best with the linear network, and 1, 3 and 10 are alike with the convolutional one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods.fedavg import FedAvg
from fl_core.methods.shared import class_vectors
from fl_core.methods.shared.class_vectors import CLASSIFIER, SCALE, FixedHead, ScaledClassifier, adaptation
from fl_core.methods.shared.prototypes import features_of
from fl_core.types import tensor_maps
from fl_core.types.interfaces import LocalData
from fl_core.types.values import LocalResult, Losses, LossFn, RoundContext, SgdOptions, State, Tensors
from fl_core.validate import Positive

FRAME = "etf"
NORM = "norm"


@dataclass(frozen=True, kw_only=True)
class FedGELA(FedAvg):
    """As FedAvg, except that features are trained towards a fixed frame, weighed by what the silo holds.

    Attributes:
        etf: False trains and averages the model's own head ("LA")
        adapt: False takes phi_k = 1 ("FedGE")
        logit_scale: sqrt(E_W)
        feature_norm: "l2" (length 1) or "batch" (BatchNorm over each feature, as the code)
        mask_missing: personal models never choose a class that their silo lacks

    Guarantees: neither frame nor phi_k is sent by a silo; without etf and adapt it is FedAvg bit for bit.
    """

    name: ClassVar[str] = "fedgela"
    has_personal_model: ClassVar[bool] = True
    etf: bool = True
    adapt: bool = True
    logit_scale: Positive = 1.0
    feature_norm: Literal["l2", "batch"] = "l2"
    mask_missing: bool = False

    @property
    def private_form(self) -> Mapping[str, str | int]:
        return {"feature_norm": "l2"} if self._batch_norm else {}

    def shared(self, name: str) -> bool:
        return not self.etf or not name.startswith(("head.", CLASSIFIER, SCALE))

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        if not self.etf:
            return super().init_server(model, context)
        frame = {
            "seed": torch.tensor([float(class_vectors.seed_of(model))]),
            "shape": torch.tensor([float(context.n_classes), float(features_of(model).feature_dim)]),
        }
        return {"w": tensor_maps.select(tensor_maps.copy_state(self._net(model, frame)), self.shared), FRAME: frame}

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        """Keep the trained feature norm for the personal model; the one named "l2" has nothing to keep."""
        return (
            {NORM: tensor_maps.copy_state(nn.BatchNorm1d(features_of(model).feature_dim))} if self._batch_norm else {}
        )

    def broadcast(self, server: State) -> State:
        return dict(server)

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        net = self._received(model, msg)
        data.sgd(net, self.objective(net, msg, data, context), SgdOptions(only=self.shared))
        trained = tensor_maps.copy_state(net)
        kept = {NORM: {name: trained[f"{NORM}.{name}"].cpu() for name in silo[NORM]}} if self._batch_norm else silo
        return LocalResult(self.bundle(net, msg, data, context), kept)

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:
        if not self.adapt:
            return super().objective(model, msg, data, context)
        phi = adaptation(data.class_counts())

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            logits = model(x)
            return Losses(cross_entropy(logits * phi.to(logits), y, reduction="none"))

        return loss

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        return self._received(model, msg)

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        net = self._net(model, msg[FRAME]) if self.etf else model
        if self._batch_norm:
            tensor_maps.load_state(net, {f"{NORM}.{name}": v for name, v in silo[NORM].items()})
        counts = data.class_counts()
        phi = adaptation(counts) if self.adapt else torch.ones_like(counts)
        return ScaledClassifier(net, phi, counts <= 0 if self.mask_missing else None)

    def exported(self, server: State) -> Tensors:
        if not self.etf:
            return super().exported(server)
        return {**server["w"], CLASSIFIER: frame_of(server[FRAME]).float(), SCALE: torch.tensor([self.logit_scale])}

    @property
    def _batch_norm(self) -> bool:
        return self.etf and self.feature_norm == "batch"

    def _net(self, model: nn.Module, frame: Tensors) -> FixedHead:
        split = features_of(model)
        norm = nn.BatchNorm1d(split.feature_dim) if self._batch_norm else None
        # Of the model's own shape: with a class less, only a silo that has a record of that class would fail.
        rows = class_vectors.etf(split.n_classes, split.feature_dim, int(frame["seed"]))
        return FixedHead(split, rows, self.logit_scale, norm=norm)

    def _received(self, model: nn.Module, msg: State) -> nn.Module:
        net = self._net(model, msg[FRAME]) if self.etf else model
        tensor_maps.load_state(net, msg["w"])
        return net


def frame_of(frame: Tensors) -> Tensor:
    n_classes, d = (int(v) for v in frame["shape"])
    return class_vectors.etf(n_classes, d, int(frame["seed"]))
