"""Masked runs over the wire, with silos made of the protocol's silo side: what is opened, for whom, and what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.storage.records import RunState
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation.in_process import local_ports, simulate
from fl_core.types import tensor_maps
from tests.support.coordinator import World, events, running
from tests.support.federations import NAMES, Failing
from tests.support.masked_silo import FOUR, MaskedSilo, masked, shares_of


def simulated(agreed: RunManifest, absent: Sequence[str] = ()) -> str:
    """Return the digest of the model that a simulation ends in. absent: in every round."""
    run = RunSetup.of(agreed)
    ports = [
        Failing(port, range(agreed.rounds + 1)) if port.name in absent else port
        for port in local_ports(run, [*shares_of([m.name for m in agreed.members]).values()])
    ]
    return tensor_maps.digest(run.round_loop(ports, 1).run(run.initial_state(), Observer())["w"])


@contextmanager
def silos(world: World, names: Sequence[str], **of: dict[str, object]) -> Iterator[dict[str, MaskedSilo]]:
    made = {name: MaskedSilo(world, name, **of.get(name, {})) for name in names}
    try:
        yield made
    finally:
        for silo in made.values():
            silo.stop()


@pytest.mark.parametrize("method", ["fedavg", "fednh"])
def test_a_masked_run_over_the_wire_ends_in_the_model_of_its_simulation(tmp_path: Path, method: str) -> None:
    agreed = masked(method=method, rounds=2)
    with running(tmp_path / "home", NAMES) as world, silos(world, NAMES) as people:
        run = world.finished(world.submit(agreed).id)
        assert run.model_digest == simulated(agreed)
        assert [text for _, text in events(world, run.id, "refused")] == []
        assert all(len(seals) == 1 for p in people.values() for seals in p.memory.confirmed.values())
