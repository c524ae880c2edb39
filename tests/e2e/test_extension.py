"""A method of another distribution over real processes: run where the hospital's policy names it, refused elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_spec
from tests.support import processes
from tests.support.extensions import install
from tests.support.processes import world

SHORT = ("data=digits", "federation=p2c5", "rounds=2", "train.max_steps=3", "seed=3", "method=mine", "method.mu=0.25")
ALLOWED = "[runs]\nextensions = ['mine-package==1.2']\n"


def allow(home: Path) -> None:
    (home / "policy.toml").write_text(ALLOWED)
    (home / "policy.toml").chmod(0o600)


@pytest.mark.slow
def test_a_hospital_runs_code_that_its_policy_names_and_ends_in_the_model_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    monkeypatch.setitem(processes.ENV, "PYTHONPATH", str(tmp_path / "site"))
    with world(tmp_path / "world") as made:
        made.folder.mkdir()
        made.init()
        process = made.start(
            *("coordinator", "coordinator", "serve", "--home", str(made.home), "--bind", made.address),
            *("--extension", "mine-package"),
        )
        processes.until(lambda: made._up(process), "the coordinator")
        for k in range(2):
            made.enrol(f"hospital{k}")
            made.silo(f"hospital{k}", f"digits/p2c5/{k}")
        made.online(["hospital0", "hospital1"])
        allow(made.folder / "hospital0")
        done = made.wait(made.submit(*SHORT, "quorum=1"))
        assert all("E-POLICY-15" in r["missing"]["hospital1"] for r in done["round"])
        assert all("mine_package" not in str(r["missing"].get("hospital0", "")) for r in done["round"])
        allow(made.folder / "hospital1")
        done = made.wait(made.submit(*SHORT))
        assert all(r["missing"] == {} for r in done["round"])
        simulated = runner.run(compose_spec(SHORT))
        assert done["model_digest"] == simulated.model_digest
        assert "Mine_Package 1.2" in made.log("coordinator")
