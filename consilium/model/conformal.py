"""Calibrated probabilities (temperature scaling), and sets of classes with guaranteed coverage (conformal prediction).

Temperature (Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017): logits are divided
by one number T > 0. This changes no answer. T minimises the cross entropy with label smoothing 1 / (n + 2), after Platt
(1999), so a model that is right on all n examples does not become certain.

Sets (split conformal prediction: Papadopoulos et al., ECML 2002; the score 1 - p_y of Sadinle, Lei and Wasserman, JASA
2019): with n held-out scores of a category of classes, q is the ceil((n + 1) a)-th smallest, and class c is in the set
if 1 - p_c <= q. For a new example of that category, exchangeable with the held-out ones, the set contains the true
class with probability at least a, and at most a + 1 / (n + 1) if no two scores are equal. Each class with at least
`OWN` examples is a category; all other classes form one (Mondrian: Vovk, Gammerman and Shafer 2005). The guarantee
holds within each category and over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_core.types.clinical import ReliabilityBin

OWN = 49
"""Held-out examples from which a class gets its own quantile. Its coverage is then at most 2 points too high."""
Source = Literal["own", "together", "all"]
"""Which scores gave a quantile: the class's own; those of all small classes; all, if the small classes have too few."""
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-3, 1e3


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Fit T to logits (n, C) and labels (n,), n >= 1."""
    z, spread = logits.double(), 1 / (len(logits) + 2)

    def loss(log_temperature: float) -> float:
        return float(cross_entropy(z / math.exp(log_temperature), labels, label_smoothing=spread))

    return _minimum(loss)


def estimate_temperature(bins: Sequence[ReliabilityBin], n_classes: int) -> float | None:
    """Estimate T from the hospitals' counts: examples and correct answers, in bins by the largest probability p.

    Assumes that all other classes are equally likely: p is the sigmoid of m / T - ln(C - 1), and m = ln(p / (1 - p)) +
    ln(C - 1) at T = 1. This holds for models with the largest calibration errors. If a model is too certain between two
    classes, the estimate is too close to 1. Because bins are coarse, it may be off by a factor of two.
    Returns None without examples.
    """
    filled = [b for b in bins if b.examples]
    n = sum(b.examples for b in filled)
    if not n:
        return None
    others, spread = math.log(n_classes - 1), 1 / (n + 2)
    p = np.clip([b.confidence / b.examples for b in filled], 1 / n_classes, 1 - 1e-12)
    margins = np.log(p) - np.log1p(-p) + others
    examples = np.array([b.examples for b in filled], dtype=np.float64)
    right = (1 - spread) * np.array([b.correct for b in filled]) + spread * examples / n_classes

    def loss(log_temperature: float) -> float:
        x = margins / math.exp(log_temperature) - others
        return float((right * np.logaddexp(0, -x) + (examples - right) * np.logaddexp(0, x)).sum())

    return _minimum(loss)


def _minimum(loss: Callable[[float], float]) -> float:
    """Minimise a loss over log T, and return T."""
    ends = (math.log(_MIN_TEMPERATURE), math.log(_MAX_TEMPERATURE))
    return math.exp(float(minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-6}).x))


def probabilities(logits: Tensor, temperature: float, multi_label: bool = False) -> Tensor:
    """Return p (n, C) in float64: of each class, or that each label is present."""
    scaled = logits.double() / temperature
    return torch.sigmoid(scaled) if multi_label else torch.softmax(scaled, 1)


def smallest(share: float) -> int:
    """Return the least number of scores for a finite quantile."""
    exact = Fraction(repr(share))
    return math.ceil(exact / (1 - exact))


def quantile(scores: Tensor, share: float) -> float:
    """Return the ceil((n + 1) a)-th smallest of n scores, or infinity if n is too small. share: a, exact as written."""
    place = math.ceil((len(scores) + 1) * Fraction(repr(share)))
    return float(scores.sort().values[place - 1]) if place <= len(scores) else math.inf


class Quantiles(NamedTuple):
    """For each class q, in [0, 1], and which scores it comes from."""

    values: tuple[float, ...]
    sources: tuple[Source, ...]


def class_quantiles(p: Tensor, labels: Tensor, coverage: float) -> Quantiles:
    """Compute q of each class from held-out p (n, C) and labels (n,); n must be at least `smallest(coverage)`."""
    return _by_category(_scores(p, labels), labels, p.shape[1], coverage)


def label_quantiles(p: Tensor, present: Tensor, label: Tensor, n_labels: int, coverage: float) -> Quantiles:
    """Compute q of each label and answer (absent, present, absent, ...) from m held-out answers about labels.

    p: (m, 2), of both answers   present: (m,), 1 or 0   label: (m,), index of the label. A record has at most one
    answer per label, so the guarantee holds for labels with their own quantile. Answers that share a quantile are
    treated as independent.
    """
    return _by_category(_scores(p, present), 2 * label + present, 2 * n_labels, coverage)


def _scores(p: Tensor, right: Tensor) -> Tensor:
    return 1 - p.gather(1, right.unsqueeze(1)).squeeze(1)


def _by_category(scores: Tensor, category: Tensor, n: int, coverage: float) -> Quantiles:
    """Compute q of each of n categories from scores (m,) and their categories (m,)."""
    few = torch.bincount(category, minlength=n) < max(OWN, smallest(coverage))
    of_few = scores[few[category]]
    others: Source = "together" if len(of_few) >= smallest(coverage) else "all"
    shared = quantile(of_few if others == "together" else scores, coverage)
    values = [shared if few[c] else quantile(scores[category == c], coverage) for c in range(n)]
    sources: list[Source] = [others if few[c] else "own" for c in range(n)]
    return Quantiles(tuple(values), tuple(sources))


def in_set(p: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Return which classes are in the sets (n, C), from p (n, C)."""
    return 1 - p <= torch.tensor(quantiles, dtype=torch.float64)
