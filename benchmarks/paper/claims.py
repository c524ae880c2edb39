"""Write the claims of the five papers, each with our number and a verdict, into README.md and for the package.

    python -m benchmarks.paper.claims

Numbers are read from the stores of benchmarks/comparison: the mean of the last five rounds minus the baseline's, paired
by seed, with the 95 % interval of Student's t. A claim of a gain holds where that lies above 0, does not where it lies
below, and is open where it holds 0, or where nothing was run (claims.yaml says why).
"""

from __future__ import annotations

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
BEGIN, END = "<!-- python -m benchmarks.paper.claims -->", "<!-- end -->"


@cache
def found(name: str) -> tuple[Comparison, Mapping[str, Tuned]]:
    """Read a comparison from its store; raises DataError (E-DATA-02) where a run is missing."""
    asked = settings.load(name)
    return asked, study.compared(asked, run.stored_runs(run.RESULTS / f"{name}.jsonl"), None)


def verdict(low: float, high: float) -> str:
    if low > 0:
        return "**holds**"
    return "**does not**" if high < 0 else "open: not told from 0"


def row(claim: Mapping[str, object]) -> list[str]:
    """Return paper, claim, the paper's number, ours, verdict and comparison of a claim."""
    head = [str(claim["paper"]), str(claim["claim"]), str(claim["printed"])]
    if "ours" not in claim:
        return [*head, "-", str(claim.get("verdict", f"open: {claim.get('why')}")), ""]
    name, method, measure = claim["ours"]  # type: ignore[misc]
    asked, runs = found(str(name))
    ours, theirs = (report.percent(runs[m], str(measure), study.mean_of_last) for m in (str(method), asked.baseline))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    low, high = report.interval(gaps)
    said = f"{fmean(gaps):+.1f} [{low:.1f}, {high:.1f}], {len(gaps)} seeds, {CURVES[str(measure)].split(',')[0]}"
    return [*head, said, verdict(low, high), f"`{name}`"]


def markdown() -> str:
    claims = yaml.safe_load((HERE / "claims.yaml").read_text())
    head = ["paper", "claim", "printed", "ours, points", "verdict", "comparison"]
    return "\n".join(report.table(head, [row(claim) for claim in claims]))


def packaged() -> str:
    """Write the claims for `coordinator methods --papers`, which has no stores: tabs between the columns."""
    lines = ["# Claims of the papers; `make protos` writes this file.\n"]
    for claim in yaml.safe_load((HERE / "claims.yaml").read_text()):
        paper, said, printed, ours, decided, name = (text.replace("*", "").replace("`", "") for text in row(claim))
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
