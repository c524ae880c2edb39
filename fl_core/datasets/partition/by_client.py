"""Partitions by a distribution of classes per silo: FedRepo (FedRS, FedPHP) and MAP, and their personal hold-out.

In `by_class`, the shares of silos are drawn per class instead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fl_core import rng
from fl_core.datasets.partition.by_class import TRIES, Indices, Labels
from fl_core.errors import ConfigError

MIN_EXAMPLES = 5
HELD_OUT = 0.2
Shares = NDArray[np.float64]


def partition_per_silo(labels: Labels, n_classes: int, silos: int, alpha: float, seed: int) -> list[Indices]:
    """Divide by a distribution of classes per silo ~ Dir(alpha), normalised over the silos class by class.

    Shares are rounded, so a few examples may be left out. Drawn again until each silo has 5 examples.
    Raises ConfigError (E-CFG-08) after 1000 draws. Source: FedRepo's split "dirichlet".
    """
    _positive(silos, alpha)

    def draw(random: np.random.Generator) -> Shares:
        return random.dirichlet(np.repeat(alpha, n_classes), silos)

    return _drawn(labels, n_classes, seed, "persilo", draw)


def partition_map(labels: Labels, n_classes: int, silos: int, seed: int) -> list[Indices]:
    """Divide as MAP: each silo has m ~ U{2..C} random classes of equal weight, times a factor lognormal(0, 0.3) each.

    Shares are normalised over the silos class by class and rounded. Drawn again until every class has an owner and each
    silo has 5 examples (the paper drops smaller ones); raises ConfigError (E-CFG-08) after 1000 draws.
    """
    _positive(silos, 1.0)

    def draw(random: np.random.Generator) -> Shares:
        weights = np.zeros((silos, n_classes))
        for k in range(silos):
            m = int(random.integers(2, n_classes + 1))
            weights[k, random.choice(n_classes, m, replace=False)] = random.lognormal(0.0, 0.3, m) / m
        return weights

    return _drawn(labels, n_classes, seed, "map", draw)


def partition_slots(labels: Labels, n_classes: int, silos: int, per_silo: int, seed: int) -> list[Indices]:
    """Divide by slots of a sequence of random permutations of the classes: silo k takes slots [k s, (k + 1) s).

    A class is cut in equal parts, one per slot, and the remainder is left out; a class that a silo took twice
    counts double. Raises ConfigError (E-CFG-08) when some class would have no silo. Source: FedRepo's split "label".
    """
    if silos * per_silo < n_classes or per_silo < 1:
        raise ConfigError(
            "E-CFG-08",
            f"label-{per_silo}-{silos} of {n_classes} classes: expected at least {n_classes} places, found "
            f"{silos * per_silo}: some class would have no silo",
        )
    random = rng.numpy_stream(seed, "partition", "label", "slots")
    rounds = -(-silos * per_silo // n_classes)
    slots = np.concatenate([random.permutation(n_classes) for _ in range(rounds)])[: silos * per_silo]
    parts: list[list[Indices]] = [[] for _ in range(silos)]
    for c in range(n_classes):
        index = rng.numpy_stream(seed, "partition", "label", c).permutation(np.flatnonzero(labels == c))
        takers = np.flatnonzero(slots == c) // per_silo
        size = len(index) // len(takers)
        for i, k in enumerate(takers):
            parts[k].append(index[i * size : (i + 1) * size])
    return [np.concatenate([*shares, np.empty(0, np.int64)]).astype(np.int64) for shares in parts]


def hold_out(part: Indices, seed: int, silo: int) -> tuple[Indices, Indices]:
    """Shuffle a silo's examples and keep the first fifth, at least one, as its own test: (training, held out)."""
    mixed = rng.numpy_stream(seed, "partition", "held out", silo).permutation(part)
    cut = max(1, int(HELD_OUT * len(mixed)))
    return mixed[cut:], mixed[:cut]


def _positive(silos: int, alpha: float) -> None:
    if silos < 1 or alpha <= 0:
        raise ConfigError("E-CFG-08", f"expected at least one silo and alpha > 0, found {silos} and {alpha:g}")


def _drawn(
    labels: Labels, n_classes: int, seed: int, purpose: str, draw: Callable[[np.random.Generator], Shares]
) -> list[Indices]:
    for attempt in range(TRIES):
        random = rng.numpy_stream(seed, "partition", purpose, attempt)
        weights = draw(random)
        if (weights.sum(0) == 0).any():
            continue
        parts: list[list[Indices]] = [[] for _ in weights]
        for c in range(n_classes):
            index = random.permutation(np.flatnonzero(labels == c))
            ends = np.cumsum(np.round(weights[:, c] / weights[:, c].sum() * len(index)).astype(np.int64))
            for k, end in enumerate(ends):
                parts[k].append(index[(ends[k - 1] if k else 0) : end])
        whole = [np.concatenate(shares).astype(np.int64) for shares in parts]
        if min(map(len, whole)) >= MIN_EXAMPLES:
            return whole
    raise ConfigError(
        "E-CFG-08",
        f"no draw of {TRIES} gave each of the silos {MIN_EXAMPLES} of {len(labels)} examples: ask for fewer silos",
    )
