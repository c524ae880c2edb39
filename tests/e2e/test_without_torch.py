"""A hospital whose interpreter has no torch, service and worker, in runs with hospitals that have it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_spec
from tests.support.encoders import vit_file
from tests.support.processes import World
from tests.test_light_services import ColdWorld, maps

pytestmark = pytest.mark.slow

LEAN = "hospital1"
SITES = [f"digits/p4c3/{k}" for k in range(4)]
SHORT = ("data=digits", "federation=p4c3", "seed=3")


class MixedWorld(ColdWorld):
    """A federation in which one hospital's processes cannot import torch."""

    def start(self, name: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        if name == LEAN:
            blocked = self.folder / "blocked"
            blocked.mkdir(exist_ok=True)
            (blocked / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
            env = {**(env or {}), "PYTHONPATH": str(blocked)}
        return super().start(name, *words, env=env)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = MixedWorld(tmp_path_factory.mktemp("mixed"))
    try:
        made.federation(SITES, "--device", "cpu")
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize("secagg", ["on", "off"])
def test_the_model_is_that_of_the_simulation_with_torch(mixed: World, tmp_path: Path, secagg: str) -> None:
    words = (
        *SHORT,
        f"secagg={secagg}",
        "method=analytic",
        "rounds=1",
        "model=frozen",
        f"model.body={vit_file(tmp_path)}",
    )
    run = mixed.lead("run", *words, "--detach")["run"]
    done = mixed.wait(run)
    assert done["round"][0]["included"] == [f"hospital{k}" for k in range(4)]
    simulated = runner.run(compose_spec(words)).summary()
    assert done["model_digest"] == simulated["model_digest"]
    assert "libtorch" not in maps(mixed.running[LEAN])


def test_a_run_that_trains_goes_on_without_it(mixed: World) -> None:
    run = mixed.submit(*SHORT, "secagg=off", "method=fedavg", "rounds=1", "train.epochs=1", "quorum=3")
    done = mixed.wait(run)
    assert LEAN not in done["round"][0]["included"]
    log = mixed.log(LEAN)
    assert "E-RUN-14" in log
    assert "found training by method=fedavg: pip install 'consilium-fl[torch]'" in log
    assert "Traceback" not in log
