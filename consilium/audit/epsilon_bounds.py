"""Lower bounds on epsilon and on mu from an attacker's right guesses.

One run: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, theorem 5.2. Of m
canaries, each in the training data with probability 1/2, the attacker guesses r, and v of these correctly. For an
(epsilon, delta)-private training the probability of this is at most

    p(eps) = P[Bin(r, e^eps / (1 + e^eps)) >= v] + 2 m delta max_{i >= 1} P[v - i <= Bin < v] / i

Two worlds: a Gaussian mechanism of mu = sensitivity / noise has mu = Phi^-1(1 - FPR) - Phi^-1(FNR) at every threshold
(Dong, Roth and Su, JRSS B 2022; Clopper-Pearson bounds as in Nasr et al., USENIX Security 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom, norm

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Shares of the canaries to guess. All are tried, with the confidence divided among them (Bonferroni)."""
CONFIDENCE = 0.05
_HIGHEST = 30.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Guesses:
    """The best of the tried guesses: m canaries, r guessed, v right, and the epsilon that they refute."""

    canaries: int
    guessed: int
    right: int
    epsilon: float


def tail(epsilon: float, delta: float, canaries: int, guessed: int, right: int) -> float:
    """Return p(eps): an upper bound on the probability of this many right guesses under (epsilon, delta)-privacy."""
    if right <= 0:
        return 1.0
    chance = 1 / (1 + math.exp(-epsilon))
    at_least = float(binom.sf(right - 1, guessed, chance))
    below = binom.pmf(np.arange(right), guessed, chance)
    near = np.cumsum(below[::-1]) / np.arange(1, right + 1)  # P[v - i <= Bin < v] / i
    return min(1.0, at_least + 2 * canaries * delta * float(near.max()))


def refuted(delta: float, canaries: int, guessed: int, right: int, confidence: float = CONFIDENCE) -> float:
    """Return the largest epsilon that this many right guesses refute; 0 if they refute none."""
    if tail(0.0, delta, canaries, guessed, right) > confidence:
        return 0.0
    low, high = 0.0, _HIGHEST
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, delta, canaries, guessed, right) <= confidence else (low, middle)
    return low


def one_run(scores: Floats, present: NDArray[np.bool_], delta: float, confidence: float = CONFIDENCE) -> Guesses:
    """Guess "in" for the highest scores and "out" for the lowest, with several numbers of guesses, and bound epsilon.

    scores (m,): high for canaries that look trained on   present (m,): which were trained on.
    """
    order, m = np.argsort(scores, kind="stable"), len(scores)
    best = Guesses(m, 0, 0, 0.0)
    for fraction in FRACTIONS:
        half = max(1, round(fraction * m / 2))
        right = int(present[order[-half:]].sum()) + int((~present[order[:half]]).sum())
        if best.guessed and tail(best.epsilon, delta, m, 2 * half, right) > confidence / len(FRACTIONS):
            continue  # refutes no more than the best so far
        epsilon = refuted(delta, m, 2 * half, right, confidence / len(FRACTIONS))
        if epsilon > best.epsilon or not best.guessed:
            best = Guesses(m, 2 * half, right, epsilon)
    return best


def mu_bound(without: Floats, with_record: Floats, confidence: float = CONFIDENCE) -> float:
    """Return a lower bound on mu from outputs of two worlds. The threshold is chosen on the first halves.

    A correct mechanism with noise multiplier z exceeds 1 / z with probability at most `confidence`.
    """
    half = len(without) // 2
    thresholds = np.quantile(np.concatenate((without[:half], with_record[:half])), np.linspace(0.02, 0.98, 97))
    at = max(thresholds, key=lambda c: _mu(without[:half], with_record[:half], float(c), confidence))
    return max(0.0, _mu(without[half:], with_record[half:], float(at), confidence))


def epsilon_bound(without: Floats, with_record: Floats, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return a lower bound on epsilon from scores of two worlds, for any mechanism; 0 if nothing is refuted.

    Under (epsilon, delta)-privacy, TPR <= e^eps FPR + delta at every threshold. It is chosen on the first halves.
    """
    half = len(without) // 2
    both = np.concatenate((without[:half], with_record[:half]))
    at = max(
        np.unique(np.quantile(both, np.linspace(0, 1, 51), method="lower")),
        key=lambda c: _epsilon(without[:half], with_record[:half], float(c), delta, confidence),
    )
    return max(0.0, _epsilon(without[half:], with_record[half:], float(at), delta, confidence))


def _epsilon(without: Floats, with_record: Floats, threshold: float, delta: float, confidence: float) -> float:
    false_positive = _upper(int((without > threshold).sum()), len(without), confidence / 2)
    right = 1 - _upper(int((with_record <= threshold).sum()), len(with_record), confidence / 2)
    return math.log((right - delta) / false_positive) if right > delta else 0.0


def _mu(without: Floats, with_record: Floats, threshold: float, confidence: float) -> float:
    false_positive = _upper(int((without > threshold).sum()), len(without), confidence / 2)
    false_negative = _upper(int((with_record <= threshold).sum()), len(with_record), confidence / 2)
    return float(norm.isf(false_positive) - norm.ppf(false_negative))


def _upper(found: int, n: int, confidence: float) -> float:
    """Return the Clopper-Pearson upper bound on a probability, from `found` of n."""
    return 1.0 if found >= n else float(beta.ppf(1 - confidence, found + 1, n - found))


def auc(positive: Sequence[float] | Floats, negative: Sequence[float] | Floats) -> float:
    """Return the area under the ROC curve: the probability that a positive scores above a negative, ties half."""
    high, low = np.asarray(positive, float), np.sort(np.asarray(negative, float))
    below = np.searchsorted(low, high, "left") + np.searchsorted(low, high, "right")
    return float(below.mean() / (2 * len(low)))
