"""FedMR: FedAvg with reshaped feature manifolds.

Fan, Yao, Han, Zhang, Wang and Zhang, "Federated Learning under Partially Class-Disjoint Data via Manifold
Reshaping", TMLR 2023, equations 3 to 5 and Algorithm 1 (prototypes: shared/prototypes.py).

    min_w  CE(w) + mu1 L_intra(w) + mu2 L_inter(w; g)          (5), by E epochs of SGD from w
    g_c    = sum_k p_k^c g_k^c, p_k^c = n_k^c / sum_k n_k^c    after training, in eval mode, over all of D_k
    w, g travel down and up; w as in FedAvg

If the paper is silent or contradicts its own lemma, the default follows its text, and the printed form is an option:
`paper_literal_std`, `inter`, `negatives`; `intra="code"` is the official code's loss, which has no L_inter.
The default `intra="mean"` is the paper's divided by d^2, so that mu1 does not depend on the number of features (ADR
0047). Its mu1 is the code's 0.01 at the paper's batch of 128 with two classes, which spreads the features of a class
as the paper says and costs nothing on Fashion-MNIST's P5C2 (benchmarks/comparison, benchmarks/gpu). method=fedmr_paper
and method=fedmr_code have the printed form and the code's with their weights.

Its two losses, on the features z (B, d) of one batch with labels y (B,), without a loop over classes; n_c counts class
c in the batch, V are the classes with n_c >= 2:

    zh      = (z - m_c) / sqrt(v_c + eps)                  per class and dimension, v_c unbiased
    M_c     = zh^T zh / (n_c - 1)                          (d, d), the class's correlation matrix
    L_intra = mean_{c in V} ||M_c||_F^2                                                                 (3)
    D(i, j) = (1/n_i) sum_{y_n = i} max(||z_n - g_i|| - ||z_n - g_j||, 0)
    L_inter = mean of D over the ordered pairs (i, j), i in the batch, j != i, both prototypes known     (4)

||zh^T zh||_F = ||zh zh^T||_F turns (3) into one Gram matrix of the batch under a same-class mask, which costs
B^2 d for all classes together and never makes a d x d matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from fl_core import rng
from fl_core.errors import ConfigError
from fl_core.methods.shared.prototypes import PROTOTYPES, PrototypeExchange, features_of
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Losses, LossFn, RoundContext, State
from fl_core.validate import Count, NonNegative


@dataclass(frozen=True, kw_only=True)
class FedMR(PrototypeExchange):
    """As FedAvg, except that features are decorrelated within classes and kept apart from other classes' prototypes.

    Attributes:
        mu1, mu2: weights of L_intra and L_inter, >= 0
        intra: how L_intra is scaled
        eps: added to variances; with the 1e-8 of the authors' code a feature that hardly varies is divided by its own
            rounding errors, and the last bit of an image decides some percent of an update
        warmup: rounds in which mu2 grows to its value
        lite: examples of a batch that L_inter is computed on, 0 for all (the paper's Lite 10, Lite 50)
        prototypes: False is "prototypes off": L_intra alone, nothing else travels
        inter_weighting: "batch" is equation 4; "example" averages each example over its own negatives

    Guarantees: mu1 = mu2 = 0 is FedAvg bit for bit; without prototypes the bundle is FedAvg's.
    """

    name: ClassVar[str] = "fedmr"
    without_prototypes: ClassVar[Mapping[str, str | bool] | None] = {"prototypes": False}
    mu1: NonNegative = 0.6
    mu2: NonNegative = 0.01
    intra: Literal["mean", "paper", "code"] = "mean"
    inter: Literal["own_sample", "paired_sample"] = "own_sample"
    inter_weighting: Literal["batch", "example"] = "batch"
    negatives: Literal["all", "observed"] = "all"
    no_margin: bool = False
    paper_literal_std: bool = False
    eps: NonNegative = 1e-4
    warmup: Count = 0
    lite: Count = 0
    lite_scope: Literal["inter", "both"] = "inter"
    prototypes: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_margin and self.inter == "paired_sample":
            raise ConfigError("E-CFG-02", "no_margin pairs nothing: expected inter=own_sample, found paired_sample")

    @property
    def uses_prototypes(self) -> bool:
        return self.prototypes and self.mu2 > 0

    @property
    def coupling(self) -> Coupling:
        """Say that the batch is mixed by L_intra, and by L_inter unless its terms depend on one example each."""
        separable = self.inter == "own_sample" and self.inter_weighting == "example"
        return Coupling.BATCH if self.mu1 > 0 or (self.uses_prototypes and not separable) else Coupling.EXAMPLE

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Make L_inter a loss of single examples, on all of a batch.

        Lite draws places of a batch from a stream that all batches share, and its terms grow with the batch: one
        example more would change what every other one adds, in this step and in all later ones.
        """
        mixed = self.uses_prototypes and self.inter == "own_sample" and self.inter_weighting == "batch"
        return {**({"inter_weighting": "example"} if mixed else {}), **({"lite": 0} if self.lite else {})}

    def _references(self, msg: State, data: LocalData) -> PrototypeTargets | None:
        """Choose what L_inter measures against; None while no prototype is known."""
        if not self.uses_prototypes or not bool((known := msg[PROTOTYPES]["known"] > 0).any()):
            return None
        negatives = data.class_counts() > 0 if self.negatives == "observed" else known
        return PrototypeTargets(msg[PROTOTYPES]["g"], known, negatives)

    def objective(self, model: nn.Module, msg: State, data: LocalData, context: RoundContext) -> LossFn:  # noqa: ARG002
        """Make equation 5 for one silo's round; L_inter is per example but for `paired_sample`."""
        t, ref = context.round, self._references(msg, data)
        mu2 = self.mu2 * (min(1.0, t / self.warmup) if self.warmup else 1.0)
        draw = rng.stream(context.seed, "round", t, "silo", context.silo, "lite")
        form = IntraVariant(self.intra == "code", self.paper_literal_std, self.eps, self.intra == "mean")

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
            split = features_of(model)
            z = split.features(x)
            per_example, coupled = cross_entropy(split.head(z), y, reduction="none"), z.new_zeros(())
            few = sample_batch(len(y), self.lite, draw)
            if self.mu1:
                seen = few if self.lite_scope == "both" else slice(None)
                coupled = coupled + self.mu1 * intra_loss(z[seen], y[seen], context.n_classes, form)
            if ref is not None and mu2 and self.inter == "paired_sample":
                coupled = coupled + mu2 * inter_paired(z[few], y[few], ref)
            elif ref is not None and mu2:
                equal = self.inter_weighting == "example"
                terms = inter_terms(z[few], y[few], ref, no_margin=self.no_margin, equal_examples=equal)
                per_example = per_example + mu2 * scatter(terms, few, len(y))
            return Losses(per_example, coupled if self.coupling is Coupling.BATCH else None)

        return loss


# ---- losses ----------------------------------------------------------------------------------------------------------


class IntraVariant(NamedTuple):
    """The form of (3).

    mean:        (3) / d^2, the mean squared correlation of two features, in [0, 1] whatever d: ADR 0047
    code:        the official code's loss, sum_{c in V} mean_{i != j} ((zh^T zh)_ij)^2 / sum_{c in V} n_c
    literal_std: M_c times n_c / (n_c - 1), the paper's biased variance beside its 1 / (n_c - 1)
    """

    code: bool = False
    literal_std: bool = False
    eps: float = 1e-8
    mean: bool = False


def intra_loss(z: Tensor, y: Tensor, n_classes: int, form: IntraVariant) -> Tensor:
    """Return L_intra, a scalar; a differentiable zero when no class has two examples in the batch."""
    zh, n = _standardised(z, y, n_classes, form.eps)
    pairs = n >= 2  # (B,): the example's class is in V
    same = (y.unsqueeze(0) == y.unsqueeze(1)) & pairs.unsqueeze(1)
    gram = (zh @ zh.T).square()  # (B, B): summed over one class, ||zh^T zh||_F^2
    if form.code:
        d = z.shape[1]
        diagonal = one_hot(y, n_classes).to(z.dtype).T @ (zh.square() * pairs.unsqueeze(1))  # (C, d)
        off = (gram * same).sum() - diagonal.square().sum()
        return off / (max(1, d * (d - 1)) * pairs.sum().clamp_min(1))
    scale = pairs / (n - 1).clamp_min(1).square()
    if form.literal_std:
        scale = scale * (n / (n - 1).clamp_min(1)).square()
    classes = (pairs / n).sum().round().clamp_min(1)  # |V|
    loss = (gram * (same * scale.unsqueeze(1))).sum() / classes
    return loss / z.shape[1] ** 2 if form.mean else loss


_LEAST_SPREAD = 1e-24
"""Variances up to this are rounding errors of equal features: with eps=0 their gradient is beyond float32."""


def _standardised(z: Tensor, y: Tensor, n_classes: int, eps: float) -> tuple[Tensor, Tensor]:
    """Standardise features within their class; also return n_c of each example's class (B,).

    The gradient flows through mean and variance. Features equal in all examples of a class become 0, with gradient 0.
    """
    member = one_hot(y, n_classes).to(z.dtype)  # (B, C)
    n = member.sum(0).clamp_min(1)  # (C,)
    centred = z - ((member.T @ z) / n.unsqueeze(1))[y]
    variance = (member.T @ centred.square()) / (n - 1).clamp_min(1).unsqueeze(1)
    spread = variance + eps
    varies = spread > _LEAST_SPREAD
    return centred * torch.where(varies, torch.where(varies, spread, 1.0).rsqrt(), 0.0)[y], n[y]


class PrototypeTargets(NamedTuple):
    """What (4) measures against.

    g: prototypes (C, d), detached; known (C,) bool; negatives (C,) bool: the classes that j may be
    """

    g: Tensor
    known: Tensor
    negatives: Tensor

    def to(self, device: torch.device) -> PrototypeTargets:
        return PrototypeTargets(*(v.to(device) for v in self))


def distances(z: Tensor, g: Tensor) -> Tensor:
    """Return ||z_n - g_j|| (B, C), with a finite gradient at 0."""
    return ((z.unsqueeze(1) - g.unsqueeze(0)).square().sum(2) + 1e-12).sqrt()


def inter_terms(z: Tensor, y: Tensor, ref: PrototypeTargets, *, no_margin: bool, equal_examples: bool) -> Tensor:
    """Return (B,) terms whose mean is L_inter; zeros where there is no pair.

    equal_examples: average each example over its own negatives, so that a term depends on its example alone.
    Otherwise the terms carry the weights B / (n_i #pairs) of equation 4, which depend on the labels of the batch.
    no_margin: D(i, j) = (1/n_i) sum ||z_n - g_i||.
    """
    ref = ref.to(z.device)
    away = distances(z, ref.g)  # (B, C)
    of_target = away.gather(1, y.unsqueeze(1))
    other = torch.arange(len(ref.g), device=y.device).unsqueeze(0) != y.unsqueeze(1)
    pair = other & (ref.known & ref.negatives).unsqueeze(0) & ref.known[y].unsqueeze(1)  # (B, C)
    hinge = of_target.expand_as(away) if no_margin else (of_target - away).clamp_min(0)
    terms = (hinge * pair).sum(1)
    pairs = pair.sum(1)  # J_i of each example's class
    if equal_examples:
        return terms / pairs.clamp_min(1)
    n = (y.unsqueeze(0) == y.unsqueeze(1)).sum(1)
    return terms * len(y) / (n * (pairs / n).sum().clamp_min(1e-6))


def inter_paired(z: Tensor, y: Tensor, ref: PrototypeTargets) -> Tensor:
    """Return L_inter as printed, a scalar: sample n of class i against g_i, sample n of class j against g_j.

    D(i, j) averages over the first min(n_i, n_j) examples of both classes in the order of the batch.
    """
    ref = ref.to(z.device)
    C, B = len(ref.g), len(y)
    member = one_hot(y, C)  # (B, C)
    rank = (member.cumsum(0) - 1).gather(1, y.unsqueeze(1)).squeeze(1)
    of_target = distances(z, ref.g).gather(1, y.unsqueeze(1)).squeeze(1)
    table = z.new_zeros(C, B).index_put((y, rank), of_target)  # row i: own distances of class i, then zeros
    n = member.sum(0)
    both = torch.minimum(n.unsqueeze(0), n.unsqueeze(1))  # (C, C): min(n_i, n_j)
    usable = ref.known.unsqueeze(1) & (ref.known & ref.negatives).unsqueeze(0) & (both > 0)
    usable = usable & ~torch.eye(C, dtype=torch.bool, device=y.device)
    counted = torch.arange(B, device=y.device) < both.unsqueeze(2)  # (C, C, B)
    hinge = (table.unsqueeze(1) - table.unsqueeze(0)).clamp_min(0) * counted
    return (hinge.sum(2) / both.clamp_min(1) * usable).sum() / usable.sum().clamp_min(1)


def sample_batch(size: int, lite: int, draw: torch.Generator) -> Tensor | slice:
    """Draw min(lite, size) positions of a batch uniformly without replacement; all of them when lite is 0."""
    return torch.randperm(size, generator=draw)[:lite] if 0 < lite < size else slice(None)


def scatter(terms: Tensor, picked: Tensor | slice, size: int) -> Tensor:
    """Put the terms of picked examples at their places in the batch, 0 elsewhere; the mean stays theirs."""
    if isinstance(picked, slice):
        return terms
    return terms.new_zeros(size).index_put((picked.to(terms.device),), terms * (size / len(picked)))
