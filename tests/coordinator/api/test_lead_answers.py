"""What hospitals say is bounded before a lead sees it: nobody can make an answer that a lead cannot take."""

from __future__ import annotations

import io
from dataclasses import replace

import grpc
import pytest
from rich.console import Console

from coordinator.api.control import data_offer
from coordinator.lead.as_json import silo_json
from coordinator.lead.client import LeadClient
from coordinator.lead.tables import doing, silos_table
from coordinator.storage.records import DataOffer
from fl_core.errors import ConfigError, ProtocolError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import status
from protos.wire.channel_options import MAX_MESSAGE_BYTES
from service_core.pki.identity import Address
from tests.support import until
from tests.support.coordinator import HELLO, INVALID, Line, World, code
from tests.support.federations import NAMES, manifest


@pytest.mark.fault("a hospital", "declares megabytes of class names", "refused with E-WIRE-06")
@pytest.mark.parametrize("field", ["classes", "holds"])
def test_names_of_classes_are_bounded_in_all(field: str) -> None:
    names = [f"{number:0200d}" for number in range(1000)]
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        data_offer(pb.DataOffer(name="digits", **{field: names}))
    assert data_offer(pb.DataOffer(name="digits", **{field: names[:500]}))


def test_an_answer_above_four_mebibytes_reaches_the_lead(world: World) -> None:
    assert world.server is not None
    for name in NAMES:
        offer = DataOffer("digits", classes=tuple(f"{n:0200d}" for n in range(10_000)))  # of an earlier version
        world.server.store.members.introduce(name, "", offer)
    lead = LeadClient(Address("127.0.0.1", world.port), world.people["lead"])
    try:
        found = lead.silos()
    finally:
        lead.close()
    assert found.ByteSize() > MAX_MESSAGE_BYTES
    assert {len(silo.data.classes) for silo in found.silos} == {10_000}


@pytest.mark.fault("a hospital", "sends impossible values in its pulses", "the values shown to leads are bounded")
def test_a_pulse_of_nonsense_keeps_no_lead_out(world: World) -> None:
    line = Line(world, "north", HELLO, silent=True)
    line.say(pulse=pb.Pulse(activity=99, run_id="x" * 1_000_000, round=2**32 - 1, done=2**64 - 1, total=1))

    def shown() -> pb.SiloInfo:
        return next(s for s in world.lead().Silos(pb.SilosRequest()).silos if s.name == "north")

    until(lambda: shown().done, "the pulse")
    info = shown()
    assert len(info.run_id) <= 128
    assert info.activity == pb.ACTIVITY_UNSPECIFIED
    Console(file=io.StringIO()).print(silos_table([info]))
    assert silo_json(info)["activity"] == "activity_unspecified"
    line.close()


def test_an_activity_of_a_later_version_is_shown_as_not_said() -> None:
    info = pb.SiloInfo(state="online", activity=99)
    assert doing(info) == "idle"
    assert silo_json(info)["activity"] == "activity_unspecified"


@pytest.mark.parametrize("name", ["x", "\x1b", "\U0001f600", "%"])
def test_a_refusal_of_a_long_name_still_says_why(world: World, name: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        world.lead().Show(pb.RunQuery(run_id=name * 1_000_000))
    assert code(caught) == (INVALID, "E-RUN-10")


def test_a_status_that_is_short_enough_is_not_cut() -> None:
    error = ProtocolError("E-WIRE-06", "é" * 500 + "x" * 2000)
    assert status.to_status(error)[1] == str(error)


@pytest.mark.fault("a lead", "submits a run with impossible numbers", "refused with E-CFG-02; no list contains it")
@pytest.mark.parametrize(
    "wrong", [{"rounds": 10**12}, {"rounds": 2**31}, {"threads": 10**6}, {"name": "x" * 1_000_000}], ids=str
)
def test_a_run_that_cannot_be_is_not_taken(world: World, wrong: dict[str, object]) -> None:
    world.manifests["spec"] = replace(manifest(), **wrong)
    with pytest.raises(grpc.RpcError) as caught:
        world.lead().Submit(pb.SubmitRequest(spec_json="spec", request_id="1"))
    assert code(caught) == (INVALID, "E-CFG-02")
    assert not world.lead().Runs(pb.RunsRequest()).runs


def test_events_after_the_last_number_there_can_be_are_none(world: World) -> None:
    run = world.submit(manifest())
    world.lead().Abort(pb.RunQuery(run_id=run.id))
    assert not list(world.lead().Watch(pb.WatchRequest(run_id=run.id, after=2**64 - 1)))


def test_what_a_lead_asks_wrongly_is_a_wrong_command_and_not_a_broken_protocol(world: World) -> None:
    lead = LeadClient(Address("127.0.0.1", world.port), world.people["lead"])
    try:
        with pytest.raises(ConfigError, match="E-RUN-10"):  # status 2: the caller can put it right
            lead.show("nobody")
    finally:
        lead.close()
