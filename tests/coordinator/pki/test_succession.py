"""A renewed certificate ends its predecessor: a thief is noticed, a crash between locks nobody out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from sqlalchemy import func, select

from coordinator.pki.membership import Membership
from coordinator.storage import members as member_storage
from coordinator.storage.schema import rosters
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import RefusedError
from fl_core.rounds.manifest import make_members
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from service_core.pki import certificates
from service_core.pki.identity import identity_of
from service_core.pki.invitation import InvitationToken
from service_core.pki.roster import SignedRoster
from service_core.storage.private_files import Credentials
from silo.connection.transfer import RetryPolicy
from silo.identity.identity import SiloIdentity
from silo.service.enrolment import join
from tests.support import until
from tests.support.coordinator import World as RealWorld
from tests.support.coordinator import channel, enrolled, online, when_due
from tests.support.fake_coordinator import manifest
from tests.support.federation import Hospital
from tests.support.pki import Clock, authority, today


class Consortium:
    """An authority with its store, whose clock the test turns; silos without a network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, today()
        self.ca = authority(folder / "ca", self.clock)
        self.store = CoordinatorStore(folder / "ca", lambda: self.clock().timestamp())
        self.members = Membership(folder / "ca", self.store, self.clock)

    def join(self, home: str, clock: Clock | None = None) -> SiloIdentity:
        silo = SiloIdentity(self.folder / home, clock or self.clock)
        token = InvitationToken.decode(self.members.invite("north").token, self.clock())
        material = silo.join_material(token)
        made = self.members.join(identity_of(token.cert_pem), material.csr_pem, material.proof)
        silo.install(made.certificate_pem, token.ca_pem, SignedRoster.unpack(made.signed_roster))
        return silo

    def renew(self, silo: SiloIdentity) -> pb.Membership:
        request = silo.renewal_request()
        return self.members.renew(silo.load(), request.csr_pem, request.proof)

    def status(self, silo: SiloIdentity) -> str:
        own = silo.load()
        found = self.store.members.membership_status(own.identity.name, own.serial)
        if (
            own.identity.name,
            own.serial,
        ) in self.store.members.in_force():  # of nobody whom a closer look refuses
            assert (found.revoked, found.renewed_at, found.member) == (None, None, True)
        return "revoked" if found.revoked else "renewed" if found.renewed_at else "member" if found.member else "none"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Consortium]:
    made = Consortium(tmp_path)
    yield made
    made.store.close()


def copy_of(silo: SiloIdentity, world: Consortium) -> SiloIdentity:
    """Steal a silo's identity."""
    thief = SiloIdentity(world.folder / "thief", world.clock)
    thief.folder.mkdir(mode=0o700, parents=True)
    for name in ("silo.pem", "ca.crt", "roster.json"):
        (thief.folder / name).write_bytes((silo.folder / name).read_bytes())
    (thief.folder / "silo.pem").chmod(0o600)
    return thief


@pytest.mark.fault(
    "a power cut", "comes between a certificate's renewal and its first use", "the old certificate is still valid"
)
def test_a_predecessor_counts_until_its_successor_is_used(world: Consortium) -> None:
    silo = world.join("n")
    assert world.status(silo) == "member"
    old = copy_of(silo, world)
    made = world.renew(silo)
    world.clock.advance(days=1)
    assert world.status(old) == "member"  # the answer may be lost
    silo.install(made.certificate_pem, made.authority_pem)
    assert world.status(silo) == "member"
    world.clock.advance(seconds=10)
    assert world.status(old) == "member"  # calls that are under way
    world.clock.advance(seconds=30)
    assert world.status(old) == "renewed"
    assert world.status(silo) == "member"


def test_a_thief_who_renews_first_is_noticed_and_shut_out(world: Consortium) -> None:
    silo = world.join("n")
    assert world.status(silo) == "member"
    thief = copy_of(silo, world)
    made = world.renew(thief)
    thief.install(made.certificate_pem, made.authority_pem)
    with pytest.raises(RefusedError, match=r"E-ID-28.*somebody renewed.*invite north --again"):
        world.renew(silo)  # before the thief has used it
    assert world.status(thief) == "member"
    world.clock.advance(minutes=1)
    assert world.status(silo) == "renewed"
    assert "E-ID-28" in world.store.members.alarm("north")
    recovered = world.join("n")  # invite --again, join --again, in the same home
    assert world.status(recovered) == "member"
    assert world.status(thief) == "revoked"
    assert world.store.members.alarm("north") == ""
    with pytest.raises(RefusedError, match="E-ID-28"):
        world.renew(thief)
    # What the stolen key has signed leads nobody to the new one: the other silos ask for consent.
    assert world.store.members.silo("north").proofs == ()


def test_the_proof_of_a_key_that_was_never_certified_is_refused(world: Consortium) -> None:
    world.join("n")
    token = InvitationToken.decode(world.members.invite("north").token, world.clock())
    key = certificates.new_key()
    request = certificates.make_request(key)
    stranger = certificates.load_key(certificates.new_key(), "test")
    message = certificates.renewal_message(
        identity_of(token.cert_pem).identity, certificates.load_key(key, "test").public_key()
    )
    with pytest.raises(RefusedError, match="E-ID-13"):
        world.members.join(
            identity_of(token.cert_pem), request, certificates.sign(stranger, certificates.RENEWAL, message)
        )


def test_all_silos_in_force_are_found_with_one_question(world: Consortium) -> None:
    def in_force() -> set[str]:
        return {serial for _, serial in world.store.members.in_force()}

    silo = world.join("n")
    first = silo.load().serial
    assert in_force() == {first}
    made = world.renew(silo)
    old = copy_of(silo, world)
    silo.install(made.certificate_pem, made.authority_pem)
    second = silo.load().serial
    assert in_force() == {first, second}  # the successor is not in use
    assert world.status(silo) == "member"
    assert in_force() == {second}
    assert world.status(old) == "member"  # within its grace it is asked for by itself
    world.members.revoke("north", "test")
    assert in_force() == set()


@pytest.mark.fault("a hospital", "renews its certificate continually", "the list of members stays small")
def test_renewals_without_end_make_the_roster_no_longer(world: Consortium) -> None:
    silo, sizes = world.join("n"), list[int]()
    assert world.status(silo) == "member"
    for _ in range(40):
        made = world.renew(silo)
        silo.install(made.certificate_pem, made.authority_pem)
        assert world.status(silo) == "member"
        sizes.append(len(made.signed_roster))
    assert sizes[-1] < 1.1 * sizes[31]
    pinned = world.store.members.roster()
    assert pinned is not None
    with world.store.database.read() as db:
        assert db.scalar(select(func.count()).select_from(rosters)) <= 8


# ---- real calls, over mutual TLS -------------------------------------------------------------------------------------


@dataclass
class Wire:
    """A coordinator that listens, and one hospital. GRACE_S is short."""

    coordinator: RealWorld
    site: Hospital

    def credentials(self, folder: Path) -> Credentials:
        return SiloIdentity(folder).current_credentials()

    def renewed(self, folder: Path) -> None:
        """Renew the certificate of an identity, whoever has it."""
        identity = SiloIdentity(folder)
        asked = identity.renewal_request()
        line = rpc.EnrolmentStub(channel(self.coordinator.port, identity.current_credentials()))
        made = line.Renew(pb.RenewRequest(csr_pem=asked.csr_pem, renewal_proof=asked.proof), timeout=60)
        identity.install(made.certificate_pem, made.authority_pem)

    def refusals(self, own: Credentials) -> dict[str, str]:
        """Make every kind of call with a certificate; return the code with which each is refused."""
        line = channel(self.coordinator.port, own)
        found = {}
        for name, call in {
            "Open": lambda: rpc.TransferStub(line).Open(pb.OpenRequest(), timeout=60),
            "Commit": lambda: rpc.TransferStub(line).Commit(pb.CommitRequest(), timeout=60),
            "Get": lambda: list(rpc.TransferStub(line).Get(pb.GetRequest(digest="0" * 64), timeout=60)),
            "Put": lambda: rpc.TransferStub(line).Put(iter([pb.Chunk()]), timeout=60),
            "Renew": lambda: rpc.EnrolmentStub(line).Renew(pb.RenewRequest(), timeout=60),
            "Session": lambda: list(rpc.ControlStub(line).Session(iter([]), timeout=60)),
        }.items():
            with pytest.raises(grpc.RpcError) as refused:
                call()
            found[name] = refused.value.details().split(":")[0]
        return found


@pytest.fixture
def wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(member_storage, "GRACE_S", 0.5)
    coordinator = RealWorld.create(tmp_path / "coordinator", ())
    home = enrolled(coordinator, "north", tmp_path / "north")
    made = Wire(coordinator, Hospital(coordinator, home, "digits/p3c4/0"))
    coordinator.start()
    try:
        yield made
    finally:
        made.site.stop()
        coordinator.stop()


@pytest.mark.integration
@pytest.mark.fault(
    "a thief of a hospital's key",
    "renews the certificate first",
    "the hospital is refused with E-ID-28, leads see it, and a new invitation locks the thief out",
)
def test_a_hospital_whose_key_a_thief_renews_first_is_refused_at_every_call(wire: Wire, tmp_path: Path) -> None:
    wire.site.start()
    until(online(wire.coordinator, "north"))
    shutil.copytree(tmp_path / "north", tmp_path / "thief")
    wire.renewed(tmp_path / "thief")
    assert "E-ID-28" not in wire.refusals(wire.credentials(tmp_path / "thief")).values()  # is in use from now on
    assert wire.site.service.wait(60)  # an open session ends, not only the next call
    assert wire.site.service.error.code == "E-ID-28"
    assert set(wire.refusals(wire.credentials(tmp_path / "north")).values()) == {"E-ID-28"}
    members = wire.coordinator.server.store.members
    assert "E-ID-28" in members.alarm("north")
    wire.site.stop()
    token = Membership(wire.coordinator.home, wire.coordinator.server.store).invite("north").token
    join(token, wire.site.home, again=True, connect=lambda own: lambda _: channel(wire.coordinator.port, own))
    wire.site.start()
    until(online(wire.coordinator, "north"))
    assert set(wire.refusals(wire.credentials(tmp_path / "thief")).values()) == {"E-ID-12"}
    assert members.alarm("north") == ""


@pytest.mark.integration
def test_a_thief_with_a_superseded_certificate_is_refused_at_every_call_and_the_lead_is_told(
    wire: Wire, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "north", tmp_path / "thief")
    thief = wire.credentials(tmp_path / "thief")
    assert "E-ID-28" not in wire.refusals(thief).values()
    wire.renewed(tmp_path / "north")
    wire.site.start()
    until(online(wire.coordinator, "north"))
    members, serial = wire.coordinator.server.store.members, identity_of(thief.cert_pem).serial
    until(lambda: members.membership_status("north", serial).renewed_at is not None, "the end of the grace", 60)
    assert set(wire.refusals(thief).values()) == {"E-ID-28"}
    assert "E-ID-28" in members.alarm("north")
    assert wire.site.service.error is None
    assert wire.site.service.lives()


@pytest.mark.integration
def test_a_hospital_that_starts_when_its_certificate_is_due_takes_part_without_an_alarm(
    wire: Wire, tmp_path: Path
) -> None:
    home = enrolled(wire.coordinator, "due", tmp_path / "due", clock=when_due)
    first = SiloIdentity(home.path).load().serial
    members, sessions = wire.coordinator.server.store.members, wire.coordinator.server.dispatcher._sessions
    wire.site = Hospital(wire.coordinator, home, "digits/p3c4/0", retry_policy=RetryPolicy())
    wire.site.start()
    until(lambda: wire.site.told("renewed"), "the renewal", 60)
    due = make_members(("due",), 3, 1.0)
    wire.coordinator.finished(wire.coordinator.submit(manifest(members=due), "first").id, 60)
    until(lambda: members.membership_status("due", first).renewed_at is not None, "the end of the grace", 30)
    # Its session is of the new certificate by then: one of the old would last a minute by the default back-off.
    until(lambda: "due" in sessions and sessions["due"].peer.serial != first, "the new session", 20)
    wire.coordinator.finished(wire.coordinator.submit(manifest(members=due), "second").id, 60)
    assert wire.site.service.error is None
    assert wire.site.service.lives()
    assert members.alarm("due") == ""


@pytest.mark.integration
def test_a_hospital_that_joins_again_while_it_serves_connects_with_its_new_certificate(wire: Wire) -> None:
    wire.site.start()
    until(online(wire.coordinator, "north"))
    first = SiloIdentity(wire.site.home.path).load().serial
    token = Membership(wire.coordinator.home, wire.coordinator.server.store).invite("north").token
    join(token, wire.site.home, again=True, connect=lambda own: lambda _: channel(wire.coordinator.port, own))
    own = wire.credentials(wire.site.home.path)
    wire.refusals(own)  # a first use, which revokes the certificate of the session
    sessions = wire.coordinator.server.dispatcher._sessions
    until(lambda: "north" in sessions and sessions["north"].peer.serial != first, "the new session", 60)
    assert wire.site.service.error is None
    assert wire.site.service.lives()
