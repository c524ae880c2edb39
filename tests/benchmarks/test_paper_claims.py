"""The papers' claims: the page is what the stores make, and a verdict follows from an interval alone."""

from __future__ import annotations

import pytest

from benchmarks.comparison import settings
from benchmarks.paper import claims


def test_the_page_is_what_the_stores_make_of_the_claims() -> None:
    page = (claims.HERE / "README.md").read_text()
    assert claims.written(page) == page
    assert len(page.splitlines()) <= 60
    assert {paper for paper in ("FedMR", "FedGELA", "FedNH", "MAP", "FedCD") if f"| {paper} |" in page} == {
        *("FedMR", "FedGELA", "FedNH", "MAP", "FedCD")
    }


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.1, 3.0, "**holds**"),
        (-3.0, -0.1, "**does not**"),
        (-1.0, 2.0, "open: not told from 0"),
        (0.0, 2.0, "open: not told from 0"),
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_zero(low: float, high: float, said: str) -> None:
    assert claims.verdict(low, high) == said


def test_a_claim_without_runs_says_why() -> None:
    row = claims.row({"paper": "FedNH", "claim": "GM", "printed": "+2.61", "why": "a GPU's work"})
    assert row[3:5] == ["-", "open: a GPU's work"]


def test_every_comparison_stands_behind_a_claim() -> None:
    asked = {name for name in settings.names() if f"[{name}," in (claims.HERE / "claims.yaml").read_text()}
    assert asked == set(settings.names())
