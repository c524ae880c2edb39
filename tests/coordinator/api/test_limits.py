"""One certificate cannot stop the service for others: what it may have at once, how often, and in silence."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.api import control
from coordinator.api.limits import Bucket, Limits, Rate
from coordinator.pki.membership import Membership
from coordinator.storage.members import MemberStore
from coordinator.storage.store import CoordinatorStore
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole
from service_core.pki.invitation import InvitationToken
from service_core.storage.private_files import Credentials
from service_core.version import PROTOCOL
from tests.support import until
from tests.support.coordinator import (
    AWAY,
    DATA,
    DENIED,
    FAST,
    HELLO,
    INVALID,
    Line,
    World,
    channel,
    chunk,
    code,
    cut,
    online,
    open_request,
    open_round,
    running,
)
from tests.support.federations import NAMES

QUICK = Limits(hello_s=0.3, put_idle_s=0.3, get_idle_s=0.3, watch_s=0.3)
MANY = 70


def serving(folder: Path, limits: Limits = QUICK) -> object:
    return running(folder / "home", NAMES, replace(FAST, limits=limits))


def invited(world: World, name: str = "west") -> Credentials:
    token = Membership(world.home, world.server.store).invite(name).token
    return InvitationToken.decode(token).credentials


class Idle:
    """Streams of one certificate in which nothing is said."""

    def __init__(self, world: World, own: Credentials, many: int) -> None:
        self._quiet = threading.Event()
        self._channel = channel(world.port, own)
        health, asked = health_pb2_grpc.HealthStub(self._channel), health_pb2.HealthCheckRequest()
        reflection = reflection_pb2_grpc.ServerReflectionStub(self._channel)
        transfer, control = rpc.TransferStub(self._channel), rpc.ControlStub(self._channel)
        self.kinds: Mapping[str, Callable[[], grpc.Call]] = {
            "watch": lambda: health.Watch(asked),
            "reflection": lambda: reflection.ServerReflectionInfo(self._nothing()),
            "put": lambda: transfer.Put.future(self._nothing()),
            "session": lambda: control.Session(self._nothing()),
        }
        makers = list(self.kinds.values())
        self.calls = [makers[k % len(makers)]() for k in range(many)]

    def _nothing(self) -> Iterator[object]:
        self._quiet.wait(60)
        yield from ()

    def close(self) -> None:
        for call in self.calls:
            call.cancel()
        self._quiet.set()
        self._channel.close()


@pytest.mark.fault("a hospital", "holds 70 idle streams", "leads and other hospitals are answered as before")
def test_idle_streams_of_one_hospital_take_nothing_from_others(tmp_path: Path) -> None:
    with serving(tmp_path, Limits()) as world, ExitStack() as stack:
        idle = Idle(world, world.people["north"], MANY)
        stack.callback(idle.close)
        assert len(world.lead().Silos(pb.SilosRequest(), timeout=60).silos) == len(NAMES)
        line = Line(world, "south", HELLO)
        stack.callback(line.close)
        until(lambda: line.kinds().count("pulse") >= 3, "pulses", 20)
        refused = [call for call in idle.calls if call.done()]
        assert len(refused) >= MANY - 2 * Limits().streams[CertificateRole.SILO]


@pytest.mark.fault("the holder of an invitation", "opens 70 idle streams", "each is refused at once")
def test_an_invitation_opens_no_stream_at_all(tmp_path: Path) -> None:
    with serving(tmp_path) as world, ExitStack() as stack:
        own = invited(world)
        idle = Idle(world, own, MANY)
        stack.callback(idle.close)
        until(
            lambda: all(call.done() for call in idle.calls),
            str([k for k, c in enumerate(idle.calls) if not c.done()]),
            30,
        )
        answers = {call.details().split(":")[0] for call in idle.calls}
        assert answers <= {"E-ID-11", "E-NET-12"}
        Membership(world.home, world.server.store).revoke("west", "withdrawn")
        with pytest.raises(grpc.RpcError) as error:
            health_pb2_grpc.HealthStub(channel(world.port, own)).Check(health_pb2.HealthCheckRequest())
        assert error.value.details().split(":")[0] in ("E-ID-11", "E-NET-12")


@pytest.mark.fault("a revoked hospital", "calls health or reflection", "refused with E-ID-12")
def test_a_revoked_hospital_may_call_nothing_at_all(tmp_path: Path) -> None:
    with serving(tmp_path) as world, channel(world.port, world.people["north"]) as ch:
        health = health_pb2_grpc.HealthStub(ch)
        health.Check(health_pb2.HealthCheckRequest())
        Membership(world.home, world.server.store).revoke("north", "test")
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        for attempt in (
            lambda: health.Check(health_pb2.HealthCheckRequest()),
            lambda: list(health.Watch(health_pb2.HealthCheckRequest())),
            lambda: list(reflection_pb2_grpc.ServerReflectionStub(ch).ServerReflectionInfo(iter([ask]))),
        ):
            with pytest.raises(grpc.RpcError, match="E-ID-12"):
                attempt()


@pytest.mark.parametrize("kind", ["watch", "reflection", "put", "session"])
@pytest.mark.fault("a revoked hospital", "keeps its streams open", "ended within 5 s with E-ID-12")
def test_open_streams_of_a_revoked_hospital_end(tmp_path: Path, kind: str) -> None:
    with serving(tmp_path, Limits(check_s=0.2)) as world, ExitStack() as stack:
        _, offer = open_round(world)
        request = open_request("north", offer, DATA)
        world.transfer("north").Open(request)
        idle = Idle(world, world.people["north"], 0)
        stack.callback(idle.close)
        if kind == "session":
            line = Line(world, "north", HELLO)
            until(lambda: line.got, "a welcome")
        else:
            call = idle.kinds[kind]()
        Membership(world.home, world.server.store).revoke("north", "test")
        if kind == "session":
            assert line.failure() == (DENIED, "E-ID-12")
            return
        with pytest.raises(grpc.RpcError) as error:
            call.result(60) if kind == "put" else list(call)
        assert code(error) == (DENIED, "E-ID-12")


def revoke_elsewhere(world: World) -> None:
    """Revoke as the command does: another connection to the database, which tells the service nothing."""
    with closing(CoordinatorStore(world.home)) as store:
        Membership(world.home, store).revoke("north", "test")


@pytest.mark.parametrize("said", [True, False], ids=["after its hello", "before its hello"])
def test_a_revoked_hospitals_session_ends_within_5_s_however_far_apart_pulses_are(tmp_path: Path, said: bool) -> None:
    assert Limits().check_s + 2 * control._LAST_WORD_S < 5
    rare = replace(FAST, pulse_s=300.0, limits=Limits(check_s=0.1))
    with running(tmp_path / "home", NAMES, rare) as world:
        line = Line(world, "north", HELLO if said else None)
        if said:
            until(online(world, "north"), "north")
        else:
            until(lambda: world.server._streams._open, "the stream")
        revoke_elsewhere(world)
        assert line.failure() == (DENIED, "E-ID-12")  # within a minute: no pulse comes before five
        assert line.kinds()[-1] == "refusal"
        until(lambda: world.server.dispatcher.activity_of("north") is None, "north away")


def test_a_revoked_hospitals_session_ends_also_while_every_thread_for_members_is_taken(tmp_path: Path) -> None:
    free = threading.Event()
    with serving(tmp_path, Limits(check_s=0.1)) as world:
        line = Line(world, "north", HELLO)
        until(online(world, "north"), "north")
        for _ in range(100):
            world.server._members._pool.submit(free.wait, 60)
        try:
            revoke_elsewhere(world)
            assert line.failure() == (DENIED, "E-ID-12")
        finally:
            free.set()


@pytest.mark.fault("a revoked hospital", "does not read its session", "ended within 5 s with E-ID-12")
def test_a_revoked_hospital_that_reads_nothing_is_cut_all_the_same(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(control, "_LAST_WORD_S", 0.1)
    held = threading.Event()

    async def write(*_: object) -> None:
        held.set()
        await asyncio.sleep(3600)

    with serving(tmp_path, Limits(check_s=0.1, hello_s=3600)) as world:
        line = Line(world, "north", HELLO)
        until(online(world, "north"), "north")
        monkeypatch.setattr(control.ControlService, "_write", write)
        assert held.wait(60)
        revoke_elsewhere(world)
        assert line.failure() == (DENIED, "E-ID-12")


def test_a_look_that_fails_once_is_repeated(tmp_path: Path, monkeypatch) -> None:
    asked: list[str] = []
    true_status = MemberStore.membership_status

    def sometimes(store: MemberStore, name: str, serial: str) -> object:
        asked.append(name)
        if len(asked) == 2:
            raise sqlite3.OperationalError("disk I/O error")
        return true_status(store, name, serial)

    monkeypatch.setattr(MemberStore, "membership_status", sometimes)
    monkeypatch.setattr(MemberStore, "in_force", lambda _: {}["no disk"])  # so that they are asked for one by one
    with serving(tmp_path, Limits(check_s=0.05)) as world:
        line = Line(world, "north", HELLO)
        until(lambda: len(asked) > 3, "more looks")
        assert not line.over.is_set()
        line.close()


@pytest.mark.parametrize("kind", ["watch", "reflection", "session"])
@pytest.mark.fault("a hospital", "opens a stream and sends nothing", "ended with E-NET-12")
def test_a_stream_that_says_nothing_is_ended(tmp_path: Path, kind: str) -> None:
    with serving(tmp_path) as world:
        idle = Idle(world, world.people["north"], 0)
        with pytest.raises(grpc.RpcError) as error:
            list(idle.kinds[kind]())
        assert code(error) == (AWAY, "E-NET-12")
        idle.close()


@pytest.mark.fault("a hospital", "opens an upload and sends nothing", "ended with E-NET-12")
def test_an_upload_that_sends_nothing_is_ended(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        _, offer = open_round(world)
        request, quiet = open_request("north", offer, DATA), threading.Event()
        stub = world.transfer("north")

        def trickle(first: list[pb.Chunk]) -> Iterator[pb.Chunk]:
            yield from first
            quiet.wait(60)

        for first in ([], [chunk(DATA[:7], 0, request.contribution_id)]):
            stub.Open(request)
            with pytest.raises(grpc.RpcError) as error:
                stub.Put(trickle(first), timeout=20)
            assert code(error) == (AWAY, "E-NET-12")
        quiet.set()
        assert stub.Open(request).have == 7
        assert stub.Put(cut(DATA, request.contribution_id, 7)).have == len(DATA)


@pytest.mark.fault(
    "a hospital", "sends an upload without opening it", "ended with E-NET-12 before its first message is read"
)
def test_an_upload_that_was_not_opened_is_not_read(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        _, offer = open_round(world)
        world.transfer("south").Open(open_request("south", offer, DATA))
        with pytest.raises(grpc.RpcError) as error:
            world.transfer("north").Put(iter([pb.Chunk(object="f" * 64, data=DATA)]))
        assert code(error) == (AWAY, "E-NET-12")


@pytest.mark.fault("a hospital", "sends calls without pause", "refused with E-NET-12; leads are answered")
def test_calls_per_second_are_bounded(tmp_path: Path) -> None:
    limits = replace(Limits(), calls={**Limits().calls, CertificateRole.SILO: Rate(0.001, 10)})
    with serving(tmp_path, limits) as world:
        stub = world.transfer("north")
        answers = []
        for _ in range(30):
            with pytest.raises(grpc.RpcError) as error:
                stub.Open(pb.OpenRequest())
            answers.append(code(error))
        assert answers[:10] == [(INVALID, "E-WIRE-12")] * 10
        assert set(answers[10:]) == {(AWAY, "E-NET-12")}
        assert len(world.lead().Silos(pb.SilosRequest(), timeout=5).silos) == len(NAMES)
        with pytest.raises(grpc.RpcError, match="E-WIRE-12"):
            world.transfer("south").Open(pb.OpenRequest())


@pytest.mark.fault(
    "the holder of an invitation", "tries to enrol again and again", "refused with E-NET-12 after a few attempts"
)
def test_attempts_to_enrol_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        stub = rpc.EnrolmentStub(channel(world.port, invited(world)))
        answers = []
        for _ in range(15):
            with pytest.raises(grpc.RpcError) as error:
                stub.Join(pb.JoinRequest(csr_pem=b"no request"))
            answers.append(error.value.details()[:8])
        assert answers == ["E-ID-31:"] * 10 + ["E-NET-12"] * 5


@pytest.mark.fault(
    "a stranger", "enrols from one address with many stolen invitations", "refused with E-NET-12 after 60 attempts"
)
def test_attempts_to_enrol_are_bounded_for_each_address(tmp_path: Path) -> None:
    limits = replace(Limits(), joins_per_address=Rate(0.001, 3))
    with serving(tmp_path, limits) as world:
        answers = []
        for k in range(5):
            with pytest.raises(grpc.RpcError) as error:
                rpc.EnrolmentStub(channel(world.port, invited(world, f"w{k}"))).Join(pb.JoinRequest(csr_pem=b"no"))
            answers.append(error.value.details()[:8])
        assert answers == ["E-ID-31:"] * 3 + ["E-NET-12"] * 2


@pytest.mark.fault(
    "a hospital", "renews its certificate 60 times in a row", "refused with E-NET-12 after a few attempts"
)
def test_renewals_are_bounded_for_each_hospital(tmp_path: Path) -> None:
    with serving(tmp_path) as world:
        key = certificates.new_key()
        answers = []
        stub = rpc.EnrolmentStub(channel(world.port, world.people["north"]))
        for _ in range(60):
            with pytest.raises(grpc.RpcError) as error:
                stub.Renew(pb.RenewRequest(csr_pem=certificates.make_request(key), renewal_proof=b"forged"))
            answers.append(error.value.details()[:8])
        assert answers[:5] == ["E-ID-13:"] * 5
        assert set(answers[5:]) == {"E-NET-12"}


def _unknown(size: int) -> bytes:
    """Make fields with numbers that nobody uses."""
    return b"\xa2\x06\x00" * size


@pytest.mark.parametrize(
    "hello",
    [
        pb.Hello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            staged=[pb.RoundRef(run_id="r", round=k) for k in range(100_000)],
        ).SerializeToString(),
        HELLO.SerializeToString() + _unknown(1_000_000),
    ],
    ids=["100,000 staged rounds", "a million unknown fields"],
)
@pytest.mark.fault(
    "a hospital", "sends a Hello with 100,000 rounds or a million unknown fields", "refused with E-WIRE-06"
)
def test_a_monstrous_hello_is_refused_with_a_last_word(tmp_path: Path, hello: bytes) -> None:
    with serving(tmp_path, Limits()) as world:
        line = Line(world, "north", pb.Hello.FromString(hello))
        assert line.failure() == (INVALID, "E-WIRE-06")
        assert line.got[-1].refusal.code == "E-WIRE-06"
        assert not online(world, "north")()


@pytest.mark.fault("a hospital", "floods its session with messages", "the session ends with E-NET-12")
def test_a_flood_of_messages_ends_the_session(tmp_path: Path) -> None:
    with serving(tmp_path, replace(Limits(), messages=Rate(0.001, 50))) as world:
        line = Line(world, "north", HELLO)
        for _ in range(100):
            line.say(pulse=pb.Pulse())
        assert line.failure() == (AWAY, "E-NET-12")


@pytest.mark.fault("a hospital", "sends a call with a million unknown fields", "refused with E-WIRE-06")
def test_a_call_of_unknown_fields_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as world, pytest.raises(grpc.RpcError, match="E-WIRE-06"):
        world.transfer("north").Open(pb.OpenRequest.FromString(_unknown(1_000_000)))


def test_a_bucket_counts_by_its_clock_and_not_backwards() -> None:
    now = [0.0]
    bucket = Bucket(Rate(2.0, 3), lambda: now[0])
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5]
    now[0] = 0.5
    assert bucket.take() == 0
    now[0] = -100.0
    assert bucket.take() > 0
    now[0] = 1e9
    assert bucket.full
    assert [bucket.take() > 0 for _ in range(4)] == [False, False, False, True]
