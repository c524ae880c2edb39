"""Masked runs through real processes: the model of the simulation, and nothing of one hospital at the coordinator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.config.hydra_config import compose_spec
from coordinator.simulate import runner
from fl_core.methods import METHODS, build_method
from fl_core.types.enums import Capability
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


SUMMED = {"fedgen": ("method.mode=secagg",)}
"""Options with which a method's server needs sums alone."""


def _goes_under_masks(name: str) -> bool:
    options = dict(word.removeprefix("method.").split("=") for word in SUMMED.get(name, ()))
    method = build_method(name, options)
    return not method.unsummed_parts and Capability.SECURE_AGGREGATION not in method.unsupported


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_t48_every_method_whose_server_needs_sums_alone_ends_in_the_model_of_its_simulation(masked: World) -> None:
    done = dict[str, tuple[object, object]]()
    for name in filter(_goes_under_masks, sorted(METHODS)):
        words = (*SHORT, f"method={name}", *SUMMED.get(name, ()), "personal=true")
        run = masked.wait(masked.submit(*words), seconds=300)
        done[name] = run["model_digest"], runner.run(compose_spec(words)).summary()["model_digest"]
    assert len(done) >= 24
    assert {name: a == b for name, (a, b) in done.items()} == dict.fromkeys(done, True)


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
