"""A backup of a running service, restored: the run goes on from it, and ends in the bits of one that was left alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cli import operations as coordinator_cli
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.errors import StateError
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members
from fl_core.rounds.silo_round import run_silo_round
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import Secagg
from silo.cli import operations as silo_cli
from silo.storage.home import Home
from tests.support import until
from tests.support.coordinator import World, events
from tests.support.fake_coordinator import manifest
from tests.support.federation import Hospital, budgeted

pytestmark = pytest.mark.integration

DATA = {"north": "digits/p3c4/0", "east": "digits/p3c4/1"}
WAIT_S = 60


def agreed(method: str = "scaffold", **other: object) -> RunManifest:
    facts = {"members": make_members(tuple(DATA), 3, 1.0, other.pop("units", None)), "rounds": 5}
    return manifest(method=NamedOptions(method, {}), grid=FixedPointFormat("ring64", len(DATA)), **{**facts, **other})


class Gate:
    """Lets a hospital train up to a round, and no further."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.last = 99
        self.at = -1

    def let(self, last: int) -> None:
        with self.changed:
            self.last = last
            self.changed.notify_all()

    def __call__(self, bench, msg, state, data, context, kind):
        if kind is TaskKind.TRAIN:
            with self.changed:
                self.at = context.round
                self.changed.wait_for(lambda: context.round <= self.last, WAIT_S)
        return run_silo_round(bench, msg, state, data, context, kind)


@pytest.fixture
def gates() -> dict[str, Gate]:
    return {name: Gate() for name in DATA}


@pytest.fixture
def consortium(tmp_path: Path, gates: dict[str, Gate]) -> Iterator[tuple[World, dict[str, Hospital]]]:
    with budgeted(tmp_path, DATA) as (world, sites):
        for name, site in sites.items():
            site.run_round = gates[name]
        try:
            yield world, sites
        finally:
            for gate in gates.values():
                gate.let(99)


def submitted(world: World, wanted: RunManifest, request: str) -> str:
    return world.submit(wanted, request).id


def waiting(gates: dict[str, Gate], *names: str, round: int) -> None:
    until(lambda: all(gates[name].at >= round for name in names), f"{names} in round {round}", WAIT_S)


def moved(world: World, source: Path, home: Path) -> None:
    """Restore the coordinator into another folder, where the hospitals find it."""
    world.stop()
    coordinator_cli.restore(source, home=home, as_json=True)
    world.home = home
    world.start()


@pytest.mark.fault(
    "an operator",
    "restores a coordinator that is older than its hospitals",
    "they go back to the last common round; the model is the same",
)
@pytest.mark.parametrize(
    "method", ["scaffold", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedavg", "ditto"))]
)
def test_a_run_goes_on_from_a_backup_taken_in_the_middle_of_a_round(tmp_path, consortium, gates, method):
    world, sites = consortium
    for site in sites.values():
        site.start()
    expected = world.finished(submitted(world, agreed(method), "undisturbed"), WAIT_S).model_digest
    for gate in gates.values():
        gate.at = -1
    gates["east"].let(1)
    run = submitted(world, agreed(method), "disturbed")
    until(lambda: ("north", 2) in arrived(world, run), "north's update of round 3", WAIT_S)
    waiting(gates, "east", round=2)
    coordinator_cli.backup(tmp_path / "backup", home=world.home, as_json=True)
    gates["north"].let(2)
    gates["east"].let(2)
    waiting(gates, "north", "east", round=3)
    assert world.run(run).closed == 3
    moved(world, tmp_path / "backup", tmp_path / "restored")
    assert world.run(run).closed == 2
    for gate in gates.values():
        gate.let(99)
    assert world.finished(run, WAIT_S).model_digest == expected
    assert sites["east"].told("restored")
    (said,) = [text for text in sites["east"].told("trouble") if text.startswith("E-STATE-80")]
    assert "its home was restored at line" in said


MASKED = DATA | {"west": "digits/p3c4/2"}


@pytest.mark.fault(
    "an operator",
    "restores a coordinator during a run with secure aggregation",
    "the run ends with E-RUN-54; a new run with new keys continues from its last model",
)
@pytest.mark.parametrize("private", [False, True])
def test_a_masked_run_ends_at_a_restore_and_a_new_one_goes_on_from_its_model(tmp_path, private, capsys):
    gates = {name: Gate() for name in MASKED}
    noise = NamedOptions("dp_record", {"rng": "test", "epsilon": 8.0, "reserve_rounds": 2})
    masked = {"secagg": Secagg(1), "aggregator": NamedOptions("mean"), "grid": FixedPointFormat("ring64", len(MASKED))}
    members = make_members(tuple(MASKED), 3, 1.0, [1000] * len(MASKED))
    wanted = manifest(members=members, rounds=5, **masked, **({"privacy": noise} if private else {}))
    with budgeted(tmp_path, MASKED) as (world, sites):
        try:
            for name, site in sites.items():
                site.run_round = gates[name]
                gates[name].let(1)
                site.start()
            run = submitted(world, wanted, "masked")
            waiting(gates, *MASKED, round=2)
            coordinator_cli.backup(tmp_path / "backup", home=world.home, as_json=True)
            for gate in gates.values():
                gate.let(2)
            waiting(gates, *MASKED, round=3)
            moved(world, tmp_path / "backup", tmp_path / "restored")
            goes_on = f"coordinator run --from {run} rounds=3"
            assert goes_on in capsys.readouterr().out
            ended = world.run(run)
            assert ended.state.value == "aborted"
            assert ended.reason.startswith("E-RUN-54: ")
            assert goes_on in ended.reason
            assert ("ledger" in ended.reason) is private
            with pytest.raises(StateError, match="E-RUN-11"):
                world.server.runs.resume(run)
            for gate in gates.values():
                gate.let(99)
            told = lambda site: site.service.store.history()[0].state == "aborted"  # noqa: E731
            until(lambda: all(map(told, sites.values())), "the hospitals to hear of it", WAIT_S)
            again = world.server.runs.submit(replace(wanted, rounds=3), "{}", "again", start_from=run)
            assert world.finished(again.id, WAIT_S).closed >= 3
            assert events(world, again.id, "keys")  # of its own
        finally:
            for gate in gates.values():
                gate.let(99)


def arrived(world: World, run: str) -> set[tuple[str, int]]:
    found = world.server.store.runs.events(run, 0)
    return {(e.silo, e.round) for e in found if e.kind == "arrived"}


@pytest.mark.fault(
    "an operator",
    "restores a coordinator from before the hospitals' stored states",
    "hospitals refuse with E-STATE-24, unless the run says `lost_state=restart`",
)
@pytest.mark.parametrize("choice", ["refuse", pytest.param("restart", marks=pytest.mark.slow)])
def test_a_coordinator_that_is_too_far_back_is_told_so(tmp_path, consortium, gates, choice):
    world, sites = consortium
    for site in sites.values():
        site.start()
    gates["east"].let(0)
    run = submitted(world, agreed(lost_state=choice), "far")
    waiting(gates, "east", round=1)
    coordinator_cli.backup(tmp_path / "backup", home=world.home, as_json=True)
    gates["north"].let(3)
    gates["east"].let(3)
    waiting(gates, "north", "east", round=4)
    moved(world, tmp_path / "backup", tmp_path / "restored")
    for gate in gates.values():
        gate.let(99)
    if choice == "refuse":
        ended = world.ended(run, WAIT_S)
        assert ended.state.value == "paused"
        assert "E-STATE-24" in ended.reason
    else:
        world.finished(run, WAIT_S)
        assert {silo for silo, text in events(world, run, "restarted") if text.startswith("E-STATE-24")}


@pytest.mark.slow
@pytest.mark.fault("an operator", "restores a hospital from a backup", "it takes part again; the model is the same")
def test_a_restored_hospital_takes_its_place_again(tmp_path, consortium, gates):
    world, sites = consortium
    for site in sites.values():
        site.start()
    expected = world.finished(submitted(world, agreed(), "undisturbed"), WAIT_S).model_digest
    gates["east"].at = -1
    gates["east"].let(1)
    run = submitted(world, agreed(), "disturbed")
    waiting(gates, "east", round=2)
    silo_cli.backup(tmp_path / "backup", ledger_key=True, home=sites["east"].home.path, as_json=True)
    sites["east"].service.leave("the machine is lost")
    gates["east"].let(99)
    sites["east"].stop()
    shutil.rmtree(sites["east"].home.path)
    silo_cli.restore(tmp_path / "backup", home=tmp_path / "new", as_json=True)
    sites["east"].home = Home(tmp_path / "new")
    sites["east"].start()
    assert world.finished(run, WAIT_S).model_digest == expected


@pytest.mark.fault(
    "an operator",
    "restores a coordinator that is older than its hospitals, in a private run",
    "repeated rounds are charged again; a waiting update is sent without a charge",
)
def test_the_ledger_never_goes_back(tmp_path, consortium, gates):
    world, sites = consortium
    for site in sites.values():
        site.start()
    units = [1000, 1000]
    private = NamedOptions("dp_record", {"rng": "test", "epsilon": 8.0, "reserve_rounds": 2})
    gates["east"].let(0)
    run = submitted(world, agreed("fedavg", privacy=private, units=units, rounds=3), "private")
    waiting(gates, "east", round=1)
    until(lambda: ("north", 1) in arrived(world, run), "north's update of round 2", WAIT_S)
    coordinator_cli.backup(tmp_path / "backup", home=world.home, as_json=True)
    gates["east"].let(1)
    gates["north"].let(1)
    waiting(gates, "north", "east", round=2)
    before = {name: spent(site, run) for name, site in sites.items()}
    moved(world, tmp_path / "backup", tmp_path / "restored")
    for gate in gates.values():
        gate.let(99)
    world.finished(run, WAIT_S)
    after = {name: spent(site, run) for name, site in sites.items()}
    assert all(before[name] <= after[name] for name in sites)
    assert f"{run}/1/train" in " ".join(after["east"])
    attempts = {name: sum(entry.startswith(f"{run}/1/train") for entry in after[name]) for name in sites}
    assert attempts == {"north": 2, "east": 4}  # each of two collections: north's update of round 2 is in the backup


def spent(site: Hospital, run: str) -> set[str]:
    return {entry for entry, state in site.entries() if entry.startswith(run) and state != "REFUSED"}
