"""Two sessions of one name: which of them stays, and what the other is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from coordinator.runs.dispatcher import Dispatcher, SiloSession
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from service_core.pki.identity import CertificateRole, Identity, PeerCertificate
from tests.support import until
from tests.support.coordinator import DENIED, FAST, HELLO, Line, World, channel, credentials, instance, running
from tests.support.federations import NAMES, manifest


def test_a_second_session_supersedes_the_first(world: World) -> None:
    first = Line(world, "north", HELLO)
    until(lambda: first.got, "a welcome")
    second = Line(world, "north", HELLO)
    until(lambda: second.got, "a welcome")
    assert first.over.wait(60)
    assert first.error is None
    assert not second.over.is_set()
    assert world.server.dispatcher.activity_of("north") is not None
    second.close()


def test_the_first_use_of_a_new_enrolment_shuts_the_old_key_out(world: World) -> None:
    old, new = world.people["north"], credentials(world.home, "north")
    here = Line(world, "north", HELLO, own=new)
    until(lambda: here.got, "a welcome")
    with pytest.raises(grpc.RpcError) as error:
        rpc.TransferStub(channel(world.port, old)).Open(pb.OpenRequest())
    assert (error.value.code(), error.value.details()[:7]) == (DENIED, "E-ID-12")
    assert not here.over.is_set()
    here.close()


def test_two_machines_with_one_name_are_told(tmp_path: Path) -> None:
    """The one with the newer certificate stays."""

    def session(issued: int) -> SiloSession:
        start = datetime(2026, 1, issued, tzinfo=UTC)
        who = Identity(CertificateRole.SILO, "test", "north")
        return SiloSession(PeerCertificate(who, f"{issued:x}", "f", start, start + timedelta(days=90)))

    dispatcher = Dispatcher(CoordinatorStore(tmp_path), 1.0)
    newer, renewed = session(2), session(3)
    dispatcher.attach(newer)
    with pytest.raises(RefusedError, match="E-ID-26"):
        dispatcher.attach(session(1))
    assert not newer.over
    newer.send(pb.CoordinatorMessage(pulse=pb.Pulse(round=7)))
    dispatcher.attach(renewed)
    assert newer.over
    assert renewed.next() == pb.CoordinatorMessage(pulse=pb.Pulse(round=7))  # nothing that was queued is lost
    dispatcher.store.close()


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[World]:
    """A coordinator for which a session of a slow machine is alive."""
    with running(tmp_path / "home", NAMES, replace(FAST, pulse_s=5.0)) as found:
        yield found


@pytest.mark.integration
def test_a_second_machine_is_refused_while_the_first_is_alive(patient: World) -> None:
    """The first stays undisturbed, the second is told why, and so is the lead."""
    world = patient
    run = world.submit(manifest(rounds=1, names=("north",)))
    first = Line(world, "north", instance("a"))
    until(lambda: first.of("offer"), "the task")
    second = Line(world, "north", instance("b", previous="c"))
    assert second.failure() == (DENIED, "E-ID-26")
    assert second.got[-1].refusal.code == "E-ID-26"
    pulses = first.kinds().count("pulse")
    until(lambda: first.kinds().count("pulse") > pulses, "one more pulse")
    assert not first.over.is_set()
    told = [e.text for e in world.server.store.runs.events(run.id, 0) if e.kind == "refused"]
    assert len(told) == 1
    assert told[0].startswith("E-ID-26")
    first.close()


@pytest.mark.parametrize("following", [{"id": "a"}, {"id": "b", "previous": "a"}])
def test_the_same_process_and_the_next_on_its_home_take_over_at_once(patient: World, following: dict[str, str]) -> None:
    world = patient
    first = Line(world, "north", instance("a"))
    until(lambda: first.got, "a welcome")
    second = Line(world, "north", instance(**following))
    until(lambda: second.got, "a welcome")
    assert first.over.wait(60)
    assert first.error is None
    assert not second.over.is_set()
    back = Line(world, "north", instance("a", previous="z"))  # a copy of the home at most displaces once
    if following["id"] == "b":
        assert back.failure() == (DENIED, "E-ID-26")
        assert not second.over.is_set()
    back.close()
    second.close()


def certified() -> PeerCertificate:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return PeerCertificate(Identity(CertificateRole.SILO, "test", "north"), "1", "f", start, start + timedelta(days=90))


def test_a_machine_that_fell_silent_makes_place(tmp_path: Path) -> None:
    peer = certified()
    dispatcher = Dispatcher(CoordinatorStore(tmp_path), 1.0)
    silent, fresh = SiloSession(peer, hello=instance("a")), SiloSession(peer, hello=instance("b"))
    dispatcher.attach(silent)
    silent.last_heard -= 1.0
    with pytest.raises(RefusedError, match="E-ID-26"):
        dispatcher.attach(fresh)
    silent.last_heard -= 1.0
    dispatcher.attach(fresh)
    assert silent.over
    dispatcher.store.close()


def test_a_silo_whose_message_is_being_processed_is_not_silent() -> None:
    """A busy service reads the pulses behind a message late: the silo has sent them."""
    session = SiloSession(certified())
    session.last_heard -= 100.0
    assert session.silent_s >= 100.0
    with session.hear():
        session.last_heard -= 100.0
        assert session.silent_s == 0.0
    assert session.silent_s < 50.0
