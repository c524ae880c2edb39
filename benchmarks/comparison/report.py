"""A comparison written out: the table, what every rate scored, and how to get both again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev

from scipy.stats import t as student

from benchmarks import run_store
from benchmarks.comparison import study
from benchmarks.comparison.settings import CURVES, DIAGNOSTICS, Comparison
from benchmarks.comparison.study import Tuned
from benchmarks.run_store import Run
from privacy.accounting.uncertainty import LAST


def interval(gaps: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a mean by Student's t; NaN of fewer than two numbers."""
    if len(gaps) < 2:
        return math.nan, math.nan
    half = float(student.ppf(0.975, len(gaps) - 1)) * standard_error(gaps)
    return fmean(gaps) - half, fmean(gaps) + half


def standard_error(gaps: Sequence[float]) -> float:
    return stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan


def difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Write a paired difference: mean (standard error), in bold where its 95 % interval excludes 0."""
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(gaps)
    text = f"{fmean(gaps):+.1f}" + ("" if len(gaps) < 2 else f" ({standard_error(gaps):.1f})")
    return f"**{text}**" if low > 0 or high < 0 else text


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def percent(found: Tuned, measure: str, read: Callable[[Run, str], float]) -> list[float]:
    return [100 * read(run, measure) for run in found.runs.values()]


def target_of(asked: Comparison, found: Mapping[str, Tuned]) -> float:
    """Return what the baseline scores on the tuning seeds: no number of the table has a part in it."""
    return study.score(found[asked.baseline].tuning, asked.measures[0])


def rounds(found: Tuned, measure: str, target: float, never: int) -> list[float]:
    """Return each seed's rounds to the target; one that never reaches it counts one more than there are."""
    return [min(study.rounds_to(run, measure, target), never) for run in found.runs.values()]


def markdown(asked: Comparison, found: Mapping[str, Tuned], command: str = "") -> str:
    """Write the tables; command: what makes them, where that is not this package."""
    lines = [f"# {asked.title}", "", asked.question, ""]
    for measure in asked.measures:
        lines += [f"**{CURVES[measure][0].upper()}{CURVES[measure][1:]}, %**", "", *_main(asked, found, measure), ""]
    if asked.diagnostics:
        lines += ["**Features of the final global model** on the test images", "", *_diagnosed(asked, found), ""]
    failed = {m: sum("failed" in run for run in t.runs.values()) for m, t in found.items()}
    if any(failed.values()):
        said = ", ".join(f"{m} {n}" for m, n in failed.items() if n)
        lines += [f"Runs that ended without a model and count as 0 %: {said} of {len(asked.seeds)}.", ""]
    judged = run_store.outcomes_text({method: list(tuned.runs.values()) for method, tuned in found.items()})
    return "\n".join([*lines, judged, "", *_how(asked, found, command or f"benchmarks.comparison {asked.name}")])


def _main(asked: Comparison, found: Mapping[str, Tuned], measure: str) -> list[str]:
    base, first = found[asked.baseline], measure == asked.measures[0]
    head = ["method", "lr", f"mean of the last {LAST} rounds", f"minus {asked.baseline}", "best round"]
    head.append(f"minus {asked.baseline}")
    target, never = target_of(asked, found), _rounds(found) + 1
    if first:
        head += [f"rounds to {100 * target:.1f} %", f"minus {asked.baseline}"]
    rows = []
    for method, tuned in found.items():
        row, apart = [method, f"{tuned.lr:g}" + ("*" if tuned.on_the_edge else "")], method != asked.baseline
        for read in (study.mean_of_last, study.best):
            ours, theirs = percent(tuned, measure, read), percent(base, measure, read)
            row += [spread(ours), difference(ours, theirs) if apart else ""]
        if first:
            ours, theirs = (rounds(t, measure, target, never) for t in (tuned, base))
            reached = sum(n < never for n in ours)
            middle = f"{median(ours):g}" if median(ours) < never else f"> {never - 1}"
            row += [f"{middle} ({reached} of {len(ours)})", difference(ours, theirs) if apart else ""]
        rows.append(row)
    return table(head, rows)


def _diagnosed(asked: Comparison, found: Mapping[str, Tuned]) -> list[str]:
    def of(run: Run, name: str) -> float:
        return float(str(run.get(name, math.nan)))

    rows = []
    for method, tuned in found.items():
        row = [method]
        for name in asked.diagnostics:
            values = [v for run in tuned.runs.values() if not math.isnan(v := of(run, name))]
            row.append(f"{fmean(values):.3g} ± {stdev(values):.2g}" if len(values) > 1 else "-")
        rows.append(row)
    return table(["method", *(DIAGNOSTICS[name] for name in asked.diagnostics)], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def _rounds(found: Mapping[str, Tuned]) -> int:
    """Return how many rounds the runs have; raises ValueError where all failed."""
    every: list[Run] = [run for t in found.values() for run in (*t.runs.values(), *t.tuning)]
    return max(len(curve) for run in every for name in CURVES if (curve := study.curve(run, name)))


def _how(asked: Comparison, found: Mapping[str, Tuned], command: str) -> list[str]:
    several = any(len(variants) > 1 for variants in asked.methods.values())
    tuning = [
        [m, *([f"`{' '.join(words)}`"] if several else []), *(f"{100 * s:.1f}" for s in scores.values())]
        for m, t in found.items()
        for words, scores in t.scores.items()
    ]
    variants = max(len(variants) for variants in asked.methods.values())
    budget = variants * len(asked.lrs) * len(asked.tuning_seeds)
    searched = f"every rate of one grid with each of {variants} variants" if several else "every rate of one grid"
    seconds = [float(str(run["cpu_seconds"])) for t in found.values() for run in t.runs.values()]
    words = [f"- {m}: `{' '.join(t.words)}`" for m, t in found.items()]
    places = {str(run.get("device", "older runs do not say where")) for t in found.values() for run in t.runs.values()}
    return [
        f"Mean ± standard deviation over {len(asked.seeds)} seeds ({_listed(asked.seeds)}), of partition, weights and "
        f"batches; differences are paired by seed: mean (standard error), bold where the 95 % interval (Student's t) "
        "excludes 0; no correction for the number of rows. The best round is chosen on test data. The target is what "
        f"{asked.baseline} has in the last {LAST} rounds on the tuning seeds; rounds to it are the median (and how "
        f"many seeds reach it), and one that never does counts {_rounds(found) + 1}.",
        "",
        f"Each method's rate is tuned alone, with {budget} runs: {searched} on seeds "
        f"{_listed(asked.tuning_seeds)}, by {CURVES[asked.measures[0]]} in the last {LAST} rounds. Scores, %; "
        "*: the chosen rate is an end of the grid:",
        "",
        *table(["method", *(["with"] if several else []), *(f"lr {lr:g}" for lr in asked.lrs)], tuning),
        "",
        f"All runs: `coordinator simulate {' '.join(asked.words)}`, with",
        "",
        *words,
        "",
        f"`python -m {command}`; median {median(seconds):.1f} CPU seconds a run; {'; '.join(sorted(places))}.",
        "",
    ]


def _listed(seeds: Sequence[int]) -> str:
    consecutive = list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))) and len(seeds) > 2
    return f"{seeds[0]} to {seeds[-1]}" if consecutive else ", ".join(map(str, seeds))
