"""Write the claims of the five papers, each with our number and a verdict, into results/claims.md and for the package.

    python -m benchmarks.paper.claims

A claim is judged under a protocol of benchmarks/comparison/protocols, by the one rule of `comparison.verdicts`. The
rows of claims.yaml are of older comparisons, whose rates were chosen on test images: their numbers have no verdict, and
stand here until a protocol that is complete replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import yaml

from benchmarks.comparison import protocol, report, run, settings, study, verdicts
from benchmarks.comparison.protocol import Protocol
from benchmarks.comparison.search import Searched
from benchmarks.comparison.settings import CURVES, Comparison
from benchmarks.comparison.study import Tuned
from fl_core.errors import DataError

HERE = Path(__file__).parent
PACKAGED = HERE.parents[1] / "consilium/report/paper_claims.txt"
PAGE = HERE / "results/claims.md"
BEGIN, END = "<!-- python -m benchmarks.paper.claims -->", "<!-- end -->"
OLDER = "rates chosen on test images"
UNFINISHED = "the protocol's runs are not all made"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; comparison: a protocol or a setting, whose title is the scale; empty without numbers."""

    paper: str
    claim: str
    printed: str
    ours: str
    verdict: str
    why: str
    chosen: str
    comparison: str
    scale: str

    def cells(self) -> list[str]:
        verdict = self.verdict if self.verdict == verdicts.OPEN else f"**{self.verdict}**"
        judged = f"{verdict}: {self.why}" if self.why else verdict
        name = self.comparison and f"`{self.comparison}`"
        return [self.paper, self.claim, self.printed, self.ours, judged, self.chosen, name]

    def fields(self) -> list[str]:
        told = (self.claim, self.printed, self.ours, self.verdict, self.why, self.comparison, self.scale)
        return [self.paper.lower(), *told]


@cache
def compared(name: str) -> tuple[Comparison, Mapping[str, Tuned]]:
    """Read a comparison from its store; raises DataError (E-DATA-02) where a run is missing."""
    asked = settings.load(name)
    return asked, study.compared(asked, run.stored_runs(run.RESULTS / f"{name}.jsonl"), None)


@cache
def followed(name: str) -> tuple[Protocol, Mapping[str, Searched] | None]:
    """Read a protocol and its runs; None where its store does not have all of them yet."""
    fixed = protocol.load(name)
    try:
        return fixed, run.protocol_rows(fixed, run.RESULTS / f"{name}.jsonl")
    except DataError as error:
        if error.code != "E-DATA-02":  # a run is missing; a store that cannot be read is not unfinished
            raise
        return fixed, None


def judged(name: str) -> Iterator[Row]:
    """Yield the claims of a protocol."""
    fixed, rows = followed(name)
    for claim in fixed.claims:
        head = claim.paper, claim.claim, "-" if claim.printed is None else f"{claim.printed:+g}"
        if rows is None:
            yield Row(*head, "-", verdicts.OPEN, UNFINISHED, "", name, fixed.title)
            continue
        verdict = verdicts.judge(claim, fixed, rows)
        words, lr = rows[claim.method].chosen
        ours = f"{verdict.against_fedavg} ({verdict.fedavg}), {verdict.against_best} ({verdict.best})"
        chosen = ", ".join([f"lr {lr:g}", *(w.removeprefix("method.") for w in words if not w.startswith("method="))])
        yield Row(*head, ours, verdict.word, verdict.why, chosen, name, fixed.title)


def older(raw: Mapping[str, object]) -> Row:
    """Return a row of claims.yaml: a number without a verdict, or what the file says where nothing was run."""
    head = str(raw["paper"]), str(raw["claim"]), str(raw["printed"])
    if "ours" not in raw:
        return Row(*head, "-", str(raw.get("verdict", verdicts.OPEN)), str(raw["why"]), "", "", "")
    name, method, measure = raw["ours"]  # type: ignore[misc]
    asked, runs = compared(str(name))
    ours, theirs = (report.percent(runs[m], str(measure), study.mean_of_last) for m in (str(method), asked.baseline))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    low, high = report.interval(gaps)
    text = f"{fmean(gaps):+.1f} [{low:.1f}, {high:.1f}], {len(gaps)} seeds, {CURVES[str(measure)].split(',')[0]}"
    chosen = [f"lr {runs[str(method)].lr:g}"]
    chosen += [w.removeprefix("method.") for w in runs[str(method)].words if w.startswith("method.")]
    return Row(*head, text, verdicts.OPEN, OLDER, ", ".join(chosen), asked.name, asked.title)


def rows() -> list[Row]:
    """List all claims: those of the protocols, then the older ones that no complete protocol replaces."""
    made = [row for name in protocol.names() for row in judged(name)]
    listed = yaml.safe_load((HERE / "claims.yaml").read_text())
    left = [raw for raw in listed if "replaced_by" not in raw or followed(raw["replaced_by"])[1] is None]
    return [*made, *map(older, left)]


def markdown() -> str:
    head = ["paper", "claim", "printed", "ours, points", "verdict", "rate and weights", "comparison"]
    return "\n".join(report.table(head, [row.cells() for row in rows()]))


def packaged() -> str:
    """Write the claims for `coordinator methods --papers`, which has no stores: tabs between the columns."""
    lines = ["\t".join(row.fields()) + "\n" for row in rows()]
    return "".join(["# Claims of the papers; `make protos` writes this file.\n", *lines])


def written(page: str) -> str:
    """Put the table between the marks of a page."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    PACKAGED.write_text(packaged())
    print(markdown())
