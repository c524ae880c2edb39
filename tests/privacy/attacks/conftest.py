"""What tests of a whole hospital share here: one at work, whose records and whose whole have a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.rounds.silo_round import run_silo_round
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from silo.storage.home import Home
from tests.support.fake_coordinator import Hospital
from tests.support.privacy import DATA, HOSPITAL, SEEDED_POLICY, TEST, TRAIN


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
        hospital.stop()
        hospital.host.stop()
