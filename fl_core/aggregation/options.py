"""The aggregators, which combine the updates of a round, and their options in manifests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fl_core import validate
from fl_core.converter import read_options
from fl_core.errors import ConfigError
from fl_core.suggest import suggest

DEFAULT = "norm_clipped"
MIN_UPDATES_FOR_MEDIAN = 3
"""With fewer updates a median gives no protection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """The weighted mean. A single silo can move it arbitrarily far."""

    name: ClassVar[str] = "mean"
    warning: ClassVar[str] = "one bad hospital of six can ruin the model (accuracy 0 to 12 %, against 87 % without it)"


@dataclass(frozen=True, kw_only=True, slots=True)
class NormClipped:
    """The weighted mean of updates whose norm is bounded by earlier rounds.

    M_t is the lower median of the accepted norms of round t, and M_0 the first one. R_t is the largest median so far,
    at most ceiling M_0; in the first round it is M_0. Until a round has had three updates, R_t is the norm of the
    initial weights. An update above clip_at R_t is clipped to that. An update above refuse_above R_t is refused, unless
    its norm is at most clip_at times that of the initial weights, which a run of two silos would have accepted in its
    first round.

    rows: those with a weight per class are clipped at this multiple of the median of the row's contributors
    signs: refuse an update that lowers the scores of its own classes.
    """

    name: ClassVar[str] = DEFAULT
    warning: ClassVar[str] = ""
    refuse_above: float = 100.0
    clip_at: float = 4.0
    ceiling: float = 1.0
    rows: float = 4.0
    signs: bool = True

    def __post_init__(self) -> None:
        owner, numbers = "aggregator", {"clip_at": self.clip_at, "ceiling": self.ceiling, "rows": self.rows}
        validate.positive("E-CFG-02", owner, **numbers)
        validate.positive_or_infinite("E-CFG-02", owner, refuse_above=self.refuse_above)


@dataclass(frozen=True, kw_only=True, slots=True)
class Median:
    """The median of each number.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018, Algorithm 1.
    """

    name: ClassVar[str] = "median"
    warning: ClassVar[str] = (
        "with disjoint labels it loses half of the accuracy (41 to 66 %, against 82 to 92 % with the mean)"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimmedMean:
    """The mean of each number without the smallest and the largest, from the same paper as Median.

    trim: the share of silos that is left out at each end, rounded down, but at least one silo.
    """

    name: ClassVar[str] = "trimmed_mean"
    warning: ClassVar[str] = (
        "with disjoint labels it loses 10 to 20 points of accuracy (67 to 83 %, against 82 to 92 % with the mean)"
    )
    trim: float = 0.2

    def __post_init__(self) -> None:
        validate.positive("E-CFG-02", "aggregator", trim=self.trim)
        validate.below("E-CFG-02", "aggregator", 0.5, trim=self.trim)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeometricMedian:
    """The point with the smallest sum of weighted distances to all updates, by Weiszfeld's steps.

    Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 1.
    steps: a fixed number, so that it is a function of the updates only   smoothing: nu, the smallest distance.
    """

    name: ClassVar[str] = "geometric_median"
    warning: ClassVar[str] = (
        "with disjoint labels it loses 2 to 5 points of accuracy (81 to 87 %, against 82 to 92 % with the mean)"
    )
    steps: int = 8
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        validate.at_least("E-CFG-02", "aggregator", 1, steps=self.steps)
        validate.at_most("E-CFG-02", "aggregator", 100, steps=self.steps)
        validate.positive("E-CFG-02", "aggregator", smoothing=self.smoothing)


Options = Mean | NormClipped | Median | TrimmedMean | GeometricMedian
AGGREGATORS: dict[str, type[Options]] = {
    kind.name: kind for kind in (Mean, NormClipped, Median, TrimmedMean, GeometricMedian)
}


def warning(options: Options, holds: Collection[Collection[str]] = ()) -> str:
    """Describe the disadvantage of an aggregator; empty for the default, and if all silos declare the same classes.

    holds: the classes that each silo declares, empty if undeclared. The numbers were measured on digits
    (docs/research.md).
    """
    alike = bool(holds) and all(holds) and len({frozenset(classes) for classes in holds}) == 1
    if not options.warning or (alike and not isinstance(options, Mean)):
        return ""
    return f"aggregator={options.name}: {options.warning}"


_WRITTEN: Mapping[str, Mapping[str, object]] = {
    "norm_clipped": {"refuse_above": 5.0, "clip_at": 2.0, "ceiling": 2.0, "rows": 3.0},
}
"""First defaults of options whose default has changed since: the values in manifests that omit the option."""


def read(name: str, options: Mapping[str, object]) -> Options:
    """Make an aggregator from its name and numbers; raises ConfigError (E-CFG-01, E-CFG-02)."""
    if name not in AGGREGATORS:
        raise ConfigError("E-CFG-01", f"there is no aggregator {name!r}: {suggest(name, AGGREGATORS)}")
    return read_options(AGGREGATORS[name], f"aggregator.{name}", options)


def read_written(name: str, options: Mapping[str, object]) -> Options:
    """Make the aggregator of a manifest, with the defaults of the time when it was written; raises as `read`."""
    return read(name, {**_WRITTEN.get(name, {}), **options})
