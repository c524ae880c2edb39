"""Stored states and updates are held against their digests when they are read: no flipped byte changes a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from consilium.research.engines.in_process import simulate
from coordinator.runs.exchange import Written
from coordinator.runs.run import ActiveRun
from coordinator.storage.records import RunState
from coordinator.worker.work import RunWork
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.values import State
from tests.support import until
from tests.support.coordinator import FAST, events
from tests.support.federation import federation, manifest
from tests.support.federations import NAMES, shares


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # within the numbers of the last tensor
    file.write_bytes(data)


@pytest.mark.fault("a disk", "changes a byte of the coordinator's model", "the run stops with E-STATE-63")
def test_a_damaged_state_stops_the_run(tmp_path: Path) -> None:
    with federation(tmp_path / "home") as people:
        world = people.world
        people.come(refuse=lambda round, kind: "not today" if round else "")
        run = world.ended(world.submit(manifest(rounds=2)).id)
        assert (run.state, run.closed) == (RunState.PAUSED, 1)
        state = world.server.objects.path(run.state_object)
        people.leave()
        world.stop()
        flip(state)
        world.start()
        world.server.runs.resume(run.id)
        until(lambda: world.run(run.id).state is RunState.FAILED, "the end")
        assert world.run(run.id).reason.startswith("E-STATE-63")
        flip(state)  # restored
        people.come()
        world.server.runs.resume(run.id)
        expected = simulate(RunSetup.of(manifest(rounds=2)), shares(), Observer())
        assert world.finished(run.id).model_digest == tensor_maps.digest(expected["w"])


@pytest.mark.fault("a disk", "changes a byte of an update that the coordinator received", "the hospital sends it again")
def test_a_damaged_update_is_sent_again(tmp_path: Path) -> None:
    agreed = manifest(rounds=1)
    with federation(tmp_path / "home") as people:
        world = people.world
        people.come(*NAMES[:2])
        run = world.submit(agreed)
        until(lambda: len(events(world, run.id, "arrived")) >= 2, "two updates")
        with world.server.store.database.read() as db:
            digests = db.exec_driver_sql("SELECT object_digest FROM contributions WHERE received IS NOT NULL").scalars()
            damaged = world.server.objects.path(digests.all()[0])
        people.leave()
        world.stop()
        flip(damaged)
        world.start()
        people.come()
        expected = simulate(RunSetup.of(agreed), shares(), Observer())
        assert world.finished(run.id).model_digest == tensor_maps.digest(expected["w"])
        assert len(events(world, run.id, "lost")) == 1
        assert len(events(world, run.id, "arrived")) == 2 + 1 + 1 + len(NAMES)  # again, the third, the evaluation


class Damages(RunWork):
    """Computes for a run; the state before a round is damaged on the disk just after the merge has read it, once."""

    damaged: ClassVar[list[Path]] = []

    def written(self, state: State) -> Written:
        after, run = super().written(state), self.service
        assert isinstance(run, ActiveRun | None)
        if run is not None and run._state is not None and not self.damaged:
            self.damaged.append(run.services.objects.path(run._state.digest))
            flip(self.damaged[0])
        return after


def test_a_state_that_is_damaged_while_the_next_one_is_made_of_it_ends_in_no_model(tmp_path: Path) -> None:
    agreed = manifest(rounds=2)
    Damages.damaged.clear()
    with federation(tmp_path / "home", settings=replace(FAST, start_worker=Damages)) as people:
        world = people.world
        people.come()
        run = world.submit(agreed)
        until(lambda: world.run(run.id).state is RunState.FAILED, "the end")
        assert world.run(run.id).reason.startswith("E-STATE-63")
        assert world.run(run.id).closed == 0
        flip(Damages.damaged[0])  # restored
        world.server.runs.resume(run.id)
        expected = simulate(RunSetup.of(agreed), shares(), Observer())
        assert world.finished(run.id).model_digest == tensor_maps.digest(expected["w"])
