"""A whole hospital at work, whose records and whose whole have a budget; and runs that the lead looks at."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.lead.client import LeadClient
from fl_core import datasets
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.silo_round import run_silo_round
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from silo.storage.home import Home
from tests.support.fake_coordinator import Hospital
from tests.support.privacy import DATA, HOSPITAL, SEEDED_POLICY, TEST, TRAIN, private
from tests.support.recorded_runs import Case, Client, records


@pytest.fixture
def serving(tmp_path: Path):
    """Make hospitals whose records and whose whole have a budget, at work until the test ends."""
    made: list[Hospital] = []

    def start(run, run_round=run_silo_round, **settings) -> Hospital:
        home = Home(tmp_path / f"home{len(made)}").make()
        home.policy.write_text(SEEDED_POLICY)
        ledger = Ledger(home.ledger)
        register(ledger, datasets.load(DATA), "center1")
        for name in (TRAIN, TEST, HOSPITAL):
            ledger.set_budget(name, 1000.0, 1e-5, "dpo", "test")
        made.append(Hospital(home.path, run, run_round, **settings))
        made[-1].start()
        return made[-1]

    yield start
    for hospital in made:
        hospital.end()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put runs of given sums into a store that the lead's commands read."""
    made = []

    def make(correct: float, examples: float, manifest: RunManifest | None = None, personal: bool = True) -> Case:
        case = Case(tmp_path / f"{len(made)}", manifest or private(), records(correct, examples, personal))
        made.append(case)

        monkeypatch.setattr(LeadClient, "open", lambda _: Client(case))
        return case

    yield make
    for case in made:
        case.store.close()
