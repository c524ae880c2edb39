"""Sessions: who may have one, what it brings, and how it ends."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from coordinator.api.control import session_seconds
from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership
from coordinator.storage.store import FILE
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from service_core.pki.invitation import InvitationToken
from service_core.version import PROTOCOL
from tests.support import until
from tests.support.coordinator import DENIED, FAST, HELLO, Line, World, channel, credentials, online, running, send
from tests.support.federations import NAMES, manifest


def test_a_session_begins_with_a_welcome_and_has_pulses_both_ways(tmp_path: Path) -> None:
    unhurried = replace(FAST, pulse_s=2.0)  # a line by hand is dropped after three pulses without an answer
    with running(tmp_path / "home", NAMES, unhurried) as world:
        line = Line(world, "north", HELLO)
        until(lambda: line.kinds().count("pulse") >= 2, "pulses")
        welcome = line.got[0].welcome
        assert (welcome.protocol, welcome.pulse_seconds) == (PROTOCOL, unhurried.pulse_s)
        assert 225 <= welcome.recycle_seconds <= 300
        assert welcome.signed_roster
        info = next(s for s in world.lead().Silos(pb.SilosRequest()).silos if s.name == "north")
        assert (info.state, info.software, info.activity, list(info.data.shape)) == (
            "online",
            "by hand 1.0",
            pb.TRAINING,
            [1, 8, 8],
        )
        line.close()
        until(lambda: not online(world, "north")(), "north to leave")
        known = Line(world, "north", pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, roster_version=3))
        until(lambda: known.got, "a welcome")
        assert known.got[0].welcome.signed_roster == b""
        known.close()


def test_a_welcome_tells_a_silo_the_most_answers_in_masked_runs_that_it_has_stated(world: World) -> None:
    """Also after fewer, as of a home that was put back, and after a number that no database holds."""
    for stated, told in ((7, 0), (3, 7), (9, 7), (2**64 - 1, 9), (0, 1 << 53)):
        hello = pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, masked_answers=stated)
        line = Line(world, "north", hello)
        until(lambda line=line: line.got, "a welcome")
        assert line.got[0].welcome.masked_answers == told
        line.close()
        until(lambda: not online(world, "north")(), "north to leave")
    line = Line(world, "south", HELLO)
    until(lambda: line.got, "a welcome")
    assert line.got[0].welcome.masked_answers == 0
    line.say(secagg_confirm=pb.SecaggConfirm(run_id="run-1", kind=pb.TRAIN, masked_answers=4))
    until(lambda: world.server.store.secagg.note_answers("south", 0) == 4, "a number that came with a confirmation")
    line.close()


def test_sessions_that_begin_together_are_not_replaced_together(world: World) -> None:
    lines = [Line(world, name, HELLO) for name in NAMES]
    until(lambda: all(line.got for line in lines), "welcomes")
    assert len({line.got[0].welcome.recycle_seconds for line in lines}) == len(NAMES)
    for line in lines:
        line.close()


@pytest.mark.parametrize(("sessions", "longest"), [(3, 300.0), (300, 300.0), (1000, 1000.0), (100_000, 3600.0)])
def test_hardly_more_than_one_session_is_replaced_in_a_second(sessions: int, longest: float) -> None:
    drawn = [session_seconds(300.0, sessions) for _ in range(200)]
    assert 0.75 * longest <= min(drawn) < max(drawn) <= longest
    assert session_seconds(0.0, sessions) == 0.0


def test_a_session_that_says_nothing_new_writes_nothing(world: World) -> None:
    """A thousand hospitals that connect again wait for no lock of the database."""
    generation = world.home / f"{FILE}.generation"
    first = Line(world, "north", HELLO)
    until(lambda: "pulse" in first.kinds(), "a session")
    before = generation.read_bytes()
    again = Line(world, "north", HELLO)
    until(lambda: "pulse" in again.kinds(), "the next session")
    assert generation.read_bytes() == before
    changed = pb.Hello()
    changed.CopyFrom(HELLO)
    changed.software = "by hand 2.0"
    newer = Line(world, "north", changed)
    until(lambda: "pulse" in newer.kinds(), "a session with other software")
    assert world.server.store.members.silo("north").software == "by hand 2.0"
    assert generation.read_bytes() != before
    for line in (first, again, newer):
        line.close()


def test_a_silent_peer_is_dropped_after_three_pulses(world: World) -> None:
    line = Line(world, "north", HELLO, silent=True)
    started = time.monotonic()
    assert line.failure() == (grpc.StatusCode.UNAVAILABLE, "E-NET-12")
    assert time.monotonic() - started > 2 * FAST.pulse_s
    until(lambda: not online(world, "north")(), "north to leave")


@pytest.mark.parametrize(
    ("hello", "expected"),
    [
        (pb.Hello(protocol_min=PROTOCOL + 1, protocol_max=PROTOCOL + 6), (DENIED, "E-WIRE-01")),
        (pb.Hello(protocol_min=0, protocol_max=0), (DENIED, "E-WIRE-01")),
        (
            pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, data=pb.DataOffer(classes=["x" * 999])),
            (grpc.StatusCode.INVALID_ARGUMENT, "E-WIRE-06"),
        ),
    ],
)
def test_a_hello_that_cannot_be_is_refused_with_a_last_word(
    world: World, hello: pb.Hello, expected: tuple[grpc.StatusCode, str]
) -> None:
    line = Line(world, "north", hello)
    assert line.failure() == expected
    assert line.got[-1].refusal.code == expected[1]
    assert not online(world, "north")()


def test_a_session_that_does_not_begin_with_a_hello_is_refused(world: World) -> None:
    line = Line(world, "north")
    line.say(pulse=pb.Pulse())
    assert line.failure() == (grpc.StatusCode.INVALID_ARGUMENT, "E-WIRE-06")
    twice = Line(world, "east", HELLO)
    twice.say(hello=HELLO)
    assert twice.failure() == (grpc.StatusCode.INVALID_ARGUMENT, "E-WIRE-06")


def test_a_revoked_silo_is_dropped_soon_and_refused_at_the_next_call(world: World) -> None:
    line, stub = Line(world, "north", HELLO), world.transfer("north")
    until(lambda: line.kinds().count("pulse") >= 2, "pulses")
    before = len(line.got)
    Membership(world.home, world.server.store).revoke("north", "test")
    with pytest.raises(grpc.RpcError) as error:
        stub.Open(pb.OpenRequest())
    assert (error.value.code(), error.value.details()[:7]) == (DENIED, "E-ID-12")
    assert line.failure() == (DENIED, "E-ID-12")
    assert [m.WhichOneof("body") for m in line.got[before:]][-1] == "refusal"
    assert len(line.got) - before <= 3
    assert Line(world, "north", HELLO).failure() == (DENIED, "E-ID-12")
    silo = next(s for s in world.lead().Silos(pb.SilosRequest()).silos if s.name == "north")
    assert silo.state == "revoked"


def test_a_task_of_a_revoked_silo_that_is_away_does_not_wait(world: World) -> None:
    run = world.submit(manifest(rounds=1))
    until(lambda: world.server.store.runs.round(run.id, 0), "the round")
    for name in NAMES:
        world.server.store.members.revoke(name, "test")
    ended = world.ended(run.id)
    assert "E-RUN-03" in ended.reason
    assert ended.reason.count("E-ID-12") >= 2  # with two gone the quorum cannot be reached, and nobody is awaited


def test_roles_are_kept_apart(world: World) -> None:
    """The table of docs/protocol.md, call by call."""
    token = Authority.open(world.home).invite("west")
    world.people["west"] = InvitationToken.decode(token.token).credentials
    calls = {
        "Join": lambda ch: rpc.EnrolmentStub(ch).Join(pb.JoinRequest()),
        "Renew": lambda ch: rpc.EnrolmentStub(ch).Renew(pb.RenewRequest()),
        "Session": lambda ch: list(rpc.ControlStub(ch).Session(iter([]))),
        "Open": lambda ch: rpc.TransferStub(ch).Open(pb.OpenRequest()),
        "Put": lambda ch: rpc.TransferStub(ch).Put(iter([])),
        "Commit": lambda ch: rpc.TransferStub(ch).Commit(pb.CommitRequest()),
        "Get": lambda ch: list(rpc.TransferStub(ch).Get(pb.GetRequest())),
        "OpenWeights": lambda ch: rpc.LeadStub(ch).OpenWeights(pb.OpenWeightsRequest()),
        "PutWeights": lambda ch: rpc.LeadStub(ch).PutWeights(iter([])),
        "Submit": lambda ch: rpc.LeadStub(ch).Submit(pb.SubmitRequest()),
        "Runs": lambda ch: rpc.LeadStub(ch).Runs(pb.RunsRequest()),
        "Show": lambda ch: rpc.LeadStub(ch).Show(pb.RunQuery()),
        "Watch": lambda ch: list(rpc.LeadStub(ch).Watch(pb.WatchRequest())),
        "Abort": lambda ch: rpc.LeadStub(ch).Abort(pb.RunQuery()),
        "Resume": lambda ch: rpc.LeadStub(ch).Resume(pb.ResumeRequest()),
        "Exclude": lambda ch: rpc.LeadStub(ch).Exclude(pb.ExcludeRequest()),
        "Extend": lambda ch: rpc.LeadStub(ch).Extend(pb.ExtendRequest()),
        "Silos": lambda ch: rpc.LeadStub(ch).Silos(pb.SilosRequest()),
    }
    lead = {"Get", "Submit", "Runs", "Show", "Watch", "Abort", "Resume", "Exclude", "Extend", "Silos"}
    lead |= {"OpenWeights", "PutWeights"}
    allowed = {"north": {"Renew", "Session", "Open", "Put", "Commit", "Get"}, "lead": lead, "west": set()}
    for who, may in allowed.items():
        with channel(world.port, world.people[who]) as ch:
            for name, call in calls.items():
                try:
                    call(ch)
                    refused = False
                except grpc.RpcError as error:
                    refused = error.details().startswith(("E-ID-11", "E-ID-13"))
                assert refused is (name not in may), (who, name)


def test_a_certificate_of_another_consortium_gets_no_further_than_tls(world: World, tmp_path: Path) -> None:
    Authority.create(tmp_path / "other", "test", ["127.0.0.1:1"])
    stranger = credentials(tmp_path / "other", "north")._replace(ca_pem=world.people["north"].ca_pem)
    assert Line(world, "north", HELLO, own=stranger).failure()[0] is grpc.StatusCode.UNAVAILABLE


def test_offers_are_made_again_and_closes_are_told_after_a_reconnect(world: World) -> None:
    run = world.submit(manifest(rounds=1, quorum=1, names=("north",)))
    first = Line(world, "north", HELLO)
    until(lambda: first.of("offer"), "an offer")
    first.close()
    second = Line(world, "north", HELLO)
    until(lambda: second.of("offer"), "the offer again")
    assert second.of("offer")[0].offer.base_digest == first.of("offer")[0].offer.base_digest
    second.close()
    until(lambda: not online(world, "north")(), "north to leave")
    with pytest.raises(grpc.RpcError, match="E-WIRE-06"):
        send(world.transfer("north"), "north", second.of("offer")[0].offer, b"no bundle at all")
    ended = world.ended(run.id)
    assert "E-WIRE-06" in ended.reason
    world.server.runs.abort(run.id)
    staged = [pb.RoundRef(run_id=run.id, round=0, kind=pb.TRAIN), pb.RoundRef(run_id="nothing", round=3, kind=pb.TRAIN)]
    third = Line(world, "north", pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, staged=staged))
    until(lambda: third.of("run_ended"), "the end")
    assert (third.of("run_ended")[0].run_ended.state, third.of("round_closed")) == ("aborted", [])
    third.close()


def test_a_staged_round_is_answered_with_its_close(world: World) -> None:
    store = world.server.store.runs
    run = world.submit(manifest(rounds=2, quorum=1))
    until(lambda: store.round(run.id, 0), "the round")
    store.close_round(run.id, RoundRecord(0, TaskKind.TRAIN, (), (), ("north",), {"south": "late"}), None, "m")
    staged = [pb.RoundRef(run_id=run.id, round=0, kind=kind) for kind in (pb.TRAIN, pb.EVALUATE, 9)]
    for name, included in (("north", [True, False]), ("south", [False, False])):
        line = Line(world, name, pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, staged=staged))
        until(lambda line=line: len(line.of("round_closed")) == 2, "two closes")
        assert [m.round_closed.included for m in line.of("round_closed")] == included
        line.close()


def test_a_refused_offer_is_seen_by_the_lead_with_its_reason(tmp_path: Path) -> None:
    unhurried = replace(FAST, pulse_s=20.0, recycle_s=300)  # a line by hand does not come back once it counts as silent
    with running(tmp_path / "home", NAMES, unhurried) as world:
        run = world.submit(manifest(rounds=1, names=("north",)))
        line = Line(world, "north", HELLO)
        until(lambda: line.of("offer"), "an offer")
        answer = pb.Answer(run_id=run.id, round=0, kind=pb.TRAIN, code="E-PRIV-09", reason="the policy says no")
        line.say(answer=answer)
        ended = world.ended(run.id)
        assert "E-PRIV-09: the hospital refused: the policy says no" in ended.reason
        assert [e.silo for e in world.server.store.runs.events(run.id, 0) if e.kind == "refused"] == ["north"]
        line.close()


def test_sessions_do_not_starve_other_calls(tmp_path: Path) -> None:
    with running(tmp_path / "home", NAMES, replace(FAST, pulse_s=1.0)) as world:
        lines = [Line(world, name, HELLO) for name in NAMES for _ in range(10)]
        until(lambda: all(online(world, name)() for name in NAMES), "all three")
        assert len(world.lead().Silos(pb.SilosRequest(), timeout=60).silos) == 3
        for line in lines:
            line.close()
