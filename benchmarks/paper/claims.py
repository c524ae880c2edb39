"""Write the claims of the five papers, each with our number and a verdict, into README.md and for the package.

    python -m benchmarks.paper.claims

Numbers are read from the stores of benchmarks/comparison: the mean of the last five rounds minus the baseline's, paired
by seed, with the 95 % interval of Student's t. A claim of a gain holds where that lies above 0. It does not hold where
the interval lies below 0 or below the printed gain, in a setting in which the paper claims it and where our baseline
has learnt about as much as the paper's (claims.yaml: level). All else is not decided, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean

import yaml

from benchmarks.comparison import report, run, settings, study
from benchmarks.comparison.settings import CURVES, Comparison
from benchmarks.comparison.study import Tuned

HERE = Path(__file__).parent
PACKAGED = HERE.parents[1] / "fl_core/methods/paper_claims.txt"
GATE = 8.0
"""Points that the baseline may be from the paper's for a verdict against a claim."""
BEGIN, END = "<!-- python -m benchmarks.paper.claims -->", "<!-- end -->"


@cache
def found(name: str) -> tuple[Comparison, Mapping[str, Tuned]]:
    """Read a comparison from its store; raises DataError (E-DATA-02) where a run is missing."""
    asked = settings.load(name)
    return asked, study.compared(asked, run.stored_runs(run.RESULTS / f"{name}.jsonl"), None)


def verdict(low: float, high: float, baseline: float, level: float | None, printed: float) -> str:
    """Judge a gain by its interval.

    baseline: ours, %   level: the paper's baseline in this setting, %; None where the paper claims nothing there
    """
    if low > 0:
        return "**holds**"
    if level is None:
        return f"not decided: {'behind' if high < 0 else 'not told from 0'}, in a setting that is not the paper's"
    if abs(baseline - level) > GATE:
        return f"not decided: the baseline has {baseline:.1f} %, the paper's {level:.1f}"
    if high < min(printed, 0.0):
        return "**does not**: behind"
    return "**does not**: the printed gain is above the interval" if high < printed else "not decided: too few seeds"


def row(claim: Mapping[str, object]) -> list[str]:
    """Return paper, claim, the paper's number, ours, verdict, what was tuned and comparison of a claim."""
    head = [str(claim["paper"]), str(claim["claim"]), str(claim["printed"])]
    if "ours" not in claim:
        return [*head, "-", str(claim.get("verdict", f"not decided: {claim.get('why')}")), "", ""]
    name, method, measure = claim["ours"]  # type: ignore[misc]
    asked, runs = found(str(name))
    ours, theirs = (report.percent(runs[m], str(measure), study.mean_of_last) for m in (str(method), asked.baseline))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    low, high = report.interval(gaps)
    said = f"{fmean(gaps):+.1f} [{low:.1f}, {high:.1f}], {len(gaps)} seeds, {CURVES[str(measure)].split(',')[0]}"
    level = claim.get("level")
    printed = math.inf if level is None else float(str(claim["printed"]))
    judged = verdict(low, high, fmean(theirs), None if level is None else float(str(level)), printed)
    tuned = [f"lr {runs[str(method)].lr:g}"]
    tuned += [w.removeprefix("method.") for w in runs[str(method)].words if w.startswith("method.")]
    return [*head, said, judged, ", ".join(tuned), f"`{name}`"]


def markdown() -> str:
    claims = yaml.safe_load((HERE / "claims.yaml").read_text())
    head = ["paper", "claim", "printed", "ours, points", "verdict", "rate and weights", "comparison"]
    return "\n".join(report.table(head, [row(claim) for claim in claims]))


def packaged() -> str:
    """Write the claims for `coordinator methods --papers`, which has no stores: tabs between the columns."""
    lines = ["# Claims of the papers; `make protos` writes this file.\n"]
    for claim in yaml.safe_load((HERE / "claims.yaml").read_text()):
        paper, said, printed, ours, decided, _, name = (text.replace("*", "").replace("`", "") for text in row(claim))
        verdict, _, why = decided.partition(": ")
        scale = found(name)[0].title if name else ""
        lines.append("\t".join((paper.lower(), said, printed, ours, verdict, why, name, scale)) + "\n")
    return "".join(lines)


def written(page: str) -> str:
    """Put the table between the marks of a page."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    file = HERE / "README.md"
    file.write_text(written(file.read_text()))
    PACKAGED.write_text(packaged())
    print(markdown())
