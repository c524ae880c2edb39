"""Partitions of labelled examples among silos: class-disjoint (PrCs), Dirichlet, equal shares, six hospitals.

Everything here works on labels alone and returns indices, so it can be checked without an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_core import rng
from fl_core.errors import ConfigError

Indices = NDArray[np.int64]
Labels = NDArray[np.int64]

TRIES = 1000


def assign_classes(n_classes: int, silos: int, per_silo: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Choose the classes of each silo (PrCs): walk the silos, first every class once, then random ones not yet held.

    Guarantees: exactly `per_silo` classes each; every class has a holder; disjoint when silos * per_silo == C.
    Raises ConfigError (E-CFG-08) when that is impossible. Source: the FedMR and FedGELA papers' P5C2, P10C3, ...
    """
    if not 1 <= per_silo <= n_classes or silos * per_silo < n_classes:
        enough = silos * per_silo >= n_classes
        fits = [f"p{silos}c{n_classes if enough else -(-n_classes // silos)}"] if silos else []
        fits += [f"p{-(-n_classes // per_silo)}c{per_silo}"] if per_silo and not enough else []
        raise ConfigError(
            "E-CFG-08",
            f"p{silos}c{per_silo} of {n_classes} classes: expected at most {n_classes} classes per silo and at least "
            f"{n_classes} places, found {per_silo} and {silos * per_silo}: some class would have no silo, or a silo "
            f"would have a class twice; use {' or '.join(fits)}",
        )
    random = rng.numpy_stream(seed, "partition", "classes")
    fresh = 0
    assigned: list[tuple[int, ...]] = []
    for _ in range(silos):
        mine: list[int] = []
        while len(mine) < per_silo:
            if fresh < n_classes:
                mine.append(fresh)
                fresh += 1
            else:
                mine.append(int(random.choice([c for c in range(n_classes) if c not in mine])))
        assigned.append(tuple(mine))
    return tuple(assigned)


def partition_by_class(
    labels: Labels, classes_of_silos: Sequence[Sequence[int]], seed: int, purpose: str, *, double: bool = False
) -> list[Indices]:
    """Divide each class equally among the silos that hold it, in their order.

    purpose: "train" or "test"; each has a stream of its own, the classes held are the same.
    double: partition everything twice, independently, as the official FedMR code does by accident: sizes double and the
        silos overlap. To reproduce its numbers only.
    """
    parts: list[list[Indices]] = [[] for _ in classes_of_silos]
    for copy in range(2 if double else 1):
        for c in range(1 + max(max(mine) for mine in classes_of_silos)):
            index = np.flatnonzero(labels == c)
            rng.numpy_stream(seed, "partition", purpose, copy, c).shuffle(index)
            holders = [k for k, mine in enumerate(classes_of_silos) if c in mine]
            for k, share in zip(holders, np.array_split(index, max(1, len(holders))), strict=False):
                parts[k].append(share)
    return [np.concatenate([*shares, np.empty(0, np.int64)]).astype(np.int64) for shares in parts]


def disjoint_classes(n_classes: int, silos: int) -> tuple[tuple[int, ...], ...]:
    """Cut the classes, in order, into shares as equal as can be: no class has two holders (10 in 6: 2,2,2,2,1,1)."""
    if n_classes < silos:
        raise ConfigError(
            "E-CFG-08",
            f"expected at least one class per silo, found {n_classes} classes for {silos} silos: use p{{r}}c1",
        )
    return tuple(tuple(int(c) for c in share) for share in np.array_split(np.arange(n_classes), silos))


class DirichletPartition(NamedTuple):
    """Indices per silo, the proportions (C, silos) as drawn, before the size limit, and how often it was drawn."""

    parts: list[Indices]
    proportions: NDArray[np.float64]
    attempts: int


def partition_dirichlet(
    labels: Labels,
    n_classes: int,
    silos: int,
    beta: float,
    random: np.random.RandomState,
    *,
    min_size: int = 10,
    min_classes: int = 1,
    tries: int | None = None,
    accept: bool = False,
    swap: bool = False,
) -> DirichletPartition:
    """Divide every class by proportions ~ Dir(beta); silos that have N / silos examples already get no more.

    Drawn again, at most `tries` times, until each silo has `min_size` examples and `min_classes` classes (2 for FedNH).
    accept: take the last draw as it is (FedGELA's code draws once, FedNH's three times).
    swap:   from the third class on, silos that so far have at most one class change shares with the last silos, the
            second of them with the last but one, and so on (FedNH's code).
    Raises ConfigError (E-CFG-08) when that never happens. Source: MOON; FedMR, FedGELA and FedCD use the same.
    Guarantees: the parts are disjoint and their union is everything.
    """
    if beta <= 0 or silos < 1 or silos * min_size > len(labels) or min_classes > n_classes:
        raise ConfigError(
            "E-CFG-08",
            f"expected beta > 0 and at least {min_size} examples and {min_classes} classes for each of {silos} silos, "
            f"found {beta=}, {len(labels)} examples of {n_classes} classes: ask for fewer silos",
        )
    tries = TRIES if tries is None else tries
    for attempt in range(1, tries + 1):
        parts: list[Indices] = [np.empty(0, np.int64) for _ in range(silos)]
        class_counts = np.zeros(silos, np.int64)  # classes of each silo so far
        drawn = []
        for c in range(n_classes):
            index = np.flatnonzero(labels == c)
            random.shuffle(index)
            p = random.dirichlet(np.repeat(beta, silos))
            shares = _cut(parts, index, p, len(labels))
            if swap and c >= 2:
                order = _swapped(class_counts)
                shares, p = [shares[k] for k in order], p[order]
            parts = [np.concatenate([part, share]) for part, share in zip(parts, shares, strict=True)]
            class_counts += [len(share) > 0 for share in shares]
            drawn.append(p)
        enough = min(map(len, parts)) >= min_size and class_counts.min() >= min_classes
        if enough or (accept and attempt == tries):
            return DirichletPartition(parts, np.stack(drawn), attempt)
    raise ConfigError(
        "E-CFG-08",
        f"no draw of {tries} gave each of {silos} silos {min_size} examples and {min_classes} classes with {beta=}: "
        "raise beta or ask for fewer silos",
    )


def _swapped(class_counts: Indices) -> list[int]:
    """Return the order of shares after each silo with at most one class changed places with one from the end."""
    order = list(range(len(class_counts)))
    for position, k in enumerate(np.flatnonzero(class_counts <= 1)):
        end = len(class_counts) - 1 - position
        order[k], order[end] = order[end], order[k]
    return order


def partition_like(labels: Labels, proportions: NDArray[np.float64], random: np.random.RandomState) -> list[Indices]:
    """Divide another split by the same proportions, with its own size limit; a silo may get nothing."""
    parts: list[Indices] = [np.empty(0, np.int64) for _ in range(proportions.shape[1])]
    for c, p in enumerate(proportions):
        index = np.flatnonzero(labels == c)
        random.shuffle(index)
        shares = _cut(parts, index, p, len(labels))
        parts = [np.concatenate([part, share]) for part, share in zip(parts, shares, strict=True)]
    return parts


def _cut(parts: list[Indices], index: Indices, p: NDArray[np.float64], total: int) -> list[Indices]:
    below = np.array([len(part) < total / len(parts) for part in parts])
    open_p = p * below
    # When all mass fell on full silos, share among the others.
    open_p = open_p / open_p.sum() if open_p.sum() > 0 else below / max(1, below.sum())
    return np.split(index, (np.cumsum(open_p) * len(index)).astype(int)[:-1])


def partition_equally(labels: Labels, silos: int, seed: int, purpose: str) -> list[Indices]:
    """Divide a random permutation equally: independent and identically distributed silos."""
    if not 1 <= silos <= len(labels):
        raise ConfigError("E-CFG-08", f"expected 1 to {len(labels)} silos for as many examples, found {silos}")
    order = rng.numpy_stream(seed, "partition", purpose).permutation(len(labels))
    return [part.astype(np.int64) for part in np.array_split(order, silos)]
