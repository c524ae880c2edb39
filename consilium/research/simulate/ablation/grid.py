"""The cells of the ablation, and the distinct runs behind them.

A cell is (variant, epsilon, share of silos that submit prototypes, seed). Cells whose runs are equal by construction
share one; that they are equal is checked once, bit for bit, in `controls`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fl_core.errors import ConfigError

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A method as the ablation compares it.

    Attributes:
        words: that make it
        uses_share: whether its runs depend on the share
        zero: the variant that it is at share 0
        personal: measured by personal accuracy
        finite: exists at finite epsilon alone
    """

    words: Words
    uses_share: bool = False
    zero: str | None = None
    personal: bool = False
    finite: bool = False


_CLOSED_FORM = ("method=analytic", "model=random_features", "rounds=2")
VARIANTS: Mapping[str, Variant] = {
    "fedavg": Variant(("method=fedavg",)),
    "fedmr-intra": Variant(("method=fedmr", "method.prototypes=false")),
    "fedmr": Variant(("method=fedmr", "method.inter_weighting=example"), True, "fedmr-intra"),
    "fedmr-inter": Variant(
        ("method=fedmr", "method.inter_weighting=example", "privacy.coupled=off"), True, "fedavg", finite=True
    ),
    "fedproc": Variant(("method=fedproc",), True, "fedavg"),
    "fednh": Variant(("method=fednh", "method.scale=10")),
    "fedgela": Variant(("method=fedgela", "method.logit_scale=3")),
    "fedproto": Variant(("method=fedproto", "personal=true"), True, personal=True),
    "fedrs": Variant(("method=fedrs",)),
    "fedphp": Variant(("method=fedphp", "personal=true"), personal=True),
    "map": Variant(("method=map", "personal=true"), personal=True),
    "analytic": Variant(_CLOSED_FORM),
    "analytic-shared": Variant((*_CLOSED_FORM, "secagg=on", "privacy.placement=distributed"), finite=True),
}
"""FedNH's prototypes are its head, which share 0 would leave as it was drawn. FedNH and FedGELA classify by directions,
and the scales of their logits are those at which one learning rate does for all methods on the digits. FedMR-inter
leaves the coupled term out, which is one of the treatments of finite epsilon. FedMR's weights are those at which its
parts move digits: the paper's, written for 512 features, change none here. `analytic` brings a model of its own; in
its second form hospitals share noise out under masks."""


@dataclass(frozen=True, slots=True, order=True)
class GridRun:
    """One distinct run; `words` override the base configuration."""

    variant: str
    epsilon: float
    share: float
    seed: int

    @property
    def words(self) -> Words:
        epsilon = "inf" if math.isinf(self.epsilon) else f"{self.epsilon:g}"
        variant_words = VARIANTS[self.variant].words
        return (
            "privacy=dp_record",
            f"privacy.epsilon={epsilon}",
            *variant_words,
            f"prototype_share={self.share:g}",
            f"seed={self.seed}",
        )

    def key(self, base: Sequence[str], software: str) -> str:
        text = json.dumps([software, list(base), list(self.words)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Grid:
    """What is asked for; shares are fractions of the silos."""

    variants: tuple[str, ...]
    epsilons: tuple[float, ...]
    shares: tuple[float, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if strangers := sorted(set(self.variants) - set(VARIANTS)):
            raise ConfigError("E-CFG-02", f"expected methods of {list(VARIANTS)}, found {', '.join(strangers)}")
        for name, values in (("epsilons", self.epsilons), ("shares", self.shares), ("seeds", self.seeds)):
            if not values or len(set(values)) != len(values):
                raise ConfigError("E-CFG-02", f"expected {name} to be a list of different values, found {values}")
        if not all(e > 0 for e in self.epsilons) or not all(0 <= p <= 1 for p in self.shares):
            raise ConfigError(
                "E-CFG-02", f"expected epsilons > 0 and shares of [0, 1], found {self.epsilons} and {self.shares}"
            )

    def shares_of(self, variant: str) -> tuple[float, ...]:
        return self.shares if VARIANTS[variant].uses_share else (1.0,)

    def epsilons_of(self, variant: str) -> list[float]:
        return sorted(e for e in self.epsilons if not (VARIANTS[variant].finite and math.isinf(e)))

    def cells(self) -> list[GridRun]:
        return [
            GridRun(v, e, p, s)
            for v in self.variants
            for e in self.epsilons
            if e in self.epsilons_of(v)
            for p in self.shares_of(v)
            for s in self.seeds
        ]

    def runs(self) -> list[GridRun]:
        return sorted({canonical(cell) for cell in self.cells()}, key=lambda r: (r.seed, r))


def canonical(cell: GridRun) -> GridRun:
    variant = VARIANTS[cell.variant]
    if cell.share == 0 and variant.zero:
        return GridRun(variant.zero, cell.epsilon, 1.0, cell.seed)
    return cell if variant.uses_share else GridRun(cell.variant, cell.epsilon, 1.0, cell.seed)


class Control(NamedTuple):
    """Two runs whose final models must be equal bit for bit; right: None for the left one without privacy."""

    name: str
    left: GridRun
    right: GridRun | None


def controls(grid: Grid) -> list[Control]:
    """List what is checked once: epsilon = inf is the plain run, share 0 is the variant without prototypes."""
    seed, runs = grid.seeds[0], list[Control]()
    for name, variant in ((name, VARIANTS[name]) for name in grid.variants if not VARIANTS[name].personal):
        epsilons = [e for e in grid.epsilons if not math.isinf(e)][:1] if variant.finite else [math.inf]
        if not variant.finite:
            top = GridRun(name, math.inf, 1.0, seed)
            runs.append(Control(f"epsilon=inf of {name} is the run without privacy", top, None))
        for epsilon in epsilons if variant.zero else ():
            zero = GridRun(name, epsilon, 0.0, seed)
            runs.append(Control(f"share 0 of {name} is {variant.zero}", zero, canonical(zero)))
    return runs
