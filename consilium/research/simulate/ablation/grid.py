"""The cells of the ablation, and the distinct runs that they need.

A cell is (variant, epsilon, share of silos that submit prototypes, seed). Cells whose runs are equal by construction
share one run; `controls` lists pairs of runs that check this bit for bit.
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
    """A method with the settings that the ablation compares.

    Attributes:
        words: settings of the variant
        uses_share: whether its runs depend on the share
        zero: the variant that it equals at share 0
        personal: whether it has personal models alone, and is measured by them
        finite: whether it exists only at finite epsilon
    """

    words: Words
    uses_share: bool = False
    zero: str | None = None
    personal: bool = False
    finite: bool = False


_CLOSED_FORM = ("method=analytic", "model=random_features", "rounds=2")
VARIANTS: Mapping[str, Variant] = {
    "fedavg": Variant(("method=fedavg",)),
    "fedavg-head": Variant(("method=fedavg", "model.projection=[]")),
    "fedavg-features": Variant(("method=fedavg", "model=random_features")),
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
    "fedphp": Variant(("method=fedphp", "personal=true")),
    "map": Variant(("method=map", "personal=true")),
    "analytic": Variant(_CLOSED_FORM),
    "analytic-shared": Variant((*_CLOSED_FORM, "secagg=on", "privacy.placement=distributed"), finite=True),
}
"""FedNH's prototypes are its head, which would stay random at share 0. FedNH and FedGELA classify by directions; their
logit scales are chosen so that one learning rate suits all methods on the digits. FedMR-inter leaves out the coupled
term, which is one way to handle finite epsilon. FedMR's weights are chosen so that its terms have an effect on the
digits; the paper's weights, for 512 features, have none. FedPHP and MAP are measured by their global models, as the
others are. `fedavg-head` trains the head alone, and `fedavg-features` the head of the model of `analytic`; in
`analytic-shared` hospitals share the noise under masks."""


@dataclass(frozen=True, slots=True, order=True)
class GridRun:
    """One run of the grid; its `words` override the base configuration."""

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
    """The requested grid. shares: fractions of the silos. Raises ConfigError (E-CFG-02) on invalid values."""

    variants: tuple[str, ...]
    epsilons: tuple[float, ...]
    shares: tuple[float, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if strangers := sorted(set(self.variants) - set(VARIANTS)):
            raise ConfigError(
                "E-CFG-02", f"expected methods of {list(VARIANTS)}, found {', '.join(strangers)}: correct them"
            )
        for name, values in (("epsilons", self.epsilons), ("shares", self.shares), ("seeds", self.seeds)):
            if not values or len(set(values)) != len(values):
                raise ConfigError(
                    "E-CFG-02", f"expected {name} to be a list of different values, found {values}: correct it"
                )
        if not all(e > 0 for e in self.epsilons) or not all(0 <= p <= 1 for p in self.shares):
            raise ConfigError(
                "E-CFG-02",
                f"expected epsilons > 0 and shares in [0, 1], found {self.epsilons} and {self.shares}: correct them",
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
    """Two runs whose final models must be equal bit for bit. right: None means the left run without privacy."""

    name: str
    left: GridRun
    right: GridRun | None


def controls(grid: Grid) -> list[Control]:
    """List the equalities to check for the first seed: epsilon = inf equals the plain run; share 0 equals `zero`."""
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
