"""Silo-level privacy through real processes: charged to the hospital and to its records, equal to the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_spec
from fl_core import datasets
from privacy.accounting.accountant import epsilon_of
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from silo.storage.home import Home
from tests.support.processes import world

DELTA = 1e-5
DATA = {"hospital0": "digits/p2c5/0", "hospital1": "digits/p2c5/1"}
RUN = (
    "method=fedproto",
    "data=digits",
    "federation=p2c5",
    "rounds=2",
    "train.epochs=1",
    "seed=3",
    "privacy=dp_silo_small",
    "privacy.rng=test",
    "privacy.epsilon=8",
)
TERMS = {
    "fixed": ("privacy.clipping=fixed",),
    "adaptive": ("privacy.clipping=adaptive", "privacy.bit_noise=20", "privacy.weights=uniform"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_silo_level_runs_are_charged_as_printed_and_equal_the_simulation(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.init()
        made.serve()
        for name, data in DATA.items():
            made.join(name)
            home = Home(made.folder / name)
            home.policy.write_text('[privacy]\nrng = "test"\n')
            ledger = Ledger(home.ledger)
            register(ledger, datasets.load(data), "digits")
            for collection in ("digits/train", "digits/test", "hospital"):
                ledger.set_budget(collection, 200.0, DELTA, "dpo", "test")
            made.silo(name, data)
        made.online(list(DATA), 240)
        for terms in TERMS.values():
            run = made.submit(*RUN, *terms)
            simulated = runner.run(compose_spec((*RUN, *terms))).summary()
            done = made.wait(run, seconds=300)
            assert done["model_digest"] == simulated["model_digest"]
            assert all(r["missing"] == {} for r in done["round"])
            printed: Any = simulated["privacy"]
            for name in DATA:
                book = Ledger(made.folder / name / "ledger.db")
                assert book.status("hospital", prv=False).unit == "hospital"
                for collection, wanted in (
                    ("hospital", printed["epsilon_by_silo"][name]),
                    ("digits/train", printed["epsilon_record"]),
                ):
                    mine = [e for e in book.entries(collection) if e[0].startswith(f"{run}/")]
                    assert {state for _, state, _ in mine} == {"SPENT"}
                    releases = [p.mechanism for _, _, planned in mine for p in planned]
                    assert epsilon_of(releases, DELTA) == pytest.approx(wanted)
            assert 6 < printed["epsilon"] <= 8 < printed["epsilon_record"] < 20
