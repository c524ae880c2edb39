"""Masked runs through real processes: the model of the simulation, and nothing of one hospital at the coordinator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.config.hydra_config import compose_spec
from coordinator.simulate import runner
from tests.support import until
from tests.support.processes import World, world

SITES = [f"digits/p4c3/{k}" for k in range(4)]
SHORT = ("data=digits", "federation=p4c3", "rounds=2", "train.epochs=1", "seed=3", "secagg=on")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("masked")) as made:
        made.federation(SITES)
        yield made


@pytest.mark.parametrize(
    "overrides",
    [
        ("method=fedavg",),
        ("method=fednh", "secagg.min_contributors=2"),
        ("method=analytic", "rounds=1", "secagg.min_contributors=1"),
    ],
)
def test_a_masked_run_ends_in_the_model_of_its_simulation(masked: World, overrides: tuple[str, ...]) -> None:
    done = masked.wait(masked.submit(*SHORT, *overrides))
    simulated = runner.run(compose_spec((*SHORT, *overrides))).summary()
    assert done["model_digest"] == simulated["model_digest"]
    assert [r["accuracy"] for r in done["round"]] == simulated["accuracy_by_round"]
    assert all(r["missing"] == {} for r in done["round"])


def test_a_masked_run_goes_on_without_a_hospital_that_is_killed(masked: World) -> None:
    run = masked.submit(
        "method=fedavg", "data=digits", "rounds=20", "train.epochs=1", "seed=3", "secagg=on", "patience_s=1"
    )
    until(lambda: masked.info(run)["closed"] >= 2, "two rounds")
    masked.kill("hospital3")
    done = masked.wait(run, seconds=300)
    assert any(list(r["missing"]) == ["hospital3"] for r in done["round"])
    masked.silo("hospital3", SITES[3])
    masked.online(["hospital3"])
