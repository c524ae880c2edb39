"""Rounds that close without everybody, wait for who is needed, and stop for the lead; real services over real gRPC."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from consilium.research.engines.in_process import simulate
from coordinator.storage.records import RunState
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle, Part
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.tasks import TaskKey
from tests.support import until
from tests.support.coordinator import Clock, World, events, heard
from tests.support.federation import SHARES, Federation, federation, manifest
from tests.support.federations import NAMES, shares
from tests.support.hospital import Memory, ScriptedSilo

pytestmark = pytest.mark.integration


def short(rounds: int = 3, quorum: int = 0, **changed: object) -> RunManifest:
    return replace(manifest(rounds=rounds, quorum=quorum), **changed)  # type: ignore[arg-type]


def digest(agreed: RunManifest) -> str:
    return tensor_maps.digest(simulate(RunSetup.of(agreed), shares(), Observer())["w"])


@contextmanager
def consortium(tmp_path: Path) -> Iterator[tuple[World, Federation]]:
    with federation(tmp_path / "home") as people:
        yield people.world, people


def closed(world: World, run_id: str, rounds: int) -> None:
    until(lambda: world.run(run_id).closed >= rounds, f"{rounds} closed rounds", 60)


def shown(world: World, run_id: str) -> pb.RunInfo:
    return world.lead().Show(pb.RunQuery(run_id=run_id)).info


def waits_for(world: World, run_id: str, name: str) -> pb.AwaitedSilo:
    """Wait until a run waits for this silo alone."""

    def found() -> pb.AwaitedSilo | None:
        silos = shown(world, run_id).waiting.silos
        return silos[0] if [s.name for s in silos] == [name] else None

    return until(found, f"{name} to be awaited", 60)


def held_back(world: World, people: Federation, name: str, agreed: RunManifest) -> str:
    """Close one round with everybody, then take a hospital away in the second, which must not close before that."""
    people.come(*(n for n in NAMES if n != name))
    people.come(name, wait=lambda round: round > 0)
    run = world.submit(agreed)
    closed(world, run.id, 1)
    people.leave(name)
    return run.id


@pytest.mark.slow
@pytest.mark.fault(
    "a hospital", "is offline for good, and others have its classes", "rounds close without waiting for it"
)
def test_a_dead_silo_that_nobody_needs_holds_no_round_up(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        people.come("north", "south")
        run = world.finished(world.submit(short(rounds=2, patience_s=0.2)).id, 60)
        assert set(people.included(run.id)) == {("north", "south")}
        assert events(world, run.id, "forgetting") == []


@pytest.mark.fault(
    "a hospital",
    "restarts in the middle of a round",
    "the round waits for it, and the model is the same as without the restart",
)
def test_a_restart_is_no_absence(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        agreed = short(patience_s=60.0)
        run_id = held_back(world, people, "east", agreed)
        waits_for(world, run_id, "east")
        people.come("east")
        assert world.finished(run_id, 60).model_digest == digest(agreed)


@pytest.mark.fault(
    "a hospital",
    "is offline and is the only one with a class",
    "the round waits for it, shown by name and class, as long as the lead allows",
)
def test_the_only_holder_of_a_class_is_awaited_and_shown_and_the_lead_can_wait_longer(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        agreed = short(patience_s=20.0)
        run_id = held_back(world, people, "south", agreed)
        silo = waits_for(world, run_id, "south")
        until(lambda: not waits_for(world, run_id, "south").online, "south to be missed")
        assert list(silo.classes) == ["d"]
        assert 0 < silo.left_s <= 20 * 20
        before = silo.left_s
        world.lead().Extend(pb.ExtendRequest(run_id=run_id, hours=1.0))
        until(lambda: waits_for(world, run_id, "south").left_s > before + 3000, "an hour more")
        assert heard(world, run_id, "extended") == [("", "by 1 h")]
        world.stop()
        world.start()
        until(lambda: waits_for(world, run_id, "south").left_s > 3000, "the hour to outlive a restart")
        assert list(waits_for(world, run_id, "south").classes) == ["d"]
        people.come("south")
        assert world.finished(run_id, 60).model_digest == digest(agreed)


@pytest.mark.fault(
    "a hospital",
    "is offline for good and is the only one with a class",
    "the run waits for it in two rounds, then continues without it and reports the lost class",
)
def test_the_only_holder_of_a_class_that_never_returns_is_given_up_and_named(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        run_id = held_back(world, people, "south", short(rounds=3, patience_s=0.5))
        world.finished(run_id, 90)
        assert people.included(run_id)[1:] == [("east", "north")] * 3
        lost = events(world, run_id, "forgetting")
        assert {silo for silo, _ in lost} == {"south"}
        assert "closed without south (offline" in lost[0][1]
        assert "No other hospital has d: the model is forgetting it" in lost[0][1]


def test_whoever_watches_reads_who_is_awaited_until_when_and_for_which_classes(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        run_id = held_back(world, people, "south", short(rounds=2, patience_s=600.0))
        call = world.lead().Watch(pb.WatchRequest(run_id=run_id), timeout=60)
        awaited = (e for e in call if e.kind == "silo" and e.round == 1 and e.info.waiting.there == 2)
        away = next(e for e in awaited if [(s.name, s.online) for s in e.info.waiting.silos] == [("south", False)])
        (silo,) = away.info.waiting.silos
        assert (away.info.waiting.round, away.info.waiting.needed) == (1, 2)
        assert list(silo.classes) == ["d"]
        assert 0 <= silo.offline_s < 60
        assert 20 * 300 - 120 < silo.left_s <= 20 * 300  # it left less than patience_s ago, and h is half of that
        seen = threading.Event()
        people.come("south", wait=lambda round: not seen.is_set())
        back = next(e for e in awaited if [(s.name, s.online) for s in e.info.waiting.silos] == [("south", True)])
        assert back.info.waiting.silos[0].left_s < silo.left_s
        seen.set()
        assert next(e for e in call if e.kind == "ended").info.state == "finished"


@pytest.mark.slow
@pytest.mark.fault("a hospital", "stays connected and never answers", "the round waits for it only up to a limit")
def test_a_silent_silo_does_not_hold_a_round_for_ever(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        held = threading.Event()
        people.come("north", "south")
        memory = Memory()
        east = ScriptedSilo(world, "east", SHARES["east"], memory, alter=lambda key, bundle: held.wait(60) and bundle)
        run_id = world.submit(short(rounds=2, patience_s=0.2)).id
        closed(world, run_id, 1)
        assert people.included(run_id)[0] == ("north", "south")
        held.set()
        world.finished(run_id, 60)
        key = TaskKey(run_id, 0, TaskKind.TRAIN)
        until(lambda: memory.closed.get(key) is False, "east to be told that it came too late")
        late = [e for e in east.errors if isinstance(e, grpc.RpcError) and "E-RUN-06" in str(e.details())]
        east.stop()
        assert late


def poisoned(round: int, kind: TaskKind, bundle: Bundle) -> Bundle:
    if kind is TaskKind.EVALUATE:
        return {"metrics": Part(bundle["metrics"].total, bundle["metrics"].weight * math.inf)}
    delta = bundle["delta"]
    return {**bundle, "delta": Part({k: v * math.nan for k, v in delta.total.items()}, delta.weight)}


@pytest.mark.fault("a hospital", "sends an update that is refused", "the round closes without it; the run continues")
def test_one_bad_update_does_not_fail_a_run(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        people.come("north", "south")
        people.come("east", alter=poisoned)
        run = world.finished(world.submit(short(rounds=2)).id, 60)
        assert world.server is not None
        rows = world.server.store.runs.rounds(run.id)
        assert [row.record.included for row in rows] == [("north", "south")] * 3
        assert all(row.record.missing["east"].startswith("E-WIRE-05") for row in rows)


@pytest.mark.fault(
    "two of three hospitals",
    "are offline at the deadline",
    "the run pauses, nothing is lost, and the lead can resume it",
)
def test_below_its_quorum_a_run_pauses_and_goes_on_with_what_it_has(tmp_path: Path, round_clock: Clock) -> None:
    with consortium(tmp_path) as (world, people):
        people.come("north")
        agreed = short(rounds=2)
        run_id = world.submit(agreed).id
        until(lambda: shown(world, run_id).waiting.there == 1, "north's update")
        round_clock.skip(agreed.deadline_s)
        paused = world.ended(run_id, 60)
        assert paused.state is RunState.PAUSED
        assert paused.reason.startswith("E-RUN-03: round 1: expected updates of at least 2 of 3 silos, found 1; ")
        assert all(f"{name}: E-RUN-13: no update (offline" in paused.reason for name in ("east", "south"))
        world.stop()
        world.start()
        assert world.run(run_id).state is RunState.PAUSED  # the lead decides, and no restart does
        people.come("east", "south")
        world.lead().Resume(pb.ResumeRequest(run_id=run_id))
        assert world.finished(run_id, 60).model_digest == digest(agreed)
        assert people["north"].script.begun.count((0, TaskKind.TRAIN)) == 1


def test_the_lead_may_go_on_with_fewer(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        people.come("north", "east")
        people.come("south", refuse=lambda round, kind: "not this run")
        run_id = world.submit(short(rounds=2, quorum=3)).id
        assert world.ended(run_id, 60).state is RunState.PAUSED
        lead = world.lead()
        for bad in (4, 2**32 - 1):
            with pytest.raises(grpc.RpcError, match="E-CFG-02"):
                lead.Resume(pb.ResumeRequest(run_id=run_id, quorum=bad))
        assert world.run(run_id).state is RunState.PAUSED
        lead.Resume(pb.ResumeRequest(run_id=run_id, quorum=2))
        world.finished(run_id, 60)
        assert set(people.included(run_id)) == {("east", "north")}


@pytest.mark.fault("a lead", "excludes a hospital", "it gets no further tasks until the lead readmits it")
def test_an_excluded_silo_is_asked_no_more_until_it_is_readmitted(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        agreed = short(rounds=3, patience_s=600.0)
        run_id = held_back(world, people, "south", agreed)
        waits_for(world, run_id, "south")
        lead = world.lead()
        gate = threading.Event()
        people.leave("north")
        info = lead.Exclude(pb.ExcludeRequest(run_id=run_id, silo="south"))
        assert list(info.excluded) == ["south"]
        people.come("north", wait=lambda round: round == 2 and not gate.is_set())
        closed(world, run_id, 2)
        people.come("south")
        until(lambda: "south" not in {s.name for s in shown(world, run_id).waiting.silos}, "the third round")
        south = people["south"].script
        assert south.begun == []
        assert list(lead.Exclude(pb.ExcludeRequest(run_id=run_id, silo="south", readmit=True)).excluded) == []
        gate.set()
        world.finished(run_id, 60)
        assert people.included(run_id)[1:3] == [("east", "north")] * 2
        assert people.included(run_id)[3] == tuple(sorted(NAMES))  # asked again from the next round on
        assert {round for round, _ in south.begun} == {3}
        assert world.server is not None
        row = world.server.store.runs.rounds(run_id)[1]
        assert row.record.missing["south"].startswith("E-RUN-42: excluded by the lead")


@pytest.mark.fault("a lead", "changes a run with invalid numbers or names", "refused; nothing changes")
def test_steering_with_nonsense_is_refused(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        people.come("north")
        run_id = world.submit(short()).id
        until(lambda: shown(world, run_id).waiting.silos, "the round")
        lead = world.lead()
        for hours in (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e38):
            with pytest.raises(grpc.RpcError, match="E-CFG-02"):
                lead.Extend(pb.ExtendRequest(run_id=run_id, hours=hours))
        for silo in ("nobody", "", "n" * 100_000, "lead"):
            with pytest.raises(grpc.RpcError, match="E-RUN-05"):
                lead.Exclude(pb.ExcludeRequest(run_id=run_id, silo=silo))
        lead.Exclude(pb.ExcludeRequest(run_id=run_id, silo="east"))
        lead.Exclude(pb.ExcludeRequest(run_id=run_id, silo="east"))
        lead.Exclude(pb.ExcludeRequest(run_id=run_id, silo="south"))
        with pytest.raises(grpc.RpcError, match="E-CFG-02"):
            lead.Exclude(pb.ExcludeRequest(run_id=run_id, silo="north"))
        assert world.server is not None
        assert world.server.store.steering.of(run_id).excluded == ("east", "south")
        assert world.server.store.steering.of(run_id).extended_s == 0.0
        ended = world.ended(run_id, 60)
        assert ended.state is RunState.PAUSED
        with pytest.raises(grpc.RpcError, match="E-RUN-11"):
            lead.Extend(pb.ExtendRequest(run_id=run_id, hours=1.0))
        world.server.runs.abort(run_id)
        with pytest.raises(grpc.RpcError, match="E-RUN-11"):
            lead.Exclude(pb.ExcludeRequest(run_id=run_id, silo="east", readmit=True))


@pytest.mark.fault(
    "a coordinator's disk",
    "fails while an update is added",
    "the run fails at once, without waiting for other hospitals",
)
def test_a_round_that_cannot_go_on_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr("fl_core.aggregation.round_sum.NormClippedSum.add", broken)
    with consortium(tmp_path) as (world, people):
        people.come("north")
        run = world.ended(world.submit(short()).id, 60)
        assert run.state is RunState.FAILED


@pytest.mark.fault("a clock", "jumps by months between an update and a restart", "the round waits as before, and ends")
def test_a_jump_of_the_clock_changes_no_waiting(tmp_path: Path) -> None:
    with consortium(tmp_path) as (world, people):
        people.come("north", "south")
        run_id = world.submit(short(rounds=1, patience_s=600.0, quorum=3)).id
        waits_for(world, run_id, "east")
        world.stop()
        for jump in (120 * 86400.0, -120 * 86400.0):
            world.start()
            assert world.server is not None
            with world.server.store.database.write() as db:
                db.exec_driver_sql("UPDATE contributions SET received = received + ?", (jump,))
            waits_for(world, run_id, "east")
            world.stop()
        world.start()
        people.come("east")
        world.finished(run_id, 60)


@pytest.mark.slow
def test_a_member_that_was_away_at_the_start_takes_part_from_the_round_in_which_it_comes(
    tmp_path: Path, round_clock: Clock
) -> None:
    with consortium(tmp_path) as (world, people):
        gate = threading.Event()
        people.come("south")
        people.come("north", wait=lambda round: round == 1 and not gate.is_set())
        agreed = short(rounds=3)
        run_id = world.submit(agreed).id
        until(lambda: shown(world, run_id).waiting.there == 2, "those who are there")
        round_clock.skip(agreed.deadline_s)
        closed(world, run_id, 1)
        people.come("east")
        until(lambda: (1, TaskKind.TRAIN) in people["east"].script.begun, "east to train")
        gate.set()
        world.finished(run_id, 60)
        assert people.included(run_id) == [("north", "south"), *[tuple(sorted(NAMES))] * 3]
