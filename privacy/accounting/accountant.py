"""One accountant for all of a hospital's releases: subsampled training steps and full-participation sums together.

A history is a list of mechanisms (z, q, steps): the Gaussian mechanism with noise z times the l2 sensitivity, over a
Poisson sample of rate q, applied `steps` times. Two accountants of Opacus compose it: RDP (Mironov, CSF 2017) and PRV
(Gopi, Lee and Wutschitz, NeurIPS 2021). Releases over all records, of rate 1, have an exact curve (gaussian.py).

A budget is kept by one of two filters, both valid for releases that are chosen after seeing earlier ones: the exact
Gaussian one, which admits rate 1 alone, or RDP at one fixed order (Feldman and Zrnic, NeurIPS 2021), which admits
training steps too. PRV is tighter for these, and only informs. Adjacency: add or remove one unit.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from fl_core.errors import ConfigError
from privacy.accounting import gaussian
from privacy.postponed_import import postpone

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(64, 80, 96, 128, 192, 256, 384, 512, 768, 1024),
)
"""Orders of RDP. Opacus' list ends at 63, which overstates the epsilon of small plans by a factor of 3; above 1029 its
binomials overflow."""
_PRECISION, _MAX_NOISE = 1e-4, 1e6
_MIN_NOISE, _MAX_STEPS = 1e-6, 2**53
"""Smaller noise counts as 0, since its square underflows. Larger numbers of steps are not exact in floats."""


@dataclass(frozen=True, slots=True, order=True)
class Mechanism:
    """The Gaussian mechanism on Poisson samples. noise: std / sensitivity; rate: sampling rate; steps: applications."""

    noise: float
    rate: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.noise < math.inf and 0 < self.rate <= 1 and 0 < self.steps <= _MAX_STEPS):
            raise ConfigError(
                "E-PRIV-20",
                f"expected 0 <= noise < inf, 0 < rate <= 1 and 1 to {_MAX_STEPS} steps, found noise {self.noise}, "
                f"rate {self.rate}, {self.steps} steps",
            )


History = Sequence[Mechanism]


def aggregated(history: Iterable[Mechanism]) -> list[Mechanism]:
    """Merge mechanisms with equal noise and rate, since PRV's cost grows with the number of entries."""
    steps: dict[tuple[float, float], int] = {}
    for m in history:
        steps[m.noise, m.rate] = steps.get((m.noise, m.rate), 0) + m.steps
    return [Mechanism(noise, rate, n) for (noise, rate), n in sorted(steps.items())]


# Imported on demand: Opacus takes seconds to load, and most processes of a federation never compute epsilon.


def _analysis() -> Any:  # noqa: ANN401
    """Import Opacus' analysis of RDP alone, which needs only numpy and scipy's special functions.

    So a hospital's page, and commands that add up spending, need 50 MB instead of 700 MB, and save some seconds.
    """
    postpone("opacus")
    postpone("opacus.accountants")
    return importlib.import_module("opacus.accountants.analysis.rdp")


def rdp(history: Iterable[Mechanism], orders: Sequence[float] = ORDERS) -> NDArray[np.float64]:
    total = np.zeros(len(orders))
    for m in aggregated(history):
        if m.noise < _MIN_NOISE:
            return np.full(len(orders), math.inf)
        total += m.steps * _rdp_of_a_step(m.noise, m.rate, tuple(orders))
    return total


@lru_cache(maxsize=4096)  # a hospital solves for the noise of its plan in every round, with the same calls
def _rdp_of_a_step(noise: float, rate: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rdp_values = np.atleast_1d(
            _analysis().compute_rdp(q=rate, noise_multiplier=min(noise, _MAX_NOISE), steps=1, orders=list(orders))
        )
    # For large noise the difference of logarithms can be below 0, for small noise NaN. Noise above `_MAX_NOISE` counts
    # as that bound, since its square would overflow.
    rdp_values = np.where(np.isnan(rdp_values), math.inf, np.maximum(rdp_values, 0.0))
    rdp_values.flags.writeable = False
    return rdp_values


def epsilon_rdp(history: Iterable[Mechanism], delta: float) -> float:
    """Return epsilon at delta by RDP at the best order; 0 for an empty history."""
    entries = aggregated(history)
    if not entries:
        return 0.0
    rdp_values = rdp(entries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epsilon, _ = _analysis().get_privacy_spent(orders=list(ORDERS), rdp=rdp_values, delta=_valid(delta))
    return float(max(epsilon, 0.0))


def epsilon_prv(history: Iterable[Mechanism], delta: float, error: float = 0.01) -> float:
    """Return an upper bound on epsilon at delta by PRV, at most `error` above; 0 for an empty history."""
    entries = aggregated(history)
    if not entries:
        return 0.0
    if any(m.noise < _MIN_NOISE for m in entries):
        return math.inf
    return _epsilon_prv(tuple((m.noise, m.rate, m.steps) for m in entries), _valid(delta), error)


@lru_cache(maxsize=256)  # a page and a card show one plan at many places, and a call takes 0.2 s
def _epsilon_prv(history: Sequence[tuple[float, float, int]], delta: float, error: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta=delta, eps_error=error))


def gaussian_cost(history: Iterable[Mechanism]) -> float:
    """Return sum 1 / z^2 of releases over all records: infinite with a subsampled step, or without noise."""
    entries = aggregated(history)
    if any(m.rate != 1 or m.noise < _MIN_NOISE for m in entries):
        return math.inf
    return math.fsum(m.steps / min(m.noise, _MAX_NOISE) ** 2 for m in entries)


def epsilon_of(history: Iterable[Mechanism], delta: float) -> float:
    """Return epsilon at delta as budgets count it: exact if all releases are over all records, otherwise by RDP."""
    entries = aggregated(history)
    return _exact(entries, delta) if _all_over_all(entries) else epsilon_rdp(entries, delta)


def epsilon_spent(history: Iterable[Mechanism], delta: float) -> float:
    """Return epsilon at delta by the privacy loss of all releases.

    It is exact if all releases are over all records; otherwise it is PRV's upper bound.
    """
    entries = aggregated(history)
    return _exact(entries, delta) if _all_over_all(entries) else epsilon_prv(entries, delta)


def _exact(history: Iterable[Mechanism], delta: float) -> float:
    return gaussian.epsilon_of(math.sqrt(gaussian_cost(history)), _valid(delta))


def _all_over_all(history: Iterable[Mechanism]) -> bool:
    return all(m.rate == 1 for m in history)


_MAX_EXPONENT = 700.0
"""Below the logarithm of the largest float."""


def replace_one(epsilon: float, delta: float) -> tuple[float, float]:
    """Convert add-or-remove privacy to the replacement of one record: (2 eps, (1 + e^eps) delta)."""
    factor = 1 + math.exp(epsilon) if epsilon < _MAX_EXPONENT else math.inf
    return 2 * epsilon, min(1.0, factor * delta) if delta > 0 else 0.0


FilterName = Literal["auto", "gaussian", "renyi"]
AUTO: FilterName = "auto"
GAUSSIAN: FilterName = "gaussian"
RENYI: FilterName = "renyi"


def filter_named(name: str) -> FilterName:
    """Return a filter's name with its type; raises ConfigError (E-PRIV-20) on an unknown name."""
    if name not in get_args(FilterName):
        raise ConfigError("E-PRIV-20", f"expected a filter of {', '.join(get_args(FilterName))}, found {name!r}")
    return cast(FilterName, name)


@dataclass(frozen=True, slots=True)
class PrivacyFilter:
    """A budget (epsilon, delta), and the filter that enforces it.

    order: of RDP   filter: "gaussian" admits only releases over all records, while sum 1 / z^2 is within the exact
    curve; "renyi" admits any releases while RDP at `order` is at most `bound`; "auto" becomes "renyi" if the first
    charge has a subsampled step, otherwise "gaussian". The first charge is made before any record is read.
    """

    epsilon: float
    delta: float
    order: float
    filter: FilterName = RENYI

    @classmethod
    def of(cls, epsilon: float, delta: float, filter: FilterName = AUTO) -> PrivacyFilter:
        """Choose the order for a budget: 1 + sqrt(ln(1/delta) / rho), where rho is the zCDP that it allows."""
        if not 0 < epsilon < math.inf:
            raise ConfigError("E-PRIV-20", f"expected a finite budget epsilon > 0, found {epsilon}")
        log = math.log(1 / _valid(delta))
        rho = (math.sqrt(epsilon + log) - math.sqrt(log)) ** 2
        wanted = 1 + math.sqrt(log / rho) if rho > 0 else ORDERS[-1]  # rho is 0 if the budget is too small for floats
        return cls(epsilon, delta, min(ORDERS, key=lambda order: abs(order - wanted)), filter)

    @property
    def bound(self) -> float:
        """Return the RDP that this budget allows at its order: the conversion of Balle et al. (2020), inverted."""
        a = self.order
        return self.epsilon + (math.log(self.delta) + math.log(a)) / (a - 1) - math.log((a - 1) / a)

    @property
    def mu(self) -> float:
        return gaussian.mu_of(self.epsilon, self.delta)

    @property
    def closed(self) -> bool:
        """Whether the budget is too small for any release under the filter "renyi"."""
        return self.filter == RENYI and self.bound <= 0

    def decided(self, spent: Iterable[Mechanism]) -> FilterName:
        """Return the filter in force after this spending; "auto" before the first charge.

        A history with both kinds of release began with a subsampled step, or was merged from copies of a ledger; it is
        counted by RDP.
        """
        charged = list(spent)
        if self.filter != AUTO or not charged:
            return self.filter
        return GAUSSIAN if _all_over_all(charged) else RENYI

    def kept_like(self, budget: PrivacyFilter | None) -> PrivacyFilter:
        """Return this limit with the filter of a collection's budget, so that one filter counts for both."""
        return self if budget is None else replace(self, filter=budget.filter)

    def admits(self, spent: Iterable[Mechanism], requested: Iterable[Mechanism]) -> bool:
        before, more = list(spent), list(requested)
        everything = [*before, *more]
        if self.decided(before or more) == RENYI:
            return float(rdp(everything, [self.order])[0]) <= self.bound
        return gaussian_cost(everything) <= self.mu**2

    def used(self, spent: Iterable[Mechanism]) -> float:
        """Return the spent share of the budget; infinite if something was spent of a budget that admits nothing."""
        charged = list(spent)
        if self.decided(charged) == RENYI:
            cost, limit = float(rdp(charged, [self.order])[0]), self.bound
        else:
            cost, limit = gaussian_cost(charged), self.mu**2
        return cost / limit if limit > 0 else math.inf if cost else 0.0

    def remedy(self, spent: Iterable[Mechanism], requested: Iterable[Mechanism]) -> str:
        """Suggest the other filter if it would admit a request that this one refuses; otherwise return ""."""
        before, more = list(spent), list(requested)
        other = GAUSSIAN if self.decided(before or more) == RENYI else RENYI
        if self.admits(before, more) or not replace(self, filter=other).admits(before, more):
            return ""
        return f"; the {other} filter would admit it: silo ledger budget set --filter {other}"


@dataclass(frozen=True, slots=True)
class RdpBound:
    """A bound on RDP at one order, equal to the cost of a plan."""

    order: float
    bound: float

    @classmethod
    def of(cls, planned: Iterable[Mechanism], order: float) -> RdpBound:
        return cls(order, float(rdp(planned, [order])[0]))

    def admits(self, spent: Iterable[Mechanism], requested: Iterable[Mechanism]) -> bool:
        """Return whether a request fits in addition to the spending, with a tolerance for the order of summation."""
        return float(rdp([*spent, *requested], [self.order])[0]) <= self.bound * (1 + _ROUNDING)


Bound = PrivacyFilter | RdpBound
_ROUNDING = 1e-12


def solve_noise(epsilon: float, delta: float, history: Callable[[float], History]) -> float:
    """Return the smallest noise multiplier z for which `history(z)` fits a budget, by the ledger's filter.

    history: all releases at noise z. Raises ConfigError (E-PRIV-12) if the releases other than training use up the
    whole budget.
    """
    budget = PrivacyFilter.of(epsilon, delta)

    def fits(noise: float) -> bool:
        return budget.admits((), history(noise))

    high = 1.0
    while not fits(high):
        high *= 2
        if high > _MAX_NOISE:
            raise ConfigError(
                "E-PRIV-12",
                f"(epsilon {epsilon:g}, delta {delta:g}) leaves no room for training, because the other releases of "
                "the run use all of it: send prototypes in fewer rounds or with more noise, or raise epsilon",
            )
    low = 0.0
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _valid(delta: float) -> float:
    if not 0 < delta < 1:
        raise ConfigError("E-PRIV-20", f"expected 0 < delta < 1, found {delta}")
    return delta
