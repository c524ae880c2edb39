"""What is shown of a run's method and privacy: as computed, as stored, and where neither can be."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.runs import lineage, run_facts
from coordinator.runs.run_facts import DerivedFacts
from coordinator.storage.store import CoordinatorStore
from fl_core.methods.disjoint.analytic import Analytic
from fl_core.rounds.manifest import RunManifest
from privacy.accounting.uncertainty import UNKNOWN
from tests.support.coordinator import running
from tests.support.federations import NAMES, manifest
from tests.support.privacy import hospital_level, private
from tests.support.recorded_runs import record_run


def chosen_by_0_1_0(agreed: RunManifest) -> RunManifest:
    """Add what layouts had where hospitals answered how often each lambda was right."""
    spec = agreed.layout["classes"]
    return replace(agreed, layout={**agreed.layout, "classes": replace(spec, shapes={**spec.shapes, "right": (4, 7)})})


RUNS = {
    "plain": (manifest(), 0, "norm_clipped"),
    "sums": (manifest("analytic"), 1, "norm_clipped"),
    "sums, lambda chosen by 0.1.0": (chosen_by_0_1_0(manifest("analytic")), 2, "norm_clipped"),
    "records": (private(), 0, "norm_clipped"),
    "without a global model": (private("local"), 0, "norm_clipped"),
    "hospitals": (hospital_level(), 0, "mean"),
    "hospitals, published tests": (hospital_level(test_data="public"), 0, "mean"),
}


@pytest.mark.parametrize("name", RUNS)
def test_facts_are_those_of_the_method_and_the_profile_and_survive_being_stored(name: str) -> None:
    agreed, exchanges, aggregator = RUNS[name]
    facts = run_facts.computed(agreed.to_json())
    assert (facts.exchanges, facts.aggregator) == (exchanges, aggregator)
    stored = DerivedFacts.from_dict(json.loads(json.dumps(facts.to_dict())))
    assert (stored.exchanges, stored.aggregator) == (exchanges, aggregator)
    assert (stored.noise.evaluation, stored.noise.scores) == (facts.noise.evaluation, facts.noise.scores)
    assert (facts.noise.evaluation is not None) == (name in ("records", "hospitals"))
    assert bool(facts.noise.scores) == (agreed.privacy.name != "none")


def test_a_run_is_stored_with_its_facts(tmp_path: Path) -> None:
    with running(tmp_path / "home", NAMES) as world:
        run = world.submit(manifest(rounds=1))
        assert run.facts == run_facts.computed(run.manifest).to_dict()


def test_runs_of_earlier_versions_get_the_facts_that_can_be_computed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with closing(CoordinatorStore(tmp_path)) as store:
        agreed = {"plain": None, "private": private(), "sums": manifest("analytic")}
        for name, one in agreed.items():
            record_run(store, name, [0.2, 0.6], agreed=one)
        run_facts.complete(store.runs)
        for name in agreed:
            run = store.runs.get(name)
            assert run.facts == run_facts.computed(run.manifest).to_dict()


def test_a_service_starts_where_no_process_can_compute_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    with closing(CoordinatorStore(tmp_path)) as store:
        run = record_run(store, "plain", [0.2, 0.6])
        for program in ("/nowhere/python", "/bin/false", "/bin/true"):
            monkeypatch.setattr("sys.executable", program)
            run_facts.complete(store.runs)
        assert store.runs.get(run.id).facts is None
        assert DerivedFacts.of(run).aggregator == "norm_clipped"


def test_a_manifest_that_nobody_can_read_withholds_numbers() -> None:
    assert run_facts.computed('{"format": 99}') == DerivedFacts(noise=UNKNOWN)


def test_the_method_whose_runs_keep_sums_is_named_as_its_class() -> None:
    assert Analytic.name == lineage.SUMS
