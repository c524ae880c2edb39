"""Joining by invitation, interrupted and repeated; renewal; following the roster."""

from __future__ import annotations

from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc
import pytest

from fl_core.errors import ConfigError, FederationError, RefusedError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from service_core.pki import certificates
from service_core.pki.identity import Address
from service_core.tls.causes import Diagnosis
from silo.connection.channel import ConnectionManager
from silo.identity.identity import SiloIdentity
from silo.service.enrolment import MembershipMaintainer, join, pinned_version
from silo.storage.home import Home
from tests.support.pki import authority as new_authority
from tests.support.pki import join as joined_silo
from tests.support.pki import member, roster, today


class Enrolment(rpc.EnrolmentServicer):
    """Signs as the coordinator does; forgets to answer, or refuses, when a test says so."""

    def __init__(self, ca):
        self.ca, self.requests, self.proofs, self.lost, self.refusal = ca, [], [], 0, None

    def Join(self, request, context):  # noqa: N802
        self.requests.append(request.csr_pem)
        self.proofs.append(request.renewal_proof)
        if self.refusal:
            context.abort(*self.refusal)
        cert = self.ca.sign_silo(request.csr_pem, "center1")
        if self.lost:
            self.lost -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        signed = roster(self.ca, [member(self.ca, cert)], 1).pack()
        return pb.Membership(certificate_pem=cert, authority_pem=self.ca.ca_pem, signed_roster=signed)

    def Renew(self, request, context):  # noqa: N802
        if self.refusal:
            context.abort(*self.refusal)
        cert = self.ca.renew(request.csr_pem, self.old, request.renewal_proof)
        return pb.Membership(certificate_pem=cert, authority_pem=self.ca.ca_pem)


class Rig:
    def __init__(self, folder):
        self.clock = today()
        self.ca = new_authority(folder / "ca", self.clock)
        self.enrolment = Enrolment(self.ca)
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        rpc.add_EnrolmentServicer_to_server(self.enrolment, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.home = Home(folder / "home")
        self.token = self.ca.invite("center1").token
        self.dialled = []
        self.finding = Diagnosis(None, "works", "all is well")

    def channel(self, address):
        self.dialled.append(str(address))
        return grpc.insecure_channel(f"127.0.0.1:{self.port}")

    def join(self, **other):
        return join(
            self.token,
            self.home,
            clock=self.clock,
            connect=lambda _: self.channel,
            diagnose=lambda a, c: self.finding,
            **other,
        )


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.server.stop(0).wait(10)


def test_a_join_installs_identity_roster_and_addresses(rig):
    peer = rig.join()
    identity = SiloIdentity(rig.home.path, rig.clock)
    assert peer.identity.uri == "silo://demo/center1"
    assert identity.fingerprint() == peer.fingerprint
    assert list(identity.peers()) == ["center1"]
    assert pinned_version(identity) == 1
    assert rig.home.addresses() == (Address("fl.example.org", 8443), Address("10.1.2.3", 8443))


def test_a_join_whose_answer_was_lost_is_repeated_with_the_same_key(rig):
    rig.enrolment.lost = 2  # one per address
    with pytest.raises(UnavailableError, match="E-NET-01"):
        rig.join()
    assert not SiloIdentity(rig.home.path).joined
    rig.join()
    keys = {bytes(csr) for csr in rig.enrolment.requests}
    from cryptography import x509

    assert len({x509.load_pem_x509_csr(k).public_key().public_numbers() for k in keys}) == 1


def test_the_next_address_is_tried_when_one_does_not_answer(rig):
    rig.enrolment.lost = 1
    rig.join()
    assert rig.dialled == ["fl.example.org:8443", "10.1.2.3:8443"]


def test_a_join_that_is_complete_is_left_as_it_is(rig):
    first = rig.join()
    assert rig.join().serial == first.serial
    assert len(rig.enrolment.requests) == 1
    before = SiloIdentity(rig.home.path, rig.clock).current_credentials()
    assert rig.join(again=True).fingerprint != first.fingerprint
    new = certificates.public_key(certificates.load_request(rig.enrolment.requests[1]))
    old = certificates.public_key(certificates.load_certificate(before.cert_pem, "test"))
    signed = certificates.renewal_message(first.identity, new)
    assert rig.enrolment.proofs[0] == b""
    assert certificates.verify(old, certificates.RENEWAL, signed, rig.enrolment.proofs[1])


@pytest.mark.parametrize("step", ["identity/ca.crt", "identity/roster.json", "identity/silo.pem"])
def test_a_join_can_be_repeated_after_a_crash_between_any_two_files(rig, monkeypatch, step):
    from pathlib import Path

    replace = Path.replace

    class Crash(BaseException):
        pass

    def crashing(a, b):
        if str(b).endswith(step):
            raise Crash
        return replace(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crashing)
        with pytest.raises(Crash):
            rig.join()
    rig.join()
    assert SiloIdentity(rig.home.path, rig.clock).load().identity.name == "center1"


def test_a_refusal_is_final_and_no_other_address_is_tried(rig):
    rig.enrolment.refusal = (grpc.StatusCode.PERMISSION_DENIED, "E-ID-24: the invitation was used already")
    with pytest.raises(RefusedError, match="E-ID-24"):
        rig.join()
    assert len(rig.dialled) == 1


def test_a_connection_that_fails_is_explained(rig):
    rig.enrolment.lost = 2
    rig.finding = Diagnosis("E-TLS-07", "the certificate is for another host", "ask the lead")
    with pytest.raises(FederationError, match="E-TLS-07"):
        rig.join()


def test_a_damaged_token_is_refused_before_anything_is_sent(rig):
    with pytest.raises(ConfigError, match="E-ID-0"):
        join(rig.token[:-9], rig.home, clock=rig.clock, connect=lambda _: rig.channel)
    assert rig.dialled == []


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.fault(
    "a mail server",
    "replaces an invitation with one from another authority",
    "refused with `--authority` before anything is sent",
)
def test_an_invitation_of_another_authority_is_refused_before_anything_is_sent(rig, again):
    if again:
        rig.join()
        rig.dialled.clear()
    with pytest.raises(RefusedError, match=r"E-ID-10.*Nothing was sent"):
        rig.join(authority="AB:" * 31 + "ab", again=again)
    with pytest.raises(ConfigError, match="E-CFG-02"):
        rig.join(authority=rig.ca.fingerprint()[:32], again=again)
    assert rig.dialled == []
    assert rig.home.path.exists() == again
    spaced = ":".join(rig.ca.fingerprint().upper()[i : i + 2] for i in range(0, 64, 2))
    assert rig.join(authority=spaced, again=again).identity.name == "center1"


def test_the_home_is_named_by_option_variable_or_default(monkeypatch, tmp_path):
    monkeypatch.setenv("CONSILIUM_SILO_HOME", str(tmp_path))
    assert Home.at(None).path == tmp_path
    monkeypatch.delenv("CONSILIUM_SILO_HOME")
    assert Home.at(None).path.parts[-2:] == (".consilium", "silo")


# ---- renewal and roster --------------------------------------------------------------------------------------------


class Kept:
    def __init__(self, rig, folder):
        self.notices, self.moved = [], []
        self.silo = joined_silo(rig.ca, folder / "member", "center1")
        rig.enrolment.old = self.silo.current_credentials().cert_pem
        connections = ConnectionManager([Address("127.0.0.1", 1)], rig.channel)
        self.membership = MembershipMaintainer(
            self.silo, connections, self.notices.append, lambda: self.moved.append(1), rig.clock
        )


@pytest.fixture
def kept(rig, tmp_path):
    return Kept(rig, tmp_path)


def test_a_certificate_is_renewed_after_two_thirds_of_its_life_and_not_before(rig, kept):
    first = kept.silo.load()
    rig.clock.advance(days=59)
    assert not kept.membership.renew_if_due()
    rig.clock.advance(days=2)
    assert kept.membership.renew_if_due()
    second = kept.silo.load()
    assert second.serial != first.serial
    assert second.not_after - first.not_after > timedelta(days=60)
    assert kept.moved == [1]
    assert not kept.membership.renew_if_due()


def test_a_renewal_that_fails_is_told_once_and_tried_again(rig, kept):
    rig.clock.advance(days=70)
    rig.enrolment.refusal = (grpc.StatusCode.UNAVAILABLE, "away")
    before = kept.silo.load().serial
    assert not kept.membership.renew_if_due()
    assert not kept.membership.renew_if_due()
    assert [n.facts["code"] for n in kept.notices] == ["E-NET-01"]
    assert kept.silo.load().serial == before
    rig.enrolment.refusal = None
    assert kept.membership.renew_if_due()


def test_a_newer_roster_is_pinned_and_what_changed_is_told(rig, kept):
    from tests.support.pki import certified

    mine = member(rig.ca, kept.silo.current_credentials().cert_pem)
    other = member(rig.ca, certified(rig.ca, "center2"))
    kept.membership.apply_roster(roster(rig.ca, [mine, other], 2).pack())
    assert sorted(kept.silo.peers()) == ["center1", "center2"]
    assert [n.text for n in kept.notices] == ["center2 joined (roster 2)"]
    kept.membership.apply_roster(b"")
    with pytest.raises(RefusedError, match="E-ID-14"):
        kept.membership.apply_roster(roster(rig.ca, [mine], 1).pack())


def test_of_rosters_that_arrive_at_once_the_newest_stays_and_none_is_an_alarm(rig, kept):
    """Hospitals that renew together get their lists from renewal, session and preflight in any order."""
    mine = member(rig.ca, kept.silo.current_credentials().cert_pem)
    lists = [roster(rig.ca, [mine], version).pack() for version in range(2, 34)]
    asked = pinned_version(kept.silo)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(kept.membership.apply_roster, raw, asked) for raw in lists[::2] + lists[1::2]]:
            done.result(60)
    assert pinned_version(kept.silo) == 33


def test_an_answer_that_a_newer_roster_overtook_is_no_alarm_and_an_older_one_than_was_pinned_is(rig, kept):
    mine = member(rig.ca, kept.silo.current_credentials().cert_pem)
    kept.membership.apply_roster(roster(rig.ca, [mine], 5).pack())
    asked = pinned_version(kept.silo)
    kept.membership.apply_roster(roster(rig.ca, [mine], 7).pack())  # in the welcome of a session
    kept.membership.apply_roster(roster(rig.ca, [mine], 6).pack(), asked)  # in the answer to a renewal before it
    assert pinned_version(kept.silo) == 7
    with pytest.raises(RefusedError, match="E-ID-14"):
        kept.membership.apply_roster(roster(rig.ca, [mine], 4).pack(), asked)
    with pytest.raises(RefusedError, match="E-ID-14"):
        kept.membership.apply_roster(roster(rig.ca, [mine], 6).pack())
