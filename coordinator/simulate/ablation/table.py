"""The rows on disk, and the table in the layout of FedMR's Table 5 (Fan et al., TMLR 2023)."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.simulate.ablation.checks import Accuracy, Estimate, estimate
from coordinator.simulate.ablation.grid import VARIANTS, Grid
from fl_core.errors.extras import require

COLUMNS = (
    "config_hash",
    "shared_run_id",
    "method",
    "coupled_mode",
    "split",
    "share",
    "eps_target",
    "eps_rdp",
    "eps_prv",
    "budget_used",
    "delta",
    "z_min",
    "z_max",
    "z_p",
    "C1",
    "C2",
    "q_min",
    "q_max",
    "T",
    "rounds",
    "seed",
    "acc_final",
    "acc_best_public",
    "worst_class_acc",
    "per_class_acc",
    "measure",
    "wall_s",
    "private",
    "git_sha",
)


def append(file: Path, row: Mapping[str, object]) -> None:
    """Add one finished run; a line is written whole or not at all as far as `read` is concerned."""
    new = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def read(file: Path) -> dict[str, dict[str, str]]:
    """Read finished runs by their hash; a last line that was cut off by a crash is dropped."""
    if not file.exists():
        return {}
    with file.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("git_sha") and None not in row]
    return {row["config_hash"]: row for row in rows}


def write(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def table5(accuracy: Accuracy, grid: Grid, dataset: str, split: str) -> str:
    shares = [*grid.shares]
    lines = ["Final accuracy in %, mean ± standard error over seeds.", ""]
    variants = [v for v in grid.variants if VARIANTS[v].uses_share]
    for epsilon in sorted(grid.epsilons, reverse=True):
        lines += [f"### epsilon = {'inf (no privacy)' if math.isinf(epsilon) else f'{epsilon:g}'}", ""]
        lines.append("| dataset | split | method | FedAvg | " + " | ".join(f"{100 * p:g} %" for p in shares) + " |")
        lines.append("|---|---|---|" + "---|" * (1 + len(shares)))
        plain = _cell(estimate(accuracy, grid, "fedavg", epsilon, 1.0))
        for variant in variants:
            if VARIANTS[variant].finite and math.isinf(epsilon):
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
        at = share if VARIANTS[variant].uses_share else 1.0
        cells = [_cell(estimate(accuracy, grid, variant, e, at)) for e in epsilons]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _cell(found: Estimate | None) -> str:
    if found is None:
        return "-"
    if math.isnan(found.mean):
        return "withheld"
    error = "" if math.isnan(found.error) else f" ± {100 * found.error:.2f}"
    return f"{100 * found.mean:.2f}{error}"


# ---- the picture -----------------------------------------------------------------------------------------------------

_APART = 0.04
"""How far variants stand beside each other; a factor 2 of epsilon is 1."""


def draw(accuracy: Accuracy, grid: Grid, file: Path, title: str) -> None:
    """Draw into a file; epsilon on a log scale, "inf" a tick of its own; variants stand a little beside each other."""
    finite = sorted(e for e in grid.epsilons if not math.isinf(e))
    places = {e: math.log2(e) for e in finite}
    if math.inf in grid.epsilons:
        places[math.inf] = (max(places.values()) if places else 0.0) + 1.5
    figure = require("matplotlib.figure", "plots", "pictures").Figure(
        figsize=(3.6 * len(grid.shares) + 1.8, 3.8), layout="constrained"
    )
    require("matplotlib.backends.backend_agg", "plots", "pictures").FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(grid.shares), sharey=True, squeeze=False)[0]
    for panel, share in zip(axes, grid.shares, strict=True):
        for number, variant in enumerate(grid.variants):
            at = share if VARIANTS[variant].uses_share else 1.0
            points = [
                (places[e], found)
                for e in sorted(grid.epsilons)
                if not (VARIANTS[variant].finite and math.isinf(e))
                if (found := estimate(accuracy, grid, variant, e, at)) is not None
            ]
            beside = _APART * (number - (len(grid.variants) - 1) / 2)
            x, mean = [p + beside for p, _ in points], [100 * f.mean for _, f in points]
            half = [0.0 if math.isnan(f.half) else 100 * f.half for _, f in points]
            panel.plot(x, mean, marker="o", markersize=4, linewidth=1.4, color=f"C{number}", label=variant)
            low = [m - h for m, h in zip(mean, half, strict=True)]
            high = [m + h for m, h in zip(mean, half, strict=True)]
            panel.fill_between(x, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
        panel.set_xticks(list(places.values()), ["inf" if math.isinf(e) else f"{e:g}" for e in places])
        panel.set_title(f"{100 * share:g} % submit prototypes")
        panel.set_xlabel("epsilon")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("final accuracy (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"{title}; bands: 95 % interval over {len(grid.seeds)} seeds")
    figure.savefig(file, dpi=120)
