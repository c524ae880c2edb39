"""Simulation behind Ray's actors. `make test-ray` installs the extra and runs these."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

from consilium.research.engines.in_process import RoundHistory, simulate
from consilium.research.engines.ray import Cluster, import_ray, simulate_ray
from fl_core.errors import ConfigError
from fl_core.methods import METHODS
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.records import TrainConfig
from tests.fl_core.aggregation.test_grid_bounds import masked32
from tests.support.federations import METHOD_OPTIONS, manifest, same, shares

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)
THERE = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not THERE, reason="Ray is an extra: make test-ray")


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """Let the actors import `tests.support`, whose examples they are sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start one cluster for all tests: simulations leave a cluster alone that they did not start."""
    ray = import_ray()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield Cluster(actors=2)
    ray.shutdown()


@pytest.mark.skipif(THERE, reason="Ray is installed")
def test_without_ray_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(ConfigError, match="pip install") as caught:
        simulate_ray(RunSetup.of(manifest()), shares(), RoundHistory())
    assert caught.value.code == "E-CFG-08"


@needs_ray
@pytest.mark.parametrize("method", METHODS)
def test_actors_give_the_bits_of_one_process(cluster: Cluster, method: str) -> None:
    run = manifest(method, METHOD_OPTIONS.get(method, {}), train=TRAIN, rounds=2, personal=True)
    here, there = RoundHistory(), RoundHistory()
    expected = simulate(RunSetup.of(run), shares(), here)
    found = simulate_ray(RunSetup.of(run), shares(), there, cluster)
    assert set(found) == set(expected)
    assert all(same(found[group], expected[group]) for group in expected)
    assert here.records == there.records


@needs_ray
def test_masked_rounds_give_the_bits_of_one_process(cluster: Cluster) -> None:
    run = masked32(manifest("fednh", train=TRAIN, rounds=2))
    expected = simulate(RunSetup.of(run), shares(), RoundHistory())
    found = simulate_ray(RunSetup.of(run), shares(), RoundHistory(), cluster)
    assert set(found) == set(expected) >= {"norms"}
    assert all(same(found[group], expected[group]) for group in expected)


@needs_ray
def test_a_cohort_and_silo_states_give_the_bits_of_one_process(cluster: Cluster) -> None:
    run, here, there = manifest("moon", train=TRAIN, cohort=2, rounds=4), RoundHistory(), RoundHistory()
    expected = simulate(RunSetup.of(run), shares(), here)
    found = simulate_ray(RunSetup.of(run), shares(), there, cluster)
    assert all(same(found[group], expected[group]) for group in expected)
    assert here.records == there.records


@needs_ray
def test_a_cluster_that_a_simulation_started_is_ended_by_it() -> None:
    ray = import_ray()
    if ray.is_initialized():
        ray.shutdown()
    simulate_ray(RunSetup.of(manifest(train=TRAIN, rounds=1)), shares(), RoundHistory(), Cluster(actors=1))
    assert not ray.is_initialized()
