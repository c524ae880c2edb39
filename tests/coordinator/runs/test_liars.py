"""Hospitals that lie over the wire, beside honest ones: what is refused before a receipt, what later, and who hears."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import pytest
import torch

from coordinator.api.control import data_offer
from coordinator.storage.records import DataOffer, StoredRun
from fl_core.aggregation.options import NormClipped
from fl_core.errors import ProtocolError
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.records import update_outcomes
from fl_core.types.values import Bundle, Part
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from tests.support import until
from tests.support.coordinator import World, commit, cut, events, online, open_request, open_round, update_bytes
from tests.support.federation import federation, manifest
from tests.support.federations import NAMES, same

pytestmark = pytest.mark.integration

Alter = Callable[[int, TaskKind, Bundle], Bundle]
Told = dict[int, tuple[bool, str]]
NOTHING = dict.fromkeys(("updates_refused", "updates_cut", "cut_rows", "unbounded_rounds"), 0)


def scaled(factor: float, weight: float = 1.0, since: int = 0) -> Alter:
    """Multiply an update's mean and weight, from a round on."""

    def alter(round: int, kind: TaskKind, sent: Bundle) -> Bundle:
        if "delta" not in sent or round < since:
            return sent
        part = sent["delta"]
        total = {name: v * (factor * weight) for name, v in part.total.items()}
        return {**sent, "delta": Part(total, part.weight * weight)}

    return alter


@contextmanager
def finished_beside(tmp_path: Path, agreed: RunManifest, alter: Alter) -> Iterator[tuple[World, StoredRun, Told]]:
    """Finish a run in which east alters its updates; give also what east was told of each round."""
    with federation(tmp_path / "home") as people:
        world = people.world
        people.come("north", "south")
        people.come("east", alter=alter)
        for name in NAMES:
            until(online(world, name), f"{name} to be here")
        run = world.finished(world.submit(agreed).id, 60)
        people.told("ended", run.id)
        yield world, run, people["east"].closes(run.id)


NORM_CLIPPED = NamedOptions("norm_clipped", asdict(NormClipped()))
AGREED = replace(manifest("fedavg", rounds=3, quorum=2), patience_s=60.0, aggregator=NORM_CLIPPED)


@pytest.mark.fault(
    "a hospital",
    "sends an update with a larger weight than it declared",
    "refused before its receipt, with the reason; the run continues",
)
def test_a_false_weight_is_refused_before_its_receipt_and_the_run_goes_on(tmp_path: Path) -> None:
    with finished_beside(tmp_path, AGREED, scaled(1.0, 1000.0, since=1)) as (world, run, told):
        rounds = [row.record for row in world.server.store.runs.rounds(run.id)]
        assert [row.included for row in rounds[:3]] == [tuple(sorted(NAMES)), ("north", "south"), ("north", "south")]
        said = rounds[1].missing["east"]
        assert "E-RUN-43: east: update refused: weight of 'delta' 14000, but the run allows 0 to 100." in said
        assert ("east", said) in events(world, run.id, "refused")
        assert told[1] == (False, said)


@pytest.mark.fault(
    "a hospital", "sends an update of 1,000 times the usual length", "refused, with the reason; the round continues"
)
def test_a_long_update_is_refused_in_the_round_and_the_silo_hears_why(tmp_path: Path) -> None:
    with finished_beside(tmp_path, AGREED, scaled(1000.0, since=1)) as (world, run, told):
        assert update_outcomes(world.lead().Show(pb.RunQuery(run_id=run.id)).rounds) == {
            **NOTHING,
            "updates_refused": 2,
        }
        assert run.closed == 3
        assert told[0] == (True, "")
        for t in (1, 2):
            assert not told[t][0]
            assert told[t][1].startswith("E-RUN-44: east: update refused: ")
        assert len(events(world, run.id, "refused")) == 2


@pytest.mark.fault(
    "a hospital", "sends an update of nine times the usual length", "clipped; the lead and the hospital are notified"
)
def test_a_cut_is_in_the_record_in_the_events_and_told_to_the_silo(tmp_path: Path) -> None:
    with finished_beside(tmp_path, replace(AGREED, quorum=3), scaled(9.0, since=1)) as (world, run, told):
        rounds = [row.record for row in world.server.store.runs.rounds(run.id)]
        assert events(world, run.id, "cut")[0] == ("east", "round 2: east's update clipped to 4 times the usual norm")
        assert rounds[1].cut == {"east": "update clipped to 4 times the usual norm"}
        assert rounds[0].medians["delta"] > 0
        assert told[1] == (True, "update clipped to 4 times the usual norm")
        shown = world.lead().Show(pb.RunQuery(run_id=run.id)).rounds[1]
        assert dict(shown.cut) == rounds[1].cut
        assert dict(shown.medians) == rounds[1].medians
        detail = world.lead().Show(pb.RunQuery(run_id=run.id))
        assert detail.aggregator == "norm_clipped"
        assert (
            update_outcomes(detail.rounds)
            == update_outcomes(rounds)
            == {**NOTHING, "updates_cut": len(events(world, run.id, "cut"))}
        )


def test_a_run_with_a_cut_that_is_resumed_after_a_restart_is_the_run_without_one(tmp_path: Path) -> None:
    """The bound follows from the rounds in the record: a service that forgot them would begin with a new one."""
    models, agreed = [], replace(AGREED, quorum=3, rounds=4)
    for restarted in (False, True):
        with federation(tmp_path / str(restarted) / "home") as people:
            world = people.world
            people.come("north", "south")
            people.come("east", alter=scaled(9.0, since=2))
            run_id = world.submit(agreed).id
            if restarted:
                until(lambda: world.run(run_id).closed >= 2, "two closed rounds", 60)  # noqa: B023
                world.stop()
                world.start()
            world.finished(run_id, 60)
            models.append(world.model(run_id))
            assert events(world, run_id, "cut")
    assert same(models[0]["w"], models[1]["w"])


@pytest.mark.fault(
    "a hospital",
    "commits an invalid update (no tensors, NaN, another layout, a false weight, integers)",
    "no receipt; its bytes are deleted",
)
@pytest.mark.parametrize("lie", ["not tensors", "NaN", "another layout", "weight", "integers"])
def test_nothing_is_signed_that_no_round_would_take(world: World, lie: str, tmp_path: Path) -> None:
    assert world.server is not None
    world.server.store.members.introduce("north", "", DataOffer("digits", train_examples=14, test_examples=7))
    _, offer = open_round(world)
    made = {
        "not tensors": (b"\x00" * 64, "E-WIRE-06"),
        "NaN": (update_bytes(math.nan), "E-WIRE-05"),
        "another layout": (update_bytes(0.5, manifest("fedmr")), "E-WIRE-06"),
        "weight": (update_bytes(0.5, weight=2.0**24), "E-RUN-43"),
        "integers": (update_bytes(1.0, dtype=torch.int64), "E-WIRE-06"),
    }
    data, code = made[lie]
    stub, request = world.transfer("north"), open_request("north", offer, data)
    stub.Open(request)
    stub.Put(cut(data, request.contribution_id))
    with pytest.raises(grpc.RpcError) as caught:
        commit(stub, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(code)
    assert world.server.uploads.size("north", request.contribution_id) == 0
    found = world.server.store.contributions.contribution(request.contribution_id)
    assert found is not None
    assert found.received is None


@pytest.mark.fault(
    "a hospital", "sends an update whose tensor names have megabytes", "refused; leads see a short reason"
)
def test_long_names_inside_an_update_do_not_reach_the_leads(world: World) -> None:
    assert world.server is not None
    run, offer = open_round(world)
    bundle = {"x" * 400_000: Part({}, torch.zeros(()))}
    data = codec.pack_bundle(bundle)
    stub, request = world.transfer("north"), open_request("north", offer, data)
    stub.Open(request)
    stub.Put(cut(data, request.contribution_id))
    with pytest.raises(grpc.RpcError, match="E-WIRE-06: expected the parts"):
        commit(stub, request)
    until(lambda: events(world, run.id, "refused"), "the refusal")
    assert all(len(text) < 2000 for _, text in events(world, run.id, "refused"))


def test_a_size_that_is_declared_after_the_run_was_submitted_does_not_count_in_it(world: World) -> None:
    assert world.server is not None
    members = world.server.store.members
    members.introduce("north", "", DataOffer("digits", train_examples=14, test_examples=7))
    _, offer = open_round(world)
    members.introduce("north", "", DataOffer("digits", train_examples=1e9, test_examples=1e9))
    data = update_bytes(0.5, weight=1000.0)
    stub, request = world.transfer("north"), open_request("north", offer, data)
    stub.Open(request)
    stub.Put(cut(data, request.contribution_id))
    with pytest.raises(
        grpc.RpcError, match="E-RUN-43: north: update refused: weight of 'delta' 1000, but the run allows 0 to 14"
    ):
        commit(stub, request)


@pytest.mark.parametrize("field", ["nominal_size", "train_examples", "test_examples"])
@pytest.mark.parametrize("size", [math.nan, math.inf, -math.inf, -1.0, 2.0**53, 1e300])
@pytest.mark.fault("a hospital", "declares an impossible size of its data", "its session is refused")
def test_declared_sizes_are_finite_and_not_negative(field: str, size: float) -> None:
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        data_offer(pb.DataOffer(name="digits", **{field: size}))


@pytest.mark.parametrize(
    "source", ["SELECT * FROM reports", "query:", "query:" + "g" * 16, "table:" + "a" * 17, "a" * 16]
)
def test_a_declared_source_of_labels_is_a_digest_alone(source: str) -> None:
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        data_offer(pb.DataOffer(name="manifest", label_source=source))
    assert data_offer(pb.DataOffer(name="manifest", label_source="query:" + "a" * 16)).label_source


def test_a_run_of_two_says_once_what_bounds_one_of_them_and_of_each_round_that_nothing_was_there_to_compare_with(
    tmp_path: Path,
) -> None:
    names = ("north", "south")
    with federation(tmp_path / "home", names) as people:
        world = people.world
        people.come(*names)
        run = world.finished(world.submit(manifest("fedavg", rounds=2, names=names)).id, 60)
        said = [text for _, text in events(world, run.id, "warning")]
        assert [text.partition(":")[0] for text in said] == ["fewer than 3 silos", "round 1", "round 2"]
        assert said[0].startswith("fewer than 3 silos: one of them can move the model by several times")
        assert said[0].endswith("one refused update pauses the run")
