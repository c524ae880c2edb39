"""The control session and the client that keeps one: hello, pulses, silence, recycling, and coming back."""

from __future__ import annotations

import math
import threading

import pytest

from fl_core.errors import FederationError, ProtocolError, RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import Address
from service_core.tls.causes import Diagnosis
from service_core.version import PROTOCOL
from silo.cancellation import CancelToken
from silo.connection.channel import ConnectionManager
from silo.connection.control_client import RECONNECT_CAP_S, ControlClient
from silo.connection.retry import Backoff
from silo.connection.transfer import RetryPolicy
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.fake_coordinator import FakeControl, FakeTransfer, Host

WELL = Diagnosis(None, "works", "all is well")
QUICK = RetryPolicy(idle_s=5.0, backoff_s=0.001, backoff_cap_s=0.02)


class Handler:
    def __init__(self):
        self.seen = []
        self.fail = None

    def offer(self, offer):
        if self.fail:
            raise self.fail
        self.seen.append(offer)

    def round_closed(self, closed):
        self.seen.append(closed)

    def run_ended(self, ended):
        self.seen.append(ended)

    def pulse(self):
        return pb.Pulse(activity=pb.TRAINING, run_id="run-1", round=3, done=7, total=9)


class Rig:
    """A client on a thread of its own, and the coordinator that it talks to."""

    def __init__(self, folder, control=None, retry_policy=QUICK, finding=WELL):
        self.control = control or FakeControl()
        self.host = Host(FakeTransfer(), self.control)
        self.handler, self.stop, self.notices = Handler(), CancelToken(), []
        self.store = SiloStore(folder / "silo.db")
        self.session_opened = threading.Event()
        self.certificate = "first"
        self.hellos = []
        self.explained = []
        self.staged = []
        self.client = ControlClient(
            ConnectionManager([Address("127.0.0.1", 1)], lambda _: self.host.channel(), lambda: self.certificate),
            self.store,
            self.hello,
            lambda welcome: None,
            lambda address: (self.explained.append(address), finding)[1],
            self.notices.append,
            retry_policy,
            self.session_opened,
            pulse_floor=0.02,
        )
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def hello(self):
        self.hellos.append(1)
        return pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, staged=self.staged)

    def _run(self):
        try:
            self.client.run(self.handler, self.stop)
        except FederationError as error:
            self.error = error

    def start(self, sessions=1):
        self.thread.start()
        if sessions:
            until(lambda: len(self.control.sessions) >= sessions)
        return self

    def codes(self):
        return [n.facts.get("code") for n in self.notices]

    def close(self):
        self.stop.cancel("test over")
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.host.stop()


@pytest.fixture
def make(tmp_path):
    rigs = []

    def made(*args, **kwargs):
        rigs.append(Rig(tmp_path, *args, **kwargs))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()


def test_a_session_begins_with_hello_and_pulses_both_ways(make):
    rig = make(FakeControl(pulse_s=0.2)).start()
    until(lambda: len(rig.control.last.got("pulse")) >= 3)
    assert rig.control.last.hello.protocol_max == PROTOCOL
    assert rig.control.last.got("pulse")[0].done == 7
    assert rig.store.contact().address == "127.0.0.1:1"
    assert rig.session_opened.is_set()


def test_messages_reach_the_handler_in_order_and_a_senseless_one_is_reported(make):
    rig = make().start()
    rig.control.last.send(offer=pb.Offer(run_id="run-1"))
    rig.control.last.send(run_ended=pb.RunEnded(run_id="run-1"))
    until(lambda: len(rig.handler.seen) >= 2)
    rig.handler.fail = ProtocolError("E-WIRE-06", "no sense")
    rig.control.last.send(offer=pb.Offer(run_id="run-2"))
    until(lambda: "E-WIRE-06" in rig.codes())
    rig.client.send(pb.SiloMessage(answer=pb.Answer(run_id="run-1")))
    until(lambda: rig.control.last.got("answer"))


def test_what_follows_the_welcome_at_once_is_answered_over_that_session(make):
    """The offer is there before the client has dealt with the welcome; an answer that got lost would be missed."""
    rig = make()
    rig.control.greet = lambda session: session.send(offer=pb.Offer(run_id="run-1"))
    rig.handler.offer = lambda offer: rig.client.send(pb.SiloMessage(answer=pb.Answer(run_id=offer.run_id)))
    rig.client.on_welcome = lambda welcome: until(lambda: rig.control.last.got("answer"), what="for the answer")
    rig.start()
    until(lambda: rig.session_opened.is_set())
    assert len(rig.control.sessions) == 1


def test_it_comes_back_after_the_coordinator_was_restarted(make):
    rig = make().start()
    until(rig.session_opened.is_set)  # at the coordinator the session is there before the silo has read its welcome
    rig.host.stop()
    until(lambda: "disconnected" in [n.event for n in rig.notices])
    until(lambda: rig.codes().count("E-NET-01") >= 2)
    rig.host.start()
    until(lambda: len(rig.control.sessions) >= 2)
    assert rig.error is None


def test_the_wait_for_a_session_is_never_longer_than_its_cap(make, monkeypatch):
    asked = []
    quick = lambda base, cap: asked.append((base, cap)) or Backoff(base, 0.01)  # noqa: E731
    monkeypatch.setattr("silo.connection.control_client.Backoff", quick)
    make(retry_policy=RetryPolicy(idle_s=5.0)).start()
    assert asked == [(1.0, RECONNECT_CAP_S)]


def test_a_session_that_the_coordinator_ends_is_opened_anew(make):
    rig = make().start()
    rig.control.last.end()
    until(lambda: len(rig.control.sessions) >= 2)
    assert "E-NET-12" in rig.codes()


def test_a_coordinator_that_falls_silent_is_left(make):
    control = FakeControl(pulse_s=0.05)
    control.beats = False
    rig = make(control).start(sessions=2)
    assert "E-NET-12" in rig.codes()


@pytest.mark.fault("a connection", "is lost without notice", "a new one opens after three missed pulses")
def test_a_connection_that_falls_silent_is_replaced(make):
    control = FakeControl(pulse_s=0.05)
    control.beats = False
    rig = make(control)
    first = rig.client.connections.current()
    rig.start(sessions=2)
    assert rig.client.connections.current() is not first


def test_a_coordinator_that_never_welcomes_is_left(make):
    control = FakeControl()
    control.welcome = lambda hello: None
    rig = make(control, RetryPolicy(idle_s=0.1, backoff_s=0.001, backoff_cap_s=0.01)).start(sessions=0)
    until(lambda: rig.codes().count("E-NET-12") >= 2)


def test_a_session_is_recycled_by_opening_the_new_one_first(make):
    control = FakeControl(recycle_s=0.1)
    overlap = []
    control.greet = lambda session: overlap.append([s.over.is_set() for s in control.sessions[-1:]])
    rig = make(control).start(sessions=3)
    until(lambda: control.sessions[0].over.is_set())
    assert overlap[1:3] == [[False], [False]]
    assert [n.event for n in rig.notices] == ["connected"]


def test_a_recycling_that_fails_keeps_the_session_that_there_is(make):
    control = FakeControl(recycle_s=0.05)
    rig = make(control, RetryPolicy(idle_s=0.2, backoff_s=0.01, backoff_cap_s=0.02)).start()
    control.welcome = lambda hello: None
    until(lambda: "E-NET-12" in rig.codes())
    assert not control.sessions[-1].over.is_set()
    assert rig.explained == []


def test_each_hello_names_what_is_staged_by_then(make):
    rig = make().start()
    rig.staged.append(pb.RoundRef(run_id="run-1", round=4, kind=pb.TRAIN))
    rig.control.last.end()
    until(lambda: len(rig.control.sessions) >= 2)
    assert [s.round for s in rig.control.last.hello.staged] == [4]


def test_a_request_for_recycling_is_heard(make):
    rig = make().start()
    rig.client.recycle()
    until(lambda: len(rig.control.sessions) >= 2)


@pytest.mark.parametrize(
    ("code", "kind"), [("E-ID-12", RefusedError), ("E-WIRE-06", ProtocolError)], ids=["revoked", "protocol"]
)
def test_a_refusal_is_final(make, code, kind):
    control = FakeControl()
    control.welcome = lambda hello: pb.CoordinatorMessage(refusal=pb.Refusal(code=code, reason="no"))
    control.greet = lambda session: session.end()
    rig = make(control).start(sessions=0)
    rig.thread.join(20)
    assert isinstance(rig.error, kind)
    assert rig.error.code == code


def test_a_refusal_about_the_network_is_not(make):
    rig = make().start()
    rig.control.last.send(refusal=pb.Refusal(code="E-NET-20", reason="going down for maintenance"))
    rig.control.last.end()
    until(lambda: len(rig.control.sessions) >= 2)
    assert "E-NET-20" in rig.codes()


@pytest.mark.parametrize("asked", [0.0, -0.0, -1.0, 1e-40, 1e-3, math.nan, math.inf, 1e38, 3601.0])
@pytest.mark.parametrize("name", ["pulse_seconds", "recycle_seconds"])
@pytest.mark.fault(
    "a coordinator", "asks for a pulse of 0 s, or for a pulse or session time of NaN or a day", "refused with E-WIRE-06"
)
def test_times_that_no_coordinator_asks_for_are_refused(make, name, asked):
    control = FakeControl()
    facts = {"protocol": PROTOCOL, "pulse_seconds": 1.0, "recycle_seconds": 300.0, name: asked}
    control.welcome = lambda hello: pb.CoordinatorMessage(welcome=pb.Welcome(**facts))
    rig = make(control).start(sessions=0)
    if name == "recycle_seconds" and asked == 0:  # not stated: the session is kept
        until(lambda: rig.session_opened.is_set())
        return
    rig.thread.join(20)
    assert rig.error.code == "E-WIRE-06"
    assert name in str(rig.error)


@pytest.mark.parametrize("code", ["E-WIRE-01", "E-TLS-08", "welcome"])
@pytest.mark.fault(
    "a hospital",
    "has a wrong clock or another protocol",
    "its silo reports it, waits, and connects after the correction",
)
def test_a_wrong_clock_and_another_protocol_are_waited_out(make, code):
    control = FakeControl()
    right = control.welcome
    wrong = pb.CoordinatorMessage(refusal=pb.Refusal(code=code, reason="set the clock, or upgrade"))
    if code == "welcome":
        wrong = pb.CoordinatorMessage(welcome=pb.Welcome(protocol=PROTOCOL + 1, pulse_seconds=1))
    control.welcome = lambda hello: wrong
    control.greet = lambda session: session.end()
    rig = make(control).start(sessions=0)
    said = "E-WIRE-01" if code == "welcome" else code
    until(lambda: rig.codes().count(said) >= 2)
    assert rig.thread.is_alive()
    control.welcome, control.greet = right, lambda session: None
    until(rig.session_opened.is_set)
    assert rig.error is None


def test_a_tls_failure_before_the_first_session_is_explained_and_ends_the_attempt(make):
    rig = make(finding=Diagnosis("E-TLS-09", "another authority", "compare fingerprints"))
    rig.host.stop()
    rig.start(sessions=0)
    rig.thread.join(20)
    assert rig.error.code == "E-TLS-09"


def test_a_tls_failure_after_a_session_is_told_and_waited_out(make):
    rig = make(finding=Diagnosis("E-TLS-08", "the coordinator's certificate has expired", "renew it")).start()
    rig.host.stop()
    until(lambda: "E-TLS-08" in rig.codes())
    rig.host.start()
    until(lambda: len(rig.control.sessions) >= 2)


def test_leaving_says_so_and_closes_the_stream(make):
    rig = make().start()
    session = rig.control.last
    rig.stop.cancel("shutting down")
    rig.thread.join(20)
    assert session.over.is_set()
    assert rig.store.contact().why == "shutting down"
    assert rig.error is None


def refused(rig, code):
    """End the session as the coordinator ends that of a certificate that counts no longer."""
    rig.control.last.send(refusal=pb.Refusal(code=code, reason="its successor is in use"))
    rig.control.last.end()


PATIENT = RetryPolicy(idle_s=5.0, backoff_s=0.001, backoff_cap_s=3600.0)
"""A new session that is only due is opened after an hour."""


def test_a_renewal_replaces_session_and_connection_together_and_at_once(make):
    rig = make(retry_policy=PATIENT).start()
    before = rig.client.connections.current()
    rig.certificate = "second"
    held, welcome = threading.Event(), rig.control.welcome
    rig.control.welcome = lambda hello: held.wait(20) and welcome(hello)
    asked = len(rig.hellos)
    rig.client.renewed()
    until(lambda: len(rig.hellos) > asked)
    assert rig.client.connections.current() is before  # uploads stay with the session that there is
    held.set()
    until(lambda: rig.client.connections.current() is not before)
    until(lambda: rig.control.sessions[0].over.is_set())
    assert "disconnected" not in [n.event for n in rig.notices]


@pytest.mark.parametrize("code", ["E-ID-12", "E-ID-28"])
def test_a_certificate_that_ended_is_no_alarm_where_the_home_has_a_newer_one(make, code):
    rig = make(retry_policy=PATIENT).start()
    rig.certificate = "second"  # by a command, or by a renewal whose session could not be opened in time
    refused(rig, code)
    until(lambda: len(rig.control.sessions) >= 2)
    assert rig.error is None
    assert "newer certificate" in next(n.text for n in rig.notices if n.event == "disconnected")
    refused(rig, code)  # and of the newest one it is one
    rig.thread.join(20)
    assert rig.error.code == code


@pytest.mark.parametrize("code", ["E-ID-12", "E-ID-28"])
def test_a_certificate_that_ended_ends_the_service_where_the_home_has_no_other(make, code):
    rig = make(retry_policy=PATIENT).start()
    refused(rig, code)
    rig.thread.join(20)
    assert rig.error.code == code
    assert len(rig.control.sessions) == 1


def test_the_channel_options_refuse_large_messages():
    from protos.wire.channel_options import CLIENT_OPTIONS, SERVER_OPTIONS

    for options in (CLIENT_OPTIONS, SERVER_OPTIONS):
        assert dict(options)["grpc.max_receive_message_length"] == 4 << 20
