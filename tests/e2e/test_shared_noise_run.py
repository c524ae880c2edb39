"""Noise shared out under masks, through real processes: the model of the simulation, and the promise in the ledgers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_spec
from fl_core import datasets
from privacy.accounting.accountant import epsilon_of
from privacy.accounting.shared_noise import SharedNoise
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from silo.storage.home import Home
from tests.support.processes import world

DELTA = 1e-5
DATA = {f"hospital{k}": f"digits/p4c3/{k}" for k in range(4)}
RUN = (
    "data=digits",
    "federation=p4c3",
    "seed=3",
    "secagg=on",
    "privacy.rng=test",
    "privacy.test_data=public",
    "privacy.placement=distributed",
)
POLICY = '[privacy]\nrng = "test"\npublic_test = true\nmin_noise_alone = 0\n'
RUNS = {
    ("train", 4): ("method=analytic", "model=random_features", "privacy=dp_record", "secagg.min_sum=4"),
    ("hospital", 3): ("method=fedproto", "rounds=2", "train.epochs=1", "privacy=dp_silo_small"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_runs_with_shared_noise_equal_their_simulation_and_are_charged_as_promised(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.init()
        made.serve()
        for name, data in DATA.items():
            (made.join if name == "hospital0" else made.enrol)(name)
            home = Home(made.folder / name)
            home.policy.write_text(POLICY)
            ledger = Ledger(home.ledger)
            register(ledger, datasets.load(data), "digits")
            for collection in ("digits/train", "digits/test", "hospital"):
                ledger.set_budget(collection, 200.0, DELTA, "dpo", "test")
            made.silo(name, data)
        made.online(list(DATA), 240)
        for (charged, m), words in RUNS.items():
            run = made.submit(*RUN, *words)
            simulated = runner.run(compose_spec((*RUN, *words))).summary()
            done = made.wait(run, seconds=300)
            assert done["model_digest"] == simulated["model_digest"]
            printed: Any = simulated["privacy"]
            assert printed["epsilon_all_honest"] < printed["epsilon"] < printed["epsilon_masks_broken"]
            for name in DATA:
                book = Ledger(made.folder / name / "ledger.db")
                collection = "hospital" if charged == "hospital" else "digits/train"
                mine = [(entry, planned) for entry, _, planned in book.entries(collection)]
                of_run = [p for entry, planned in mine for p in planned if entry.startswith(f"{run}/")]
                assert {p.shared for p in of_run} == {SharedNoise(4, m, 1)}
                spent = epsilon_of([p.mechanism for p in of_run], DELTA)
                assert spent == pytest.approx(printed["epsilon_by_silo"][name])
                assert epsilon_of([p.alone for p in of_run], DELTA) == pytest.approx(printed["epsilon_masks_broken"])
