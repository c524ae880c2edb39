"""Checks on the ablation's results, within noise, and tables and plot. `table5` has the layout of FedMR's Table 5.

Fan et al., TMLR 2023.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t

from consilium.research.simulate.ablation.grid import VARIANTS, Grid, GridRun, canonical
from fl_core.errors.extras import require
from service_core.storage.private_files import write_figure, write_public

Accuracy = Mapping[GridRun, float]
"""Final accuracy, by canonical run."""


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the results, and whether it holds. found: the numbers behind it."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True)
class SeedMean:
    """Mean over seeds, its standard error, and the half-width of the t-based 95 % interval (NaN for one seed)."""

    mean: float
    error: float
    half: float

    @classmethod
    def of(cls, values: Iterable[float]) -> SeedMean:
        numbers = list(values)
        n, mean = len(numbers), sum(numbers) / len(numbers)
        if n < 2:
            return cls(mean, math.nan, math.nan)
        error = math.sqrt(sum((v - mean) ** 2 for v in numbers) / (n - 1) / n)
        return cls(mean, error, float(t.ppf(0.975, n - 1)) * error)


def estimate(accuracy: Accuracy, grid: Grid, variant: str, epsilon: float, share: float) -> SeedMean | None:
    if epsilon not in grid.epsilons_of(variant):
        return None
    runs = [canonical(GridRun(variant, epsilon, share, seed)) for seed in grid.seeds]
    return SeedMean.of(accuracy[r] for r in runs) if all(r in accuracy for r in runs) else None


def monotone(accuracy: Accuracy, grid: Grid) -> Check:
    worst, bad = -math.inf, list[str]()
    for variant in grid.variants:
        epsilons = grid.epsilons_of(variant)
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
    variants = [v for v in grid.variants if VARIANTS[v].uses_share and not VARIANTS[v].finite]
    if not variants or not {0.0, 1.0} <= set(grid.shares) or not math.isinf(top):
        return None
    lead = {v: _paired(accuracy, grid, (v, top, 0.0), (v, top, 1.0)) for v in variants}
    bad = [v for v, gain in lead.items() if not gain <= 0]
    return Check("without privacy, share 1 is no worse than share 0, within 2 SE", not bad, ", ".join(bad) or "none")


def spent(rows: Sequence[Mapping[str, str]], least: float = 0.95) -> Check:
    private = [r for r in rows if float(r["eps_target"]) != math.inf]
    used = [float(r["budget_used"]) for r in private]
    name = f"epsilon of every silo is at most the target, and at least {least:g} of the budget is used"
    holds = all(least <= u <= 1 for u in used) and all(float(r["eps_rdp"]) <= float(r["eps_target"]) for r in private)
    return Check(name, holds, f"used {min(used):.4f} to {max(used):.4f}" if used else "no private run")


def above_chance(accuracy: Accuracy, grid: Grid, classes: int) -> Check:
    low = min(grid.epsilons)
    estimates = {
        v: e for v in grid.variants for p in grid.shares_of(v)[-1:] if (e := estimate(accuracy, grid, v, low, p))
    }
    estimates = {v: e for v, e in estimates.items() if not math.isnan(e.mean)}
    if not estimates:
        return Check(f"epsilon {low:g} is above chance", False, "withheld: noise larger than signal")
    best = max(estimates, key=lambda v: estimates[v].mean)
    mean = estimates[best].mean
    return Check(f"epsilon {low:g} is above chance", mean > 1 / classes, f"{best} {mean:.4f}, chance {1 / classes:.4f}")


def _paired(accuracy: Accuracy, grid: Grid, low: tuple[str, float, float], high: tuple[str, float, float]) -> float:
    difference = SeedMean.of(
        accuracy[canonical(GridRun(*low, seed))] - accuracy[canonical(GridRun(*high, seed))] for seed in grid.seeds
    )
    return difference.mean - (0.0 if math.isnan(difference.error) else 2 * difference.error)


# ---- rows on disk ----------------------------------------------------------------------------------------------------


def append(file: Path, row: Mapping[str, object]) -> None:
    """Add one finished run; the file is replaced atomically."""
    write(file, [*read(file).values(), row])


def read(file: Path) -> dict[str, dict[str, str]]:
    """Read finished runs by their hash. Drops a last line that a crash of an earlier version cut off."""
    if not file.exists():
        return {}
    with file.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("git_sha") and None not in row]
    return {row["config_hash"]: row for row in rows}


def write(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Replace the file by these rows atomically; at least one row, all with the same keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_public(file, text.getvalue().encode())


# ---- tables and the plot ---------------------------------------------------------------------------------------------


def table5(accuracy: Accuracy, grid: Grid, dataset: str, split: str) -> str:
    shares = grid.shares
    lines = ["Final accuracy in %, mean ± standard error over seeds.", ""]
    variants = [v for v in grid.variants if VARIANTS[v].uses_share]
    for epsilon in sorted(grid.epsilons, reverse=True):
        lines += [f"### epsilon = {'inf (no privacy)' if math.isinf(epsilon) else f'{epsilon:g}'}", ""]
        lines.append("| dataset | split | method | FedAvg | " + " | ".join(f"{100 * p:g} %" for p in shares) + " |")
        lines.append("|---|---|---|" + "---|" * (1 + len(shares)))
        plain = _cell(estimate(accuracy, grid, "fedavg", epsilon, 1.0))
        for variant in variants:
            if epsilon not in grid.epsilons_of(variant):
                continue
            cells = [_cell(estimate(accuracy, grid, variant, epsilon, p)) for p in shares]
            name = f"{variant} (personal)" if VARIANTS[variant].personal else variant
            lines.append(f"| {dataset} | {split} | {name} | {plain} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def by_epsilon(accuracy: Accuracy, grid: Grid) -> str:
    epsilons, share = sorted(grid.epsilons, reverse=True), max(grid.shares)
    lines = [f"### All methods, {100 * share:g} % submitting prototypes", ""]
    lines.append("| method | " + " | ".join(f"epsilon {e:g}" for e in epsilons) + " |")
    lines.append("|---|" + "---|" * len(epsilons))
    for variant in grid.variants:
        cells = [_cell(estimate(accuracy, grid, variant, e, share)) for e in epsilons]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _cell(average: SeedMean | None) -> str:
    if average is None:
        return "-"
    if math.isnan(average.mean):
        return "withheld"
    error = "" if math.isnan(average.error) else f" ± {100 * average.error:.2f}"
    return f"{100 * average.mean:.2f}{error}"


_COLOURS = 10
_APART = 0.04
"""Horizontal distance between variants; a factor of 2 in epsilon is 1."""


def draw(accuracy: Accuracy, grid: Grid, file: Path, title: str) -> None:
    """Draw accuracy by epsilon into a file, on a log scale with a tick for "inf". Variants are shifted slightly."""
    finite = sorted(e for e in grid.epsilons if not math.isinf(e))
    places = {e: math.log2(e) for e in finite}
    if math.inf in grid.epsilons:
        places[math.inf] = (max(places.values()) if places else 0.0) + 1.5
    figure = require("matplotlib.figure", "research", "pictures").Figure(
        figsize=(3.6 * len(grid.shares) + 1.8, 3.8), layout="constrained"
    )
    require("matplotlib.backends.backend_agg", "research", "pictures").FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(grid.shares), sharey=True, squeeze=False)[0]
    for panel, share in zip(axes, grid.shares, strict=True):
        for number, variant in enumerate(grid.variants):
            points = [
                (places[e], average)
                for e in grid.epsilons_of(variant)
                if (average := estimate(accuracy, grid, variant, e, share)) is not None
            ]
            beside = _APART * (number - (len(grid.variants) - 1) / 2)
            x, mean = [p + beside for p, _ in points], [100 * f.mean for _, f in points]
            half = [0.0 if math.isnan(f.half) else 100 * f.half for _, f in points]
            line = "-" if number < _COLOURS else "--"
            panel.plot(x, mean, line, marker="o", markersize=4, linewidth=1.4, color=f"C{number}", label=variant)
            low = [m - h for m, h in zip(mean, half, strict=True)]
            high = [m + h for m, h in zip(mean, half, strict=True)]
            panel.fill_between(x, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
        panel.set_xticks(list(places.values()), ["inf" if math.isinf(e) else f"{e:g}" for e in places])
        if len(grid.shares) > 1:  # with one share there is no comparison, and the methods may have no prototypes
            panel.set_title(f"{100 * share:g} % submit prototypes")
        panel.set_xlabel("epsilon")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("final accuracy (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"{title}; bands: 95 % interval over {len(grid.seeds)} seeds")
    write_figure(file, figure)
