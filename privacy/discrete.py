"""Integer noise: the discrete Gaussian by rejection, and how far a sum of several is from one.

Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, algorithm 3: propose from
the discrete Laplace distribution of scale t = floor(sigma) + 1 and accept y with probability
exp(-(|y| - sigma^2 / t)^2 / (2 sigma^2)). A vector that a discrete Gaussian of parameter sigma is added to is
(Delta^2 / (2 sigma^2))-zCDP, as with the Gaussian of that standard deviation. Kairouz, Liu and Steinke, "The
Distributed Discrete Gaussian Mechanism", ICML 2021, lemma 12: sums over silos.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_core.errors import ConfigError
from privacy.entropy import Noise

LEAST, LEAST_ROUNDED = 4.0, 2.0**10
"""Standard deviations in grid units below which a sum of discrete, or of rounded, Gaussians is not accounted as one."""
EXACT_UP_TO = 1_000_000
"""Coordinates up to which noise is an exact discrete Gaussian; more take a rounded normal, an approximation."""
MOST = 2.0**32


def integer_noise(noise: Noise, shape: tuple[int, ...], sigma: float, coordinates: int) -> Tensor:
    """Draw int64 noise of standard deviation `sigma` grid units for a part of a vector of `coordinates` numbers.

    Raises ConfigError (E-PRIV-11) where the grid is too coarse for the noise, or too fine for float64.
    """
    least = LEAST if coordinates <= EXACT_UP_TO else LEAST_ROUNDED
    if not least <= sigma <= MOST:
        raise ConfigError(
            "E-PRIV-11",
            f"expected noise between {least:g} and 2^32 units of the grid, found {sigma:g}: choose another "
            "clip or scale",
        )
    if coordinates > EXACT_UP_TO:
        return noise.gaussian(shape, sigma).round_().long()
    return discrete_gaussian(noise, math.prod(shape), sigma).reshape(shape)


def discrete_gaussian(noise: Noise, n: int, sigma: float) -> Tensor:
    """Draw n integers with probabilities proportional to exp(-y^2 / (2 sigma^2)); sigma > 0."""
    t, found, missing = math.floor(sigma) + 1, list[Tensor](), n
    while missing > 0:
        tries = 2 * missing + 16
        size = (torch.log1p(-noise.uniform(tries)) * -t).floor()  # 1 - u is never 0
        negative = noise.uniform(tries) < 0.5
        accepted = noise.uniform(tries) < torch.exp(-((size - sigma**2 / t) ** 2) / (2 * sigma**2))
        accepted &= ~(negative & (size == 0))  # 0 would be proposed twice as often
        drawn = torch.where(negative, -size, size)[accepted][:missing].long()
        found.append(drawn)
        missing -= len(drawn)
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long)


def sum_gap(n: int, sigma: float) -> float:
    """Bound how far the sum of n discrete Gaussians of parameter sigma is from the discrete Gaussian of the sum."""
    return 10 * sum(math.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)) for k in range(1, n))
