"""`coordinator methods --papers`: each method's paper, what it needs, and where its numbers are."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from consilium.report.papers import CLAIMS, TABLES, paper_of
from consilium.research.commands import methods
from fl_core.methods import METHODS
from tests.regenerate import ROOT


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"local"}))
def test_every_method_but_local_training_cites_a_paper_with_its_equations(name: str) -> None:
    paper = paper_of(METHODS[name])
    assert paper is not None
    assert " and " in paper.authors
    assert 20 < len(paper.title) < 200
    assert 2017 <= int(paper.venue[-4:]) <= 2026


def test_a_method_without_a_citation_has_none() -> None:
    assert paper_of(METHODS["local"]) is None


def test_papers_are_those_of_the_docstrings() -> None:
    found = paper_of(METHODS["fedmr"])
    assert found is not None
    assert found.title == "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping"
    assert (found.venue, found.where) == ("TMLR 2023", "equations 3 to 5 and Algorithm 1")
    other = paper_of(METHODS["fedper"])
    assert other is not None
    assert (other.venue, other.where) == ("arXiv:1912.00818, 2019", "Algorithms 1 and 2")


def test_tables_are_those_of_the_benchmark_that_run_the_method() -> None:
    for name, tables in TABLES.items():
        assert name in METHODS
        for table in tables:
            words = yaml.safe_load((ROOT / f"benchmarks/paper/tables/{table}.yaml").read_text())["methods"].values()
            assert any(re.search(rf"\bmethod={name}(_paper|_code)?\b", str(said)) for said in words)


def test_the_command_says_paper_needs_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    methods(papers=True, as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(METHODS)
    assert "fedmr_1" in rows["fedmr"]["tables"]
    assert "prototypes of the silos" in rows["fedmr"]["needs"]
    assert rows["scaffold"]["venue"] == "ICML 2020"
    assert rows["local"]["title"] == ""
    methods(papers=True)
    assert "benchmarks/paper" in capsys.readouterr().out


def test_each_claim_of_the_papers_has_a_verdict_with_its_number_and_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert {c.method for c in CLAIMS} <= set(METHODS)
    assert {c.verdict for c in CLAIMS} <= {"holds", "holds against FedAvg alone", "does not", "not decided"}
    for claim in CLAIMS:
        assert bool(claim.why) or claim.verdict.startswith("holds")
        if claim.ours != "-":
            points, low, high = (float(x) for x in re.match(r"(\S+) \[(\S+), (\S+)\]", claim.ours).groups())  # type: ignore[union-attr]
            assert low <= points <= high
            assert not claim.verdict.startswith("holds") or low > 0
            assert claim.comparison
            assert len(claim.scale) > 20
    methods(papers=True, as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert [c["verdict"] for c in rows["map"]["claims"]] == [c.verdict for c in CLAIMS if c.method == "map"]
    assert rows["fedprox"]["claims"] == []
    methods(papers=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert "not decided" in shown
    assert any("global accuracy" in c["ours"] for c in rows["map"]["claims"])


def test_the_packaged_claims_agree_with_the_page_of_the_benchmark() -> None:
    page = (ROOT / "benchmarks/paper/results/claims.md").read_text()
    for claim in CLAIMS:
        assert f"| {claim.claim} | {claim.printed} | {claim.ours} |" in page
