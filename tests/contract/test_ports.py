"""The two ports agree: a run over gRPC and mutual TLS gives the bits of the same run in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.methods import METHODS
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from tests.support.federation import Federation, manifest
from tests.support.federation import federation as started
from tests.support.federations import NAMES, same, shares

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Start the services; they serve one run after the other."""
    with started(tmp_path_factory.mktemp("ports") / "home") as made:
        made.come()
        yield made


USUAL = ("fedavg", "fedmr", "fedgela", "fednh", "map", "scaffold")
"""The others differ in what happens at a silo, which the simulation runs too."""


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m in USUAL else pytest.mark.slow) for m in METHODS])
def test_a_run_over_grpc_equals_the_simulation_bit_for_bit(method: str, federation: Federation) -> None:
    world = federation.world
    agreed = manifest(
        method, rounds=2, personal=method == "fedmr", metrics="clinical" if method in ("fedavg", "fedmr") else "basic"
    )
    history = RoundHistory()
    expected = simulate(RunSetup.of(agreed), shares(), history)
    run = world.finished(world.submit(agreed, request_id=method).id)
    found = world.model(run.id)
    rounds = [row.record for row in world.server.store.runs.rounds(run.id)]
    federation.told("ended", run.id)
    assert set(found) == set(expected)
    assert all(same(found[group], expected[group]) for group in expected)
    assert run.model_digest == tensor_maps.digest(expected["w"])
    assert [r.clinical for r in rounds] == [r.clinical for r in history.records]
    assert (rounds[0].clinical is not None) == (agreed.evaluation.metrics == "clinical")
    assert [r.correct for r in rounds] == [r.correct for r in history.records]
    shown = ("pa", "pa_std") if agreed.personal else ()  # the hospitals have no public test set, the simulation has
    assert [r.personal for r in rounds] == [{name: r.personal[name] for name in shown} for r in history.records[:2]] + [
        {}
    ]
    assert [r.included for r in rounds] == [tuple(sorted(NAMES))] * 3
    assert all(not hospital.service.store.outbox() for hospital in federation.hospitals.values())
