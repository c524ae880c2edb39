"""FedCD: fine-grained prototypes, rebalanced and regularised local training, class-level aggregation of the head.

Long, Xue, Chu, Zhang, Wu, Zang and Du, "FedCD: A Classifier Debiased Federated Learning Framework for Non-IID Data",
ACM MM 2023, equations 1 to 15.

    theta, phi, P^k <- SGD on L                            P^k starts from P^g
    theta = sum_k p_k theta_k,   phi = ACLA(phi_k)
    P^g_j = sum_k n^k_j P^k_j / sum_k n^k_j                n^k_j: the silo's examples nearest to fine class j

    dcl = CE(z phi_k Wagg, c)
    gid = DKD(softmax(z phi^g Wagg) || softmax(z phi_k Wagg))
    L   = 1/N sum I (mu_t dcl + (1 - mu_t) hpc + lam gid) + gamma bpr,      mu_t = 1 - t/T

The sum of L is over D^{k+}: the silo's n_k examples with importance I = 1, and every global prototype, which stands in
for the other silos' examples, with I = the examples it stands for; N = n_k + sum I. In a mini-batch b all importances
of prototypes are multiplied by |b|/n_k, which keeps the ratio: of K equal silos each then sees its own examples with a
weight of 1/(K + 1). Shuffled among the examples instead, as algorithm 1 may be read, each prototype joins a batch with
chance |b|/n_k and its whole importance.

theta, phi, P^g and sum_k n^k_j go down; theta, phi, P^k and n^k_j go up. Before it trains,
each silo clusters those of its classes that have no fine classes yet, on the received model; in round 1 all of them.
Choices that the paper leaves open: aggregation by sums, assignment by the nearest P^g in every batch, prototypes in
every batch with their importance scaled to it (others: `importance`). No official code is known.

First clusters: k-means within each class, by sums over examples alone.

Local data only gives sums over examples. Lloyd's step is such a sum: per class and cluster, the
sum of the features and their number. Seeding is not: k-means++ picks examples. Here every restart draws its M
starting points of a class from a normal distribution with the mean and the variances of the class's features,
which are sums as well. All restarts of all classes share one query per step; the lowest inertia wins, class by class.

Losses. With psi(z, P) = exp(cos(z, P) / tau), t the fine class of an example of class c, and P^k the silo's prototypes:

    hpc = -log psi_t / (psi_t + alpha sum_{m != t} psi_(c,m) + (1 - alpha) sum_{j != c} sum_m psi_(j,m))
    bpr = mean over the classes of a batch of CE(their mean feature under phi^g Wagg, c)

Distillation from logits to logits, whole and decoupled: Zhao, Cui, Song, Qiu and Liang, "Decoupled Knowledge
Distillation", CVPR 2022. With p = softmax of the logits (B, C), c the true class, b = (p_c, 1 - p_c), q the other
probabilities divided by 1 - p_c, T the teacher and S the student, per example (B,):

    KD  = KL(p_T || p_S)  = KL(b_T || b_S) + (1 - p_T,c) KL(q_T || q_S)
    DKD =                   KL(b_T || b_S) + xi          KL(q_T || q_S)

Adaptive class-level aggregation: each fine class's row of the heads is averaged by how well silos recognise it.

Section 3.6. With P_j the prototype of fine class j and phi_k (CM, d) the head of silo k,

    s_k,j = softmax over CM of (P_j . phi_k)   at j
    v_k,j = exp(s_k,j) / sum_k exp(s_k,j)      shares are exponentiated, not logits: two weights differ by e at most
    phi_j = sum_k v_k,j phi_k,j

| mode     | P_j                   | weight of a row                                     | the server sees          |
|----------|-----------------------|-----------------------------------------------------|--------------------------|
| "server" | merged in this round  | v, made by the server                               | every silo's head        |
| "stale"  | received by the silo  | exp(s), made by the silo; its count if P_j is new   | the sum over silos       |
| "counts" | -                     | the silo's examples of the fine class               | the sum over silos       |
| "fedavg" | -                     | as the rest of the model                            | the sum over silos       |

"stale" equals the published rule where P_j stands still: the sum of exp(s) phi over that of exp(s) is its mean by v.
The rule with the merged P_j at the silos would need a second exchange in the round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, one_hot

from fl_core import rng, validate
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.shared import class_vectors
from fl_core.methods.shared.prototypes import PROTOTYPES, features_of
from fl_core.models.split_model import SplitModel
from fl_core.types import tensor_maps
from fl_core.types.enums import Capability, Coupling, Weighing
from fl_core.types.interfaces import LocalData
from fl_core.types.values import (
    Bundle,
    ClassSums,
    LocalResult,
    Losses,
    Part,
    PartRule,
    RoundContext,
    SgdOptions,
    State,
    Tensors,
)
from fl_core.validate import NonNegative, Positive, PositiveCount, below, bounded

AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda v: v.sum(2),
    "mean": lambda v: v.mean(2),
    "prob": lambda v: v.logsumexp(2),
}
COSINE_EPS = 1e-8


def class_logits(fine: Tensor, per_class: int, aggregation: str) -> Tensor:
    """Aggregate fine logits (B, CM) to class logits (B, C)."""
    return AGGREGATIONS[aggregation](fine.reshape(len(fine), fine.shape[1] // per_class, per_class))


def by_class(rows: Tensor, per_class: int) -> Tensor:
    """View rows of fine classes (CM, ...) as (C, M, ...)."""
    return rows.reshape(-1, per_class, *rows.shape[1:])


class TrainablePrototypes(nn.Module):
    """Trainable prototypes (CM, d)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, z: Tensor) -> Tensor:
        """Return the cosines (B, CM) with features z (B, d); lengths below 1e-8 count as 1e-8."""
        return normalize(z, dim=1, eps=COSINE_EPS) @ normalize(self.weight, dim=1, eps=COSINE_EPS).T


class FineModel(nn.Module):
    """Body and projection of a model, shared with it, under a head over fine classes; the model's head is left aside.

    The head's weights are not set here: write the received ones. prototypes: only where they are trained.
    """

    def __init__(self, model: SplitModel, per_class: int, aggregation: str, prototypes: Tensor | None = None) -> None:
        super().__init__()
        device = next(model.parameters()).device
        self.body, self.projection = model.body, model.projection
        fine = model.n_classes * per_class
        self.fine: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]  # no draw of torch's own generator
            nn.Linear, model.feature_dim, fine, bias=False, device=device
        )
        if prototypes is not None:
            self.prototypes = TrainablePrototypes(prototypes.to(device))
        self.feature_dim, self.n_classes = model.feature_dim, model.n_classes
        self._form = (per_class, aggregation)

    def features(self, x: Tensor) -> Tensor:
        z: Tensor = self.projection(self.body(x))
        return z

    def classify(self, z: Tensor) -> Tensor:
        """Return the class logits (B, C) of features (B, d)."""
        return class_logits(self.fine(z), *self._form)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class Anchors(NamedTuple):
    """The points that distinguish fine classes in one round: points (CM, d), and which of them exist (CM,)."""

    points: Tensor
    known: Tensor

    def nearest(self, z: Tensor, y: Tensor, per_class: int) -> Tensor:
        """Return the fine class (B,) in 0..M-1 of largest cosine within the class of each example."""
        points = by_class(normalize(self.points, dim=1, eps=COSINE_EPS).to(z), per_class)[y]
        cosine = torch.einsum("bd,bmd->bm", normalize(z.detach(), dim=1, eps=COSINE_EPS), points)
        present = by_class(self.known.to(z.device), per_class)[y]
        return cosine.masked_fill(~present, float("-inf")).argmax(1)


def unknown(fine: int, d: int) -> dict[str, Tensor]:
    return {"p": torch.zeros(fine, d), "known": torch.zeros(fine), "count": torch.zeros(fine)}


def census(model: FineModel, anchors: Anchors, data: LocalData, per_class: int) -> tuple[Tensor, Tensor]:
    """Sum features (CM, d) and count examples (CM,) per fine class, in eval mode: one joint query."""
    model.eval()

    def placed(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = model.features(x)
        return by_fine_class(z, anchors.nearest(z, y, per_class), per_class)

    sums = data.sum(ClassSums(placed, model.n_classes))["sum"].reshape(model.n_classes * per_class, -1)
    return sums[:, :-1], sums[:, -1]


def by_fine_class(z: Tensor, slot: Tensor, slots: int) -> Tensor:
    """Place (z, 1) of each example in its slot: (B, d) to (B, slots (d + 1)), so that sums tell slots apart."""
    rows = z.new_zeros(len(z), slots, z.shape[1] + 1)
    rows[torch.arange(len(z), device=z.device), slot] = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
    return rows.flatten(1)


def merged(state: Tensors, part: Part, per_class: int) -> dict[str, Tensor]:
    """Move each prototype by its mean offset. Rows of weight 0 stay, and so do counts of classes without a report."""
    weight = part.weight.float()
    reported = by_class(weight, per_class).sum(1).gt(0).repeat_interleave(per_class)
    return {
        "p": state["p"] + part.mean()["p"],
        "known": torch.maximum(state["known"], (weight > 0).float()),
        "count": torch.where(reported, weight, state["count"]),
    }


PERSONAL_HEAD = "personal head"


@dataclass(frozen=True, kw_only=True)
class FedCD(FedAvg):
    """As FedAvg, except that classes are split, prototypes rebalance local training and the head is merged by classes.

    Attributes:
        fine: M
        lam, gamma: weights of gid and bpr
        alpha: weight of the own class's other prototypes
        tau: temperature
        xi: weight of the other classes in distillation
        aggregation: "sum", "mean" or "prob"
        distill: "dkd" or "kd"
        acla: "server", "stale", "counts" or "fedavg"
        hpc: False takes mean features as prototypes, and mu_t = 1
        importance: how prototypes join a batch: "scaled" to it, "unscaled", "shuffle" (as items of the silo's data) or
            "none" (not at all)
        zero_based: mu of the first round is 1
        restarts, steps: k-means

    Guarantees: no round reads what an earlier one left at its silo; the trained head is kept for the personal model.
    """

    name: ClassVar[str] = "fedcd"
    fine: PositiveCount = 3
    lam: NonNegative = 0.1
    gamma: NonNegative = 0.1
    alpha: Annotated[NonNegative, bounded(below, 0.5)] = 0.1
    tau: Positive = 1.0
    xi: NonNegative = 0.5
    aggregation: Literal["sum", "mean", "prob"] = "sum"
    distill: Literal["dkd", "kd"] = "dkd"
    acla: str = "server"
    hpc: bool = True
    importance: Literal["scaled", "unscaled", "shuffle", "none"] = "scaled"
    zero_based: bool = False
    restarts: PositiveCount = 10
    steps: PositiveCount = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acla == "two_phase":
            raise ConfigError(
                "E-CFG-02",
                "fedcd.acla: two_phase needs two exchanges per round, but a round has one: use server (the same "
                "rule, made by the server) or stale (under secure aggregation)",
            )
        validate.one_of("E-CFG-02", self.name, ACLA_MODES, acla=self.acla)

    @property
    def unsummed_parts(self) -> frozenset[str]:
        return frozenset({HEAD_PART}) if self.acla == "server" else frozenset()

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        each = (
            {Capability.SECURE_AGGREGATION: "set method.acla=stale, which needs only sums"}
            if self.unsummed_parts
            else {}
        )
        remedy = (
            "it needs many queries on the data and exact counts, which would exceed a privacy budget: use fednh, "
            "fedproc or fedmr"
        )
        return {**each, Capability.DIFFERENTIAL_PRIVACY: remedy}

    @property
    def coupling(self) -> Coupling:
        return Coupling.BATCH if self.gamma or self.importance in ("unscaled", "shuffle") else Coupling.EXAMPLE

    @property
    def sends(self) -> tuple[str, ...]:
        return ("delta", PROTOTYPES) if self.acla == "fedavg" else ("delta", HEAD_PART, PROTOTYPES)

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Weigh the head as its rule does."""
        return {**super().part_rules, HEAD_PART: head_rule(self.acla)}

    def shared(self, name: str) -> bool:
        return not name.startswith(("head.", "prototypes.")) and (name != HEAD or self.acla == "fedavg")

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:
        return 2 * n_classes * self.fine * feature_dim

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        split = features_of(model)
        rows, d = context.n_classes * self.fine, split.feature_dim
        head = torch.rand(rows, d, generator=rng.stream(class_vectors.seed_of(model), "fine head"))
        w = tensor_maps.select(
            tensor_maps.copy_state(FineModel(split, self.fine, self.aggregation)),
            lambda name: name != HEAD,
        )
        return {
            "w": {**w, HEAD: (2 * head - 1) / d**0.5},
            PROTOTYPES: unknown(rows, d),
        }

    def broadcast(self, server: State) -> State:
        return dict(server)

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:  # noqa: ARG002
        anchors = self._anchors(self._received(model, msg), msg[PROTOTYPES], data, context)
        net = self._received(model, msg, anchors.points)
        objective = self._objective(msg, anchors, data, context)
        penalty = objective.penalty if objective.n and bool(objective.count.any()) else None
        data.sgd(
            net, objective.loss, SgdOptions(penalty=penalty, only=lambda name: self.hpc or name != "prototypes.weight")
        )
        sums, counts = census(net, anchors, data, self.fine)
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
            bundle[HEAD_PART] = outgoing_head(self.acla, moved[HEAD], trained[HEAD], known, counts)
        return LocalResult(bundle, {PERSONAL_HEAD: {HEAD: trained[HEAD]}})

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:  # noqa: ARG002
        w, after = server["w"], merged(server[PROTOTYPES], total[PROTOTYPES], self.fine)
        w = {**w, **tensor_maps.add(tensor_maps.select(w, self.shared), total["delta"].mean())}
        if self.acla != "fedavg":
            w[HEAD] = merged_head(
                self.acla,
                w[HEAD],
                total[HEAD_PART],
                after["p"],
                after["known"],
            )
        return {**server, "w": w, PROTOTYPES: after}

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        return self._received(model, msg)

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:  # noqa: ARG002
        """Put the head that was trained on the trained body; before a silo's first round the received one."""
        net = FineModel(features_of(model), self.fine, self.aggregation)
        head = silo[PERSONAL_HEAD] if PERSONAL_HEAD in silo else {HEAD: msg["w"][HEAD]}
        tensor_maps.load_state(net, head)
        return net

    def _received(self, model: nn.Module, msg: State, points: Tensor | None = None) -> FineModel:
        net = FineModel(features_of(model), self.fine, self.aggregation, points)
        tensor_maps.load_state(net, msg["w"])
        return net

    def _anchors(self, net: FineModel, state: Tensors, data: LocalData, context: RoundContext) -> Anchors:
        known = state["known"] > 0
        of_class = by_class(known, self.fine).any(1)
        new = (data.class_counts().cpu() > 0) & ~of_class
        if not bool(new.any()):
            return Anchors(state["p"], known)
        net.eval()
        draw = rng.stream(context.seed, "round", context.round, "silo", context.silo, "clusters")
        centers, _ = clusters(
            torch.no_grad()(net.features), data, net.n_classes, self.fine, draw, self.restarts, self.steps
        )
        rows = new.repeat_interleave(self.fine)
        return Anchors(torch.where(rows.unsqueeze(1), centers.flatten(0, 1), state["p"]), known | rows)

    def _objective(self, msg: State, anchors: Anchors, data: LocalData, context: RoundContext) -> Objective:
        state = msg[PROTOTYPES]
        mu = decay(context.round, context.rounds, zero_based=self.zero_based) if self.hpc else 1.0
        n = 0.0 if self.importance in ("unscaled", "shuffle") else data.size()
        count = state["count"] * state["known"] * float(self.importance != "none")
        drawn = self._shuffled(count, data, context) if self.importance == "shuffle" else None
        return Objective(self, mu, msg["w"][HEAD], anchors, state["p"], count, n, drawn)

    def _shuffled(self, count: Tensor, data: LocalData, context: RoundContext) -> Callable[[int], Tensor]:
        draw = rng.stream(context.seed, "round", context.round, "silo", context.silo, "prototypes")
        return lambda batch: count * (torch.rand(len(count), generator=draw) < batch / data.size())


@dataclass(frozen=True)
class Objective:
    """FedCD's loss of one silo's round.

    Attributes:
        options: M and the weights above
        mu: of this round
        phi: the received head (CM, d)
        anchors: what examples are assigned by, P^k at the start of the round
        prototypes: the received ones (CM, d) and count: what they stand for (CM,), 0 for unknown ones
        n: the silo's examples; 0 takes importances as they are in every batch, whatever its size
        drawn: with n = 0, the importances (CM,) that join a batch of so many examples; all of them without it
    """

    options: FedCD
    mu: float
    phi: Tensor
    anchors: Anchors
    prototypes: Tensor
    count: Tensor
    n: float
    drawn: Callable[[int], Tensor] | None = None

    def example_losses(self, model: FineModel, z: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """Return mu dcl + (1 - mu) hpc + lam gid of each row (B,); own: fine classes in 0..CM-1."""
        logits = model.classify(z)
        total = self.mu * cross_entropy(logits, y, reduction="none")
        if self.mu < 1.0:
            cosine = model.prototypes(z)
            total = total + (1 - self.mu) * hpc(
                cosine, target, self.options.fine, self.anchors.known, self.options.alpha, self.options.tau
            )
        if self.options.lam:
            with torch.no_grad():
                global_logits = class_logits(linear(z, self.phi.to(z)), self.options.fine, self.options.aggregation)
            distillation = (
                kd(global_logits, logits)
                if self.options.distill == "kd"
                else dkd(global_logits, logits, y, self.options.xi)
            )
            total = total + self.options.lam * distillation
        return total

    def share(self, batch: int, joining: Tensor | None = None) -> float:
        """Return what the silo's own examples count in the mean over D^{k+}, or over a batch and what joins it."""
        examples = self.n or float(batch)
        return examples / (examples + float((self.count if joining is None else joining).sum()))

    def prototype_loss(self, model: nn.Module, count: Tensor) -> Tensor:
        """Return the mean loss () of the prototypes, weighed by importances (CM,): no example enters it."""
        known = count.nonzero().squeeze(1)
        z, weight = self.prototypes[known].to(next(model.parameters())), count[known]
        own = known.to(z.device)
        rows = self.example_losses(cast(FineModel, model), z, own // self.options.fine, own)
        return (rows * (weight / weight.sum()).to(z)).sum()

    def penalty(self, model: nn.Module) -> Tensor:
        """Return the prototypes' share of the loss."""
        return (1.0 - self.share(0)) * self.prototype_loss(model, self.count)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """Return the examples' share of the loss, and what mixes the batch."""
        fine = cast(FineModel, model)
        z = fine.features(x)
        fine_class = self.options.fine * y + self.anchors.nearest(z, y, self.options.fine)
        joining = self.drawn(len(y)) if self.drawn else self.count
        share, coupled = self.share(len(y), joining), z.new_zeros(())
        if self.options.gamma:
            coupled = coupled + self.options.gamma * bpr(
                z, y, self.phi.to(z), self.options.fine, self.options.aggregation, fine.n_classes
            )
        if not self.n and bool(joining.any()):
            coupled = coupled + (1.0 - share) * self.prototype_loss(model, joining)
        mixed = self.options.coupling is Coupling.BATCH
        return Losses(share * self.example_losses(fine, z, y, fine_class), coupled if mixed else None)


# ---- first clusters: k-means within each class -----------------------------------------------------------------------

NOISE = 1e-3
"""Length of the noise on a repeated centroid, relative to the centroid's."""


def clusters(
    features: Callable[[Tensor], Tensor],
    data: LocalData,
    n_classes: int,
    per_class: int,
    draw: torch.Generator,
    restarts: int,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Return centroids (C, M, d) and the examples per class (C,), after 1 + `steps` queries.

    Clusters of a class are ordered by decreasing size. Where a class has fewer clusters than M, for want of examples,
    the others repeat in order, with noise; a class without examples has centroids of 0.
    """
    mean, deviation, count = _moments(features, data, n_classes)
    shape = (restarts, n_classes, per_class, mean.shape[1])
    points = mean.unsqueeze(1) + deviation.unsqueeze(1) * torch.randn(shape, generator=draw)
    size, inertia = torch.zeros(shape[:3]), torch.zeros(shape[:2])
    for _ in range(steps):
        points, size, inertia = _lloyd(features, data, points)
    best = inertia.argmin(0)
    rows = torch.arange(n_classes)
    return torch.stack([_filled(p, s, draw) for p, s in zip(points[best, rows], size[best, rows], strict=True)]), count


def _moments(features: Callable[[Tensor], Tensor], data: LocalData, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and standard deviation of the features per class, (C, d) each, and the examples per class (C,)."""

    def powers(x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
        z = features(x)
        return torch.cat([z, z.square()], dim=1)

    sums = data.sum(ClassSums(powers, n_classes))
    mean, square = (sums["sum"] / sums["count"].clamp(min=1.0).unsqueeze(1)).chunk(2, dim=1)
    return mean, (square - mean.square()).clamp(min=0.0).sqrt(), sums["count"]


def _lloyd(features: Callable[[Tensor], Tensor], data: LocalData, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Assign all examples and average: new points (R, C, M, d), sizes (R, C, M) and the inertia before (R, C)."""
    restarts, n_classes, per_class, d = points.shape

    def placed(x: Tensor, y: Tensor) -> Tensor:
        z = features(x)
        near = (points.to(z)[:, y] - z.unsqueeze(1)).square().sum(3)  # (R, B, M)
        least = near.min(2)
        return torch.cat([*(by_fine_class(z, slot, per_class) for slot in least.indices), least.values.T], dim=1)

    sums = data.sum(ClassSums(placed, n_classes))["sum"]
    slots, inertia = sums[:, :-restarts], sums[:, -restarts:].T
    slots = slots.view(n_classes, restarts, per_class, d + 1).transpose(0, 1)
    size = slots[..., -1]
    moved = slots[..., :-1] / size.clamp(min=1.0).unsqueeze(3)
    return torch.where(size.unsqueeze(3) > 0, moved, points), size, inertia


def _filled(points: Tensor, size: Tensor, draw: torch.Generator) -> Tensor:
    """Order one class's clusters (M, d) by size and let empty ones repeat the others."""
    order = torch.sort(size, descending=True, stable=True).indices
    points, n = points[order], int((size > 0).sum())
    if not n:
        return torch.zeros_like(points)
    repeated = points[torch.arange(len(points)) % n]
    noise = torch.randn(points.shape, generator=draw) * repeated.norm(dim=1, keepdim=True) / points.shape[1] ** 0.5
    return torch.where(torch.arange(len(points)).unsqueeze(1) < n, points, repeated + NOISE * noise)


# ---- losses ----------------------------------------------------------------------------------------------------------

MIN_REST = 1e-12


def hpc(cosine: Tensor, target: Tensor, per_class: int, present: Tensor, alpha: float, tau: float) -> Tensor:
    """Return the contrast of each row (B,): cosines (B, CM) with P^k, own fine classes (B,), existing ones (CM,)."""
    columns = torch.arange(cosine.shape[1], device=cosine.device)
    same = (columns // per_class) == (target // per_class).unsqueeze(1)
    weight = torch.where(same, alpha, 1.0 - alpha).masked_fill(columns == target.unsqueeze(1), 1.0)
    scaled = cosine / tau
    log_weight = weight.to(scaled).masked_fill(~present.to(scaled.device), 0.0).log()
    return (scaled + log_weight).logsumexp(1) - scaled.gather(1, target.unsqueeze(1)).squeeze(1)


def bpr(z: Tensor, y: Tensor, phi: Tensor, per_class: int, aggregation: str, n_classes: int) -> Tensor:
    """Return the mean loss () of the batch's class means under the frozen global head phi (CM, d)."""
    member = one_hot(y, n_classes).to(z)
    count = member.sum(0)
    present = count.nonzero().squeeze(1)
    means = (member.T @ z)[present] / count[present].unsqueeze(1)
    return cross_entropy(class_logits(linear(means, phi), per_class, aggregation), present)


def decay(t: int, rounds: int, *, zero_based: bool) -> float:
    """Return mu_t of round t (0-based): 1 - (t + 1)/T, or 1 - t/T."""
    return 1.0 - (t if zero_based else t + 1) / rounds


def kd(teacher: Tensor, student: Tensor) -> Tensor:
    log_t, log_s = teacher.log_softmax(1), student.log_softmax(1)
    return (log_t.exp() * (log_t - log_s)).sum(1)


def target(teacher: Tensor, student: Tensor, y: Tensor) -> Tensor:
    """Return KL(b_T || b_S): true class against all others."""
    labels = y.unsqueeze(1)
    log_t, log_s = (logits.log_softmax(1).gather(1, labels).squeeze(1) for logits in (teacher, student))
    rest_t, rest_s = ((1.0 - log_p.exp()).clamp(min=MIN_REST) for log_p in (log_t, log_s))
    return log_t.exp() * (log_t - log_s) + rest_t * (rest_t.log() - rest_s.log())


def non_target_kd(teacher: Tensor, student: Tensor, y: Tensor) -> Tensor:
    """Return KL(q_T || q_S) among the other classes; 0 where there is only one."""
    is_target = torch.zeros_like(teacher, dtype=torch.bool).scatter_(1, y.unsqueeze(1), value=True)
    log_t, log_s = (logits.masked_fill(is_target, float("-inf")).log_softmax(1) for logits in (teacher, student))
    log_ratio = (log_t - log_s).masked_fill(is_target, 0.0)  # -inf minus -inf at the true class, which has no share
    return (log_t.exp() * log_ratio).sum(1)


def dkd(teacher: Tensor, student: Tensor, y: Tensor, xi: float) -> Tensor:
    return target(teacher, student, y) + xi * non_target_kd(teacher, student, y)


# ---- adaptive class-level aggregation (section 3.6) ------------------------------------------------------------------

ACLA_MODES = ("server", "stale", "counts", "fedavg")
HEAD_PART = "fine"
HEAD = "fine.weight"


def head_rule(mode: str) -> PartRule:
    """Return the meaning of a silo's weight of its head, or of a row of it."""
    by_mode = {"server": Weighing.ONCE, "stale": Weighing.QUALITY}
    return PartRule(by_mode.get(mode, Weighing.EXAMPLES))


def head_shares(p: Tensor, phi: Tensor) -> Tensor:
    """Return s (CM,) of one head (CM, d) under prototypes (CM, d)."""
    return (p.double() @ phi.double().T).softmax(1).diagonal()


def head_weights(s: Tensor) -> Tensor:
    """Return v (n, CM) from the silos' shares s (n, CM)."""
    return s.softmax(0)


def outgoing_head(mode: str, moved: Tensor, phi: Tensor, received: Anchors, counts: Tensor) -> Part:
    """Weigh what training changed in a head (CM, d); phi is the trained head, counts (CM,) the silo's examples."""
    if mode == "server":
        return Part.of({HEAD: moved})
    weight = counts
    if mode == "stale":
        weight = torch.where(received.known, head_shares(received.points, phi).exp().float(), counts)
    return Part.of({HEAD: moved}, weight)


def merged_head(mode: str, phi: Tensor, part: Part, p: Tensor, known: Tensor) -> Tensor:
    """Return the head (CM, d) after a round; rows of weight 0, or under "server" without a prototype, stay.

    Under "server" the part holds one head per silo, (n, CM, d), and p, known are the merged prototypes.
    """
    if mode != "server":
        return phi + part.mean()[HEAD]
    moved = part.total[HEAD].double()
    if not len(moved):
        return phi
    v = head_weights(torch.stack([head_shares(p, phi.double() + change) for change in moved]))
    after = phi + (v.unsqueeze(2) * moved).sum(0).float()
    return torch.where(known.unsqueeze(1) > 0, after, phi)
