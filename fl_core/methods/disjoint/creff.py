"""CReFF: FedAvg, and a classifier retrained at the server on synthetic features.

Shang, Lu, Huang and Wang, "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with
Federated Features", IJCAI 2022, Algorithm 1 and equations 4 to 8.

    G_k[c]  = mean of g over the silo's examples of class c          received body and psi, before local training
    G[c]    = mean over the silos that hold class c, each counted once
    V       <- V - lr grad sum_c D(mean g(V_c, c), G[c])             `feature_steps` times; V_c: m features of class c
    psi     <- a fresh linear head, trained on V

The models are averaged as in FedAvg, including heads, with which the silos continue. The global model is the averaged
body with head psi. The released code estimates G_k[c] from ten random batches of the class; here it is the mean over
all of its examples, in one query. The first psi is the model's initial head.

Gradients g and distance D. For logits W z + b, p = softmax and the one-hot e_y,

    g(z, y) = (p - e_y) [z, 1]^T                                    a classifier's gradient, with one column for b
    D(A, B) = sum_j 1 - <A_j, B_j> / (|A_j| |B_j| + 1e-6)           over the rows of W's part, and b's as one row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot

from fl_core import rng
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.shared import class_vectors
from fl_core.methods.shared.feature_generator import one_thread
from fl_core.methods.shared.prototypes import features_of
from fl_core.types import tensor_maps
from fl_core.types.enums import Weighing
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Bundle, ClassSums, LocalResult, Part, PartRule, RoundContext, State, Tensors
from fl_core.validate import Count, Positive, PositiveCount

PART, HEAD = "class_gradients", "head"


@dataclass(frozen=True, kw_only=True)
class CReFF(FedAvg):
    """As FedAvg, except that the classifier is retrained on federated features.

    features: m, per class   feature_steps, feature_lr: gradient matching   epochs, lr, batch: of the classifier; the
    released code's batch is that of local training. Guarantees: the silos' models are FedAvg's, bit for bit.
    """

    name: ClassVar[str] = "creff"
    features: PositiveCount = 100
    feature_steps: Count = 100
    feature_lr: Positive = 0.1
    epochs: Count = 300
    lr: Positive = 0.01
    batch: PositiveCount = 128

    @property
    def sends(self) -> tuple[str, ...]:
        return ("delta", PART)

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Count each holder of a class once in its gradient."""
        return {**super().part_rules, PART: PartRule(Weighing.ONCE)}

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:
        return n_classes * self.features * feature_dim

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
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
        return {"w": server["w"], HEAD: server[HEAD]}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:
        tensor_maps.load_state(model, msg["w"])
        gradients = self._gradients(model, msg[HEAD], data)
        outcome = super().local(model, msg, silo, data, context)
        return LocalResult({**outcome.bundle, PART: gradients}, outcome.state)

    @staticmethod
    def _gradients(model: nn.Module, head: Tensors, data: LocalData) -> Part:
        """Average g per class, in eval mode: Part((C, C, d + 1), weight 1 where the silo holds the class)."""
        split, device = features_of(model), next(model.parameters()).device
        on_device = {name: v.to(device) for name, v in head.items()}
        model.eval()

        def vectors(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                return outer_gradient(split.features(x), y, on_device).flatten(1)

        sums = data.sum(ClassSums(vectors, split.n_classes))
        present = sums["count"] > 0.5
        mean = sums["sum"] / sums["count"].clamp(min=1.0).unsqueeze(1)
        return Part.of({"g": mean.view(len(mean), split.n_classes, -1)}, present.float())

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        after = super().merge(server, total, context)
        known = total[PART].weight > 0
        if not bool(known.any()):
            return after
        target, head = total[PART].mean()["g"], server[HEAD]
        v = matched(server["features"]["v"], head, target, known, self.feature_steps, self.feature_lr)
        random = rng.stream(int(server["seed"]["s"]), "round", context.round, "classifier")
        psi = train_head(v, "bias" in head, self.epochs, self.lr, self.batch, random)
        return {**after, HEAD: psi, "features": {"v": v}}

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        tensor_maps.load_state(model, {**msg["w"], **_under_head(msg[HEAD])})
        return model

    def exported(self, server: State) -> Tensors:
        return {**server["w"], **_under_head(server[HEAD])}


def _under_head(head: Tensors) -> dict[str, Tensor]:
    return {f"head.{name}": v for name, v in head.items()}


# ---- gradient matching -----------------------------------------------------------------------------------------------

EPS = 1e-6


def outer_gradient(z: Tensor, y: Tensor, head: Tensors) -> Tensor:
    """Return g of each example (n, C, d + 1), or (n, C, d) for a head without bias."""
    logits = linear(z, head["weight"], head.get("bias"))
    slope = torch.softmax(logits, 1) - one_hot(y, logits.shape[1]).to(logits)
    inputs = torch.cat([z, z.new_ones(len(z), 1)], 1) if "bias" in head else z
    return slope.unsqueeze(2) * inputs.unsqueeze(1)


def class_gradient(z: Tensor, head: Tensors) -> Tensor:
    """Return the mean g per class (C, C, d + 1) of features z (C, m, d), differentiable in z."""
    c, m, _ = z.shape
    y = torch.arange(c, device=z.device).repeat_interleave(m)
    flat = z.reshape(c * m, -1)
    logits = linear(flat, head["weight"], head.get("bias"))
    slope = (torch.softmax(logits, 1) - one_hot(y, c).to(logits)).view(c, m, c)
    inputs = torch.cat([z, z.new_ones(c, m, 1)], 2) if "bias" in head else z
    return torch.einsum("kmc,kmd->kcd", slope, inputs) / m


def distance(a: Tensor, b: Tensor, *, bias: bool) -> Tensor:
    """Return D for gradients (..., C, d + 1); bias: the last column is b's gradient, one row of its own.

    A row of zeros counts 1.
    """

    def rows(x: Tensor, y: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
        cosine_distance: Tensor = 1 - (x * y).sum(-1) / (norms + EPS)
        return cosine_distance

    if not bias:
        return rows(a, b).sum(-1)
    return rows(a[..., :-1], b[..., :-1]).sum(-1) + rows(a[..., -1], b[..., -1])


def matched(z: Tensor, head: Tensors, target: Tensor, known: Tensor, steps: int, lr: float) -> Tensor:
    """Move features z (C, m, d) by plain gradient steps towards the target gradients (C, C, d + 1) of known classes."""
    moved = z.clone().requires_grad_()
    with one_thread(), torch.enable_grad():
        for _ in range(steps):
            gap = distance(class_gradient(moved, head), target, bias="bias" in head)
            (slope,) = torch.autograd.grad(torch.where(known, gap, torch.zeros_like(gap)).sum(), moved)
            moved = (moved - lr * slope).detach().requires_grad_()
    return moved.detach()


def train_head(z: Tensor, bias: bool, epochs: int, lr: float, batch: int, random: torch.Generator) -> dict[str, Tensor]:
    """Train a fresh linear head on features z (C, m, d) by plain SGD, from a linear layer's even random start."""
    c, m, d = z.shape
    y, flat = torch.arange(c).repeat_interleave(m), z.reshape(c * m, d)
    shapes: dict[str, tuple[int, ...]] = {"weight": (c, d), **({"bias": (c,)} if bias else {})}
    head = {n: ((2 * torch.rand(s, generator=random) - 1) / d**0.5).requires_grad_() for n, s in shapes.items()}
    with one_thread(), torch.enable_grad():
        for _ in range(epochs):
            for index in torch.split(torch.randperm(c * m, generator=random), batch):
                loss = cross_entropy(linear(flat[index], head["weight"], head.get("bias")), y[index])
                slopes = torch.autograd.grad(loss, list(head.values()))
                with torch.no_grad():
                    for v, slope in zip(head.values(), slopes, strict=True):
                        v -= lr * slope
    return {name: v.detach() for name, v in head.items()}
