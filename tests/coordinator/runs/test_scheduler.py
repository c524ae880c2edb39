"""Runs: rounds that survive bad updates, refusals, aborts, failures and restarts."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
import torch

from consilium.research.engines.in_process import simulate
from coordinator.cli import runs as lead
from coordinator.storage.records import Contribution, RunState
from coordinator.worker.work import checked
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.errors import ConfigError, ProtocolError, StateError
from fl_core.rounds.engine import Observer
from fl_core.rounds.run_setup import RunSetup
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.values import Part, PartSpec
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from protos.wire.codec import BundleFile
from protos.wire.tasks import contribution_id
from service_core.version import PROTOCOL, software
from tests.support import until
from tests.support.coordinator import FAST, HELLO, Clock, Line, World, events, heard, online, running
from tests.support.federation import Federation, federation, manifest
from tests.support.federations import NAMES, same, shares

pytestmark = pytest.mark.integration


def test_a_run_in_which_no_hospital_takes_a_step_fails_with_the_remedy_and_is_never_finished(tmp_path: Path) -> None:
    with federation(tmp_path / "home") as people:
        world = people.world
        no_step = "expected a training step: raise train.batch_size"
        people.come(refuse=lambda round, kind: no_step, code="E-RUN-52")
        # With a quorum of one, nobody is given up before it has answered.
        run = world.ended(world.submit(manifest(rounds=2, quorum=1)).id)
        assert run.state is RunState.FAILED
        assert run.reason.startswith("E-RUN-52: round 1: no hospital took a training step")
        assert all(f"{name}: E-RUN-52" in run.reason and "raise train.batch_size" in run.reason for name in NAMES)
        assert run.closed == 0


def test_a_run_without_its_quorum_pauses_and_can_be_resumed_without_training_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreed = manifest(rounds=2, quorum=3)
    expected = simulate(RunSetup.of(agreed), shares(), Observer())
    willing = threading.Event()
    with federation(tmp_path / "home") as people:
        world = people.world
        people.come(*NAMES[1:])
        people.come(NAMES[0], refuse=lambda round, kind: "" if willing.is_set() or round == 0 else "not today")
        run = world.ended(world.submit(agreed).id)
        assert run.state is RunState.PAUSED
        assert "E-RUN-03" in run.reason
        assert "not today" in run.reason
        assert run.closed == 1
        assert run.model_digest == ""  # nobody has asked for it yet
        shown = world.lead().Show(pb.RunQuery(run_id=run.id)).info
        after_one = codec.read_state(world.server.objects.path(run.state_object or ""))
        assert shown.model_digest == tensor_maps.digest(after_one["w"]) == world.run(run.id).model_digest
        assert not any(people[name].over("ended", run.id) for name in NAMES)  # what they have staged is needed
        willing.set()
        lead.resume(run.name, home=world.home, as_json=True)  # as `coordinator resume` does: it follows the run
        printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert (printed[-1]["state"], printed[-1]["reason"]) == ("finished", "")
        done = world.finished(run.id)
        assert done.model_digest == tensor_maps.digest(expected["w"])
        assert all(len(people[name].script.begun) == 3 for name in NAMES)
        with pytest.raises(StateError, match="E-RUN-11"):
            lead.resume(run.id, home=world.home)


def attendance(world: World, run_id: str) -> tuple[int, int] | None:
    """Tell which round is open, and how many updates it has."""
    found = world.server.runs.waiting(run_id)
    return None if found is None else (found.round, found.received)


def test_a_round_closes_with_the_quorum_at_its_deadline(tmp_path: Path, round_clock: Clock) -> None:
    with federation(tmp_path / "home") as people:
        world = people.world
        agreed = manifest(rounds=1, quorum=2)
        people.come(*NAMES[:2])
        run = world.submit(agreed)
        for number in range(2):
            until(lambda t=number: attendance(world, run.id) == (t, 2), "two updates")
            round_clock.skip(agreed.deadline_s)
        world.finished(run.id)
        assert {r.record.missing["south"][:8] for r in world.server.store.runs.rounds(run.id)} == {"E-RUN-13"}


def test_an_abort_ends_a_run_in_any_state(tmp_path: Path) -> None:
    with federation(tmp_path / "home", settings=replace(FAST, parallel_runs=1)) as people:
        world = people.world
        runs = world.server.runs
        first, second = world.submit(manifest(rounds=1), "one"), world.submit(manifest(rounds=1), "two")
        until(lambda: world.server.store.runs.round(first.id, 0), "the first to wait")
        assert world.run(first.id).state is RunState.RUNNING
        assert world.run(second.id).state is RunState.WAITING
        assert runs.abort(second.id).state is RunState.ABORTED  # while it waits for its turn
        assert runs.abort(first.id, "wrong data").reason == "wrong data"  # while a round is open
        assert world.ended(first.id).state is RunState.ABORTED
        lines = [Line(world, name, HELLO) for name in NAMES]
        told = [lambda line=line: {m.run_ended.run_id for m in line.of("run_ended")} for line in lines]
        until(lambda: all(ended() == {first.id, second.id} for ended in told), "everybody to know")
        assert all({m.run_ended.state for m in line.of("run_ended")} == {"aborted"} for line in lines)
        assert not any(line.of("offer") for line in lines)
        for line in lines:
            line.close()
        people.come()
        with pytest.raises(StateError, match="E-RUN-11"):
            runs.abort(first.id)
        third = world.finished(world.submit(manifest(rounds=1), "three").id)
        with pytest.raises(StateError, match="E-RUN-11"):
            runs.abort(third.id)
        with pytest.raises(ConfigError, match="E-RUN-10"):
            runs.abort("nothing")


def test_two_submissions_with_one_request_id_are_one_run(tmp_path: Path) -> None:
    with running(tmp_path / "home", NAMES) as world:
        agreed = manifest(rounds=1)
        world.manifests = {"a": agreed, "b": agreed}
        stub = world.lead()
        request = pb.SubmitRequest(spec_json="a", request_id="same")
        calls = [stub.Submit.future(request) for _ in range(6)]
        ids = {call.result(20).run_id for call in calls}
        assert len(ids) == 1
        assert [r.run_id for r in stub.Runs(pb.RunsRequest()).runs] == list(ids)
        for bad in (pb.SubmitRequest(spec_json="b", request_id="same"), pb.SubmitRequest(spec_json="a")):
            with pytest.raises(grpc.RpcError, match="E-CFG-02"):
                stub.Submit(bad)
        stranger = manifest(rounds=1, names=("north", "nobody"))
        world.manifests["c"] = stranger
        with pytest.raises(grpc.RpcError, match="E-RUN-05"):
            stub.Submit(pb.SubmitRequest(spec_json="c", request_id="other"))


def test_runs_side_by_side_give_the_bits_of_runs_alone(tmp_path: Path) -> None:
    agreed = [manifest(rounds=1, seed=seed) for seed in (1, 2)]
    expected = [simulate(RunSetup.of(a), shares(), Observer()) for a in agreed]
    with federation(tmp_path / "home") as people:
        world = people.world
        people.come()
        runs = [world.submit(a, f"r{k}") for k, a in enumerate(agreed)]
        for run, want in zip(runs, expected, strict=True):
            assert world.finished(run.id).model_digest == tensor_maps.digest(want["w"])


def test_a_finished_run_leaves_its_final_state_its_manifest_and_its_receipts(tmp_path: Path) -> None:
    with federation(tmp_path / "home") as people:
        world = people.world
        people.come()
        run = world.finished(world.submit(manifest(rounds=3)).id)
        objects, kept = world.home / "blobs" / "objects", {run.state_object, run.manifest_digest}
        until(lambda: {f.name for f in objects.glob("*/*")} == kept, "nothing else to be there")
        assert world.server.uploads.all() == []
        bases = [world.server.store.runs.round(run.id, t).base_digest for t in range(4)]
        kinds = [TaskKind.TRAIN] * 3 + [TaskKind.EVALUATE]
        names = [contribution_id(run.id, t, kinds[t], "north", bases[t]) for t in range(4)]
        assert all(world.server.store.contributions.contribution(name).received for name in names)
        assert run.bytes_up == sum(world.server.store.contributions.contribution(n).size for n in names) * 3


def test_a_lead_learns_when_each_update_came_how_large_it_was_and_what_came_with_it(world: World) -> None:
    people = Federation(world)
    people.come(*NAMES[1:])
    people.come(NAMES[0], refuse=lambda round, kind: "no" if kind is TaskKind.TRAIN and round == 1 else "")
    run = world.finished(world.submit(manifest(rounds=2)).id)
    people.leave()
    store = world.server.store
    shown = world.lead().Show(pb.RunQuery(run_id=run.id))
    assert [sorted(a.silo for a in r.arrivals) for r in shown.rounds] == [sorted(r.included) for r in shown.rounds]
    assert sum(a.bytes for r in shown.rounds for a in r.arrivals) == run.bytes_up
    for number, r in enumerate(shown.rounds):
        assert all(r.opened_unix <= a.at_unix <= r.closed_unix for a in r.arrivals)
        assert {a.silo: a.at_unix for a in r.arrivals} == store.contributions.received(run.id, number)
        assert r.base_bytes == store.runs.round(run.id, number).base_size > 0


def test_of_what_hospitals_state_a_lead_sees_all_but_what_is_sealed(world: World) -> None:
    run = world.submit(manifest(rounds=2))
    store = world.server.store
    until(lambda: store.runs.round(run.id, 0), "the first round")
    for number, name in enumerate(NAMES[:2]):
        until(lambda: store.runs.round(run.id, 0).base_digest, "its base")
        base = store.runs.round(run.id, 0)
        wanted = Contribution(
            f"c{number}", run.id, 0, TaskKind.TRAIN, name, run.manifest_digest, base.base_digest, "d" * 64, 10
        )
        stated = pb.Attestation(policy_digest=name, ledger_seq=number, ledger_sealed=b"for itself", ledger_restored=1)
        store.contributions.announce(wanted, stated)
        if name == NAMES[0]:
            store.contributions.commit(wanted, 5.0)
    (shown,) = world.lead().Show(pb.RunQuery(run_id=run.id)).declarations
    assert (shown.silo, shown.round, shown.stated.policy_digest) == ("north", 0, "north")
    assert (shown.stated.ledger_restored, shown.stated.ledger_sealed) == (1, b"")
    lead = world.lead()
    until(lambda: lead.Runs(pb.RunsRequest()).runs[0].HasField("waiting"), "a look at the open round")
    (listed,) = lead.Runs(pb.RunsRequest()).runs
    assert [(a.silo, a.bytes, a.at_unix) for a in listed.waiting.arrivals] == [("north", 10, 5.0)]
    assert listed.waiting.opened_unix == store.runs.round(run.id, 0).opened
    world.server.runs.abort(run.id)


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError("a disk that does not answer"), StateError("E-STATE-22", "no database")])
def test_a_run_goes_on_while_what_it_leaves_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    run = manifest("fedavg")
    with federation(tmp_path / "home", settings=replace(FAST, parallel_runs=1)) as people:
        world = people.world
        assert world.server is not None
        asked: list[str] = []

        def fail(digest: str) -> None:
            asked.append(digest)
            raise error

        monkeypatch.setattr(world.server.objects, "remove", fail)
        people.come()
        started = world.submit(run)
        world.finished(started.id)
        until(lambda: asked, "something to be deleted")
        again = world.submit(run, "another")
        world.finished(again.id)  # the place of the first one is free
        assert any(error is r.exc_info[1] for r in caplog.records if r.exc_info)


def test_twelve_waiting_bundles_are_not_in_memory(tmp_path: Path) -> None:
    big = {"delta": Part.of({"w": torch.ones(4 << 20)}, 2.0)}  # 16 MiB
    files = []
    for k in range(12):
        file = tmp_path / str(k)
        file.write_bytes(codec.pack_bundle(big))
        files.append(file)
    me = psutil.Process()
    before = me.memory_info().rss
    waiting = [checked(BundleFile(file), frozenset({torch.float32})) for file in files]
    assert me.memory_info().rss - before < 8 << 20
    assert same(waiting[3]["delta"].total, big["delta"].total)
    sums = Aggregator({"delta": PartSpec.of(big["delta"])}, FixedPointFormat(n_max=12))
    before = me.memory_info().rss
    for bundle in waiting:
        sums.add(bundle)
    assert me.memory_info().rss - before < 32 << 20  # of 192 MiB
    assert same(sums.total()["delta"].total, {"w": torch.full((4 << 20,), 24 << sums.grid.frac_bits("delta"))})
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        checked(BundleFile(files[0]), frozenset({torch.int64}))


def test_a_lead_is_told_at_the_start_of_a_run_whose_hospitals_have_another_build(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    said = dict(zip(NAMES, (software(), "consilium-fl 0.1.0+0123456789ab", "consilium-fl 0.1.0"), strict=True))
    protocol = {"protocol_min": PROTOCOL, "protocol_max": PROTOCOL}
    lines = [Line(world, name, pb.Hello(software=text, **protocol)) for name, text in said.items()]
    for name in NAMES:
        until(online(world, name), f"{name} to be here")
    run = world.submit(manifest("fedavg"))
    ((_, read),) = heard(world, run.id, "clear")
    assert read == "no masks: the coordinator reads each hospital's update by itself"
    ((_, warning),) = heard(world, run.id, "warning")
    assert f"expected {software()} on all sides, found" in warning
    assert [name for name in NAMES if name in warning] == list(NAMES[1:])
    heard(world, run.id, "opened")
    order = [e.kind for e in world.server.store.runs.events(run.id, 0)]
    assert order.index("warning") < order.index("opened")
    assert events(world, run.id, "refused") == []
    assert dict(world.lead().Show(pb.RunQuery(run_id=run.id)).software) == {"": software(), **said}
    lead.show(run.id, home=world.home)
    shown = capsys.readouterr().out
    assert f"software: {software()} (coordinator and 1 silo), " in shown
    assert f"{NAMES[1]} consilium-fl 0.1.0+0123456789ab" in shown
    lead.show(run.id, home=world.home, as_json=True)
    assert json.loads(capsys.readouterr().out)["software"] == {"coordinator": software(), "silos": said}
    world.server.runs.abort(run.id)
    for line in lines:
        line.close()
