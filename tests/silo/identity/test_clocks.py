"""Clocks that jump: 120 days ahead and back, at the coordinator, at a hospital, at both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.api.authorization import SILO, authorize
from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership
from coordinator.pki.server_certificate import ServerCertificate
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import identity_of
from service_core.pki.invitation import InvitationToken
from service_core.pki.roster import SignedRoster
from silo.identity.identity import SiloIdentity
from tests.support.pki import authority, today

JUMP = 120


class World:
    """A coordinator and a hospital, each with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = today(), today()  # the coordinator's clock, the hospital's
        self.home = authority(folder / "ca", self.here).home
        self.store = CoordinatorStore(self.home, lambda: self.here().timestamp())
        self.members = Membership(self.home, self.store, self.here)
        self.silo = SiloIdentity(folder / "silo", self.there)
        token = InvitationToken.decode(self.members.invite("north").token, self.here())
        material = self.silo.join_material(token)
        self.install(self.members.join(identity_of(token.cert_pem), material.csr_pem))
        assert self.let_in()

    def install(self, made: pb.Membership) -> None:
        self.silo.install(made.certificate_pem, made.authority_pem, SignedRoster.unpack(made.signed_roster))

    def let_in(self) -> bool:
        """Do what TLS and the coordinator do with the silo's certificate of this moment."""
        peer = self.silo.load()
        look_up = lambda p: self.store.members.membership_status(p.identity.name, p.serial)  # noqa: E731
        return authorize(peer, SILO, "demo", look_up, self.here()) is None

    def renew(self) -> None:
        request = self.silo.renewal_request()
        self.install(self.members.renew(self.silo.load(), request.csr_pem, request.proof))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


@pytest.mark.fault("both sides' clocks", "jump 120 days ahead and back", "all can connect without a new invitation")
def test_both_clocks_jump_and_the_silo_renews_meanwhile(world: World) -> None:
    first = world.silo.load()
    world.here.advance(days=40)
    world.there.advance(days=40)
    for clock in (world.here, world.there):
        clock.advance(days=JUMP - 80)  # 80 days on: due; the first certificate still lasts
    assert world.silo.renewal_due()
    world.renew()
    early = world.silo.load()
    assert world.let_in()
    for clock in (world.here, world.there):
        clock.advance(days=-80)
    assert world.silo.load().serial == first.serial  # the newest is not valid yet
    assert world.let_in()
    assert world.silo.renewal_due()
    world.renew()
    now = world.silo.load()
    assert now.fingerprint == early.fingerprint  # the same key: the other silos know it
    assert world.let_in()
    assert not world.silo.renewal_due()
    assert world.members.roster() != b""


@pytest.mark.fault(
    "a coordinator's clock",
    "is ahead when a hospital renews",
    "the hospital keeps its old certificate, and renews once the clock is correct",
)
def test_a_renewal_by_a_coordinator_whose_clock_is_ahead(world: World) -> None:
    for clock in (world.here, world.there):
        clock.advance(days=61)
    world.here.advance(days=20)
    with pytest.raises(RefusedError, match=r"E-ID-31.*set the clock"):
        world.renew()
    assert world.let_in()
    world.here.advance(days=-20)
    assert world.let_in()
    world.renew()
    assert world.let_in()
    assert not world.silo.renewal_due()


@pytest.mark.fault(
    "a coordinator's clock", "jumps 120 days ahead and back", "its certificate from the future is replaced"
)
def test_a_certificate_of_the_service_from_the_future_is_replaced(world: World) -> None:
    certificate = ServerCertificate(world.home, world.here)
    certificate.configuration()
    world.here.advance(days=JUMP)
    assert certificate.changed() is not None
    future = identity_of(certificate.current().cert_pem)
    assert future.not_before > world.there()
    world.here.advance(days=-JUMP)
    assert certificate.changed() is not None
    now = identity_of(certificate.current().cert_pem)
    assert now.not_before <= world.here() < now.not_after
    assert certificate.changed() is None


def test_an_enrolment_whose_answer_was_lost_while_the_clock_was_ahead(world: World) -> None:
    token = InvitationToken.decode(world.members.invite("south").token, world.here())
    silo = SiloIdentity(world.home.parent / "south", world.there)
    request, invited = silo.join_material(token).csr_pem, identity_of(token.cert_pem)
    world.here.advance(days=2)
    assert identity_of(world.members.join(invited, request).certificate_pem).not_before > world.there()
    world.here.advance(days=-2)
    made = world.members.join(invited, request)
    silo.install(made.certificate_pem, made.authority_pem)
    peer = silo.load()
    assert world.store.members.membership_status("south", peer.serial).member


def test_a_silo_that_was_seen_in_the_future_was_not_seen(world: World) -> None:
    world.here.advance(days=JUMP)
    world.store.members.mark_connected(["north"])
    world.here.advance(days=-JUMP)
    assert world.store.members.silo("north").last_seen == 0.0
    assert Authority.open(world.home).fingerprint()
