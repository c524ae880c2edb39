"""How well any attacker can tell whether one record was used, from closed forms.

Whoever calls a share a of the records that were not used "used" (false positives) finds at most a share b(a) of those
that were. Under (epsilon, delta)-privacy

    b(a) = min(delta + e^eps a,  1 - e^-eps (1 - delta - a))

and of one Gaussian release with noise z, mu = 1 / z, b(a) = Phi(Phi^-1(a) + mu). Answers about one record that was used
with probability 1/2 are right for at most (1 + max_a b(a) - a) / 2. Of two records, one of which was used, at most the
area below b is picked rightly (AUC): under (epsilon, delta) that is the same share to within delta.

Kairouz, Oh and Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015; Dong, Roth and Su, "Gaussian
Differential Privacy", JRSS B 2022 (f_{epsilon, delta} = 1 - b).
"""

from __future__ import annotations

import math

from scipy.special import ndtr, ndtri

from privacy.accounting.gaussian import mu_of


def right(epsilon: float, delta: float) -> float:
    """Return the largest share of right answers where the record was used with probability 1/2: of any mechanism."""
    return (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))


def found(epsilon: float, delta: float, wrong: float) -> float:
    """Return the largest true-positive rate at the false-positive rate `wrong`: of any mechanism."""
    return min(1.0, delta + math.exp(epsilon) * wrong, 1 - math.exp(-epsilon) * (1 - delta - wrong))


def belief(epsilon: float, before: float) -> float:
    """Return the largest probability that a belief can rise to, unless delta's failure happens."""
    odds = math.exp(epsilon) * before / (1 - before)
    return odds / (1 + odds)


def gaussian_right(epsilon: float, delta: float) -> float:
    """Return the same as `right` of one Gaussian release that has exactly this epsilon at this delta."""
    return float(ndtr(0.5 * mu_of(epsilon, delta)))


def gaussian_picked(epsilon: float, delta: float) -> float:
    """Return the largest AUC of one Gaussian release that has exactly this epsilon at this delta."""
    return float(ndtr(math.sqrt(0.5) * mu_of(epsilon, delta)))


def gaussian_found(epsilon: float, delta: float, wrong: float) -> float:
    """Return the same as `found` of one Gaussian release that has exactly this epsilon at this delta."""
    return float(ndtr(ndtri(wrong) + mu_of(epsilon, delta)))


def of_group(epsilon: float, delta: float, records: int) -> tuple[float, float]:
    """Return (epsilon, delta) of so many records of one person together: k epsilon, delta sum_{i<k} e^(i epsilon)."""
    return records * epsilon, min(1.0, delta * sum(math.exp(i * epsilon) for i in range(records)))
