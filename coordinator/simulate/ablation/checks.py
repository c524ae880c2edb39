"""What the rows of the ablation must show, within noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t

from coordinator.simulate.ablation.grid import VARIANTS, Grid, Run, canonical

Accuracy = Mapping[Run, float]
"""Final accuracy, by canonical run."""


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the results and whether it holds."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds, its standard error, and the half-width of the t-based 95 % interval (NaN for one seed)."""

    mean: float
    error: float
    half: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        found = list(values)
        n, mean = len(found), sum(found) / len(found)
        if n < 2:
            return cls(mean, math.nan, math.nan)
        error = math.sqrt(sum((v - mean) ** 2 for v in found) / (n - 1) / n)
        return cls(mean, error, float(t.ppf(0.975, n - 1)) * error)


def estimate(accuracy: Accuracy, grid: Grid, variant: str, epsilon: float, share: float) -> Estimate | None:
    runs = [canonical(Run(variant, epsilon, share, seed)) for seed in grid.seeds]
    return Estimate.of(accuracy[r] for r in runs) if all(r in accuracy for r in runs) else None


def monotone(accuracy: Accuracy, grid: Grid) -> Check:
    worst, bad = -math.inf, list[str]()
    for variant in grid.variants:
        epsilons = sorted(e for e in grid.epsilons if not (VARIANTS[variant].finite and math.isinf(e)))
        for share in grid.shares_of(variant):
            for i, low in enumerate(epsilons):
                for high in epsilons[i + 1 :]:
                    lead = _paired(accuracy, grid, (variant, low, share), (variant, high, share))
                    worst = max(worst, lead)
                    if math.isnan(lead):
                        bad.append(f"{variant}, share {share:g}: epsilon {low:g} or {high:g} is withheld")
                    if lead > 0:
                        bad.append(f"{variant}, share {share:g}: epsilon {low:g} beats {high:g}")
    return Check("accuracy does not fall as epsilon grows, within 2 SE", not bad, "; ".join(bad) or f"{worst:+.4f}")


def full_share_helps(accuracy: Accuracy, grid: Grid) -> Check | None:
    top = max(grid.epsilons)
    asked = [v for v in grid.variants if VARIANTS[v].uses_share and not VARIANTS[v].finite]
    if not asked or not {0.0, 1.0} <= set(grid.shares) or not math.isinf(top):
        return None
    lead = {v: _paired(accuracy, grid, (v, top, 0.0), (v, top, 1.0)) for v in asked}
    bad = [v for v, found in lead.items() if not found <= 0]
    return Check("without privacy, share 1 is no worse than share 0, within 2 SE", not bad, ", ".join(bad) or "none")


def spent(rows: Sequence[Mapping[str, str]], least: float = 0.95) -> Check:
    private = [r for r in rows if float(r["eps_target"]) != math.inf]
    used = [float(r["budget_used"]) for r in private]
    name = f"epsilon of every silo is at most the target, and at least {least:g} of the budget is used"
    holds = all(least <= u <= 1 for u in used) and all(float(r["eps_rdp"]) <= float(r["eps_target"]) for r in private)
    return Check(name, holds, f"used {min(used):.4f} to {max(used):.4f}" if used else "no private run")


def above_chance(accuracy: Accuracy, grid: Grid, classes: int) -> Check:
    low = min(grid.epsilons)
    found = {v: e for v in grid.variants for p in grid.shares_of(v)[-1:] if (e := estimate(accuracy, grid, v, low, p))}
    found = {v: e for v, e in found.items() if not math.isnan(e.mean)}
    if not found:
        return Check(f"epsilon {low:g} is above chance", False, "withheld: noise larger than signal")
    best = max(found, key=lambda v: found[v].mean)
    mean = found[best].mean
    return Check(f"epsilon {low:g} is above chance", mean > 1 / classes, f"{best} {mean:.4f}, chance {1 / classes:.4f}")


def _paired(accuracy: Accuracy, grid: Grid, low: tuple[str, float, float], high: tuple[str, float, float]) -> float:
    difference = Estimate.of(
        accuracy[canonical(Run(*low, seed))] - accuracy[canonical(Run(*high, seed))] for seed in grid.seeds
    )
    return difference.mean - (0.0 if math.isnan(difference.error) else 2 * difference.error)
