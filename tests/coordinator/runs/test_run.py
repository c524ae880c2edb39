"""What a silo is asked for while its port looks whether the update is there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from coordinator.runs.dispatcher import Dispatcher
from coordinator.storage.contributions import ContributionStore
from coordinator.storage.records import Contribution
from fl_core.errors import UnavailableError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until
from tests.support.coordinator import DATA, HELLO, Line, World, running, send
from tests.support.federations import manifest

BOTH = ("east", "north")


def opened(world: World, agreed: RunManifest) -> pb.Offer:
    run = world.submit(agreed)
    until(lambda: (row := world.server.store.runs.round(run.id, 0)) and row.base_digest, "the first round")
    base = world.server.store.runs.round(run.id, 0).base_digest
    return pb.Offer(run_id=run.id, kind=pb.TRAIN, manifest_digest=run.manifest_digest, base_digest=base)


@pytest.mark.fault(
    "a hospital",
    "connects while a restarted coordinator checks for its update",
    "its round is not repeated, so it is not charged again",
)
def test_a_silo_that_connects_while_its_update_is_looked_for_is_not_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Line] = []
    look, listening = ContributionStore.contribution, threading.Event()

    def connect_then_look(store: ContributionStore, contribution_id: str) -> Contribution | None:
        found = look(store, contribution_id)
        if found is not None and found.silo == "north" and not lines:
            assert listening.wait(200)  # runs are resumed before the test knows the new port
            lines.append(Line(world, "north", HELLO))
            until(lambda: lines[0].of("welcome"), "the welcome, behind which all is that north missed")
        return found

    with running(tmp_path / "home", BOTH) as world:
        offer = opened(world, manifest(rounds=1, names=BOTH, quorum=2))
        send(world.transfer("north"), "north", offer, DATA)
        world.stop()
        monkeypatch.setattr(ContributionStore, "contribution", connect_then_look)
        world.start()
        listening.set()
        until(lambda: lines and lines[0].of("welcome"), "north's session")
        send(world.transfer("east"), "east", offer, DATA)
        north = lines[0]
        until(lambda: north.of("round_closed"), "the round's close")
        assert north.of("round_closed")[0].round_closed.included
        assert [m.offer.round for m in north.of("offer") if m.offer.round == 0] == []
        north.close()


def test_an_update_that_was_committed_while_its_silo_was_given_up_is_part_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receipt is signed, and a coordinator that was killed there would find the update and take it."""
    deliver = Dispatcher.delivered

    def give_up_first(dispatcher: Dispatcher, update: Contribution) -> None:
        tasks = dispatcher.tasks_of(update.run_id)
        if tasks is not None and update.silo == "north":
            tasks.give_up({"north": UnavailableError("E-RUN-13", "no update: given up")})
        deliver(dispatcher, update)

    with running(tmp_path / "home", BOTH) as world:
        offer = opened(world, manifest(rounds=1, names=BOTH, quorum=2))
        monkeypatch.setattr(Dispatcher, "delivered", give_up_first)
        for name in BOTH[::-1]:
            send(world.transfer(name), name, offer, DATA)
        until(lambda: not world.server.store.runs.round(offer.run_id, 0).is_open, "the round's close")
        assert world.server.store.runs.round(offer.run_id, 0).record.included == BOTH
