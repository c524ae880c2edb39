"""A member that joins anew: the other silos follow its key when the old one signed the change, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.pki.membership import Membership
from coordinator.storage.store import CoordinatorStore
from fl_core.errors import RefusedError
from service_core.pki.identity import identity_of
from service_core.pki.invitation import InvitationToken
from service_core.pki.roster import SignedRoster
from silo.identity.identity import SiloIdentity
from tests.support.pki import authority, today


class Consortium:
    """An authority with its store; silos join without a network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = today()
        authority(folder / "ca", self.clock)
        self.store = CoordinatorStore(folder / "ca")
        self.members = Membership(folder / "ca", self.store, self.clock)

    def join(self, name: str, home: str, proof: bytes | None = None) -> SiloIdentity:
        """Join with an invitation; proof: sent in place of what the home offers."""
        silo = SiloIdentity(self.folder / home, self.clock)
        token = InvitationToken.decode(self.members.invite(name).token, self.clock())
        material = silo.join_material(token)
        sent = material.proof if proof is None else proof
        made = self.members.join(identity_of(token.cert_pem), material.csr_pem, sent)
        silo.install(made.certificate_pem, token.ca_pem, SignedRoster.unpack(made.signed_roster))
        assert self.store.members.membership_status(name, silo.load().serial).member  # its first use
        return silo

    def roster(self) -> SignedRoster:
        return SignedRoster.unpack(self.members.roster())


@pytest.fixture
def world(tmp_path: Path):
    made = Consortium(tmp_path)
    yield made
    made.store.close()


def test_peers_follow_a_silo_that_joins_anew_with_the_key_they_pinned(world: Consortium) -> None:
    north, south = world.join("north", "n"), world.join("south", "s")
    before = north.fingerprint()
    again = world.join("north", "n")
    assert again.fingerprint() != before
    change = south.update_roster(world.roster(), accept_additions=False)
    assert (change.rekeyed, change.held) == (("north",), {})
    assert south.peers()["north"] == again.current_credentials().cert_pem
    # The change can be followed from the first key over any number of later ones.
    late = SiloIdentity(world.folder / "s", world.clock)
    world.join("north", "n")
    assert late.update_roster(world.roster()).rekeyed == ("north",)


def test_peers_that_missed_a_renewal_follow_from_the_older_key(world: Consortium) -> None:
    north, south = world.join("north", "n"), world.join("south", "s")
    request = north.renewal_request()
    made = world.members.renew(north.load(), request.csr_pem, request.proof)
    north.install(made.certificate_pem, made.authority_pem)
    world.join("north", "n")
    assert south.update_roster(world.roster()).rekeyed == ("north",)


def test_peers_hold_back_a_silo_that_joins_anew_without_its_key(world: Consortium) -> None:
    world.join("north", "n")
    south = world.join("south", "s")
    world.join("north", "another-machine")
    change = south.update_roster(world.roster())
    assert change.rekeyed == ()
    assert change.held["north"].startswith("E-ID-16")
    assert "north" not in south.peers()


def test_a_proof_by_another_key_is_refused_and_leaves_the_invitation_open(world: Consortium) -> None:
    north = world.join("north", "n")
    south = world.join("south", "s")
    members = world.store.members
    before = members.version()
    token = InvitationToken.decode(world.members.invite("north").token, world.clock())
    wanted = north.join_material(token)
    for proof in (b"forged", south.join_material(_other(world)).proof):
        with pytest.raises(RefusedError, match="E-ID-13"):
            world.members.join(identity_of(token.cert_pem), wanted.csr_pem, proof)
    assert members.version() == before
    assert members.silo("north").certificate.serial == north.load().serial
    world.members.join(identity_of(token.cert_pem), wanted.csr_pem, wanted.proof)


def _other(world: Consortium) -> InvitationToken:
    return InvitationToken.decode(world.members.invite("south").token, world.clock())


def test_a_revoked_key_proves_nothing(world: Consortium) -> None:
    world.join("north", "n")
    south = world.join("south", "s")
    world.members.revoke("north", "its machine was stolen")
    world.join("north", "n")
    assert world.store.members.silo("north").proofs == ()
    assert "north" in south.update_roster(world.roster()).held


def test_a_join_that_is_repeated_keeps_its_proof(world: Consortium) -> None:
    north, south = world.join("north", "n"), world.join("south", "s")
    for _ in range(2):  # the answer of the first is lost; the lead gives out another invitation
        token = InvitationToken.decode(world.members.invite("north").token, world.clock())
        material = north.join_material(token)
        made = world.members.join(identity_of(token.cert_pem), material.csr_pem, material.proof)
    north.install(made.certificate_pem, token.ca_pem)
    assert len(world.store.members.silo("north").proofs) == 1
    assert south.update_roster(world.roster()).rekeyed == ("north",)
