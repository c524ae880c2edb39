from __future__ import annotations

import json

import pytest

from fl_core.errors import ConfigError, ProtocolError, RefusedError, StateError
from service_core.pki import certificates
from service_core.pki.identity import identity_of
from service_core.pki.roster import Roster, RosterMember, SignedRoster, renewal_link
from tests.support.pki import authority, certified, join, member, roster, today


@pytest.fixture
def clock():
    return today()


@pytest.fixture
def ca(tmp_path, clock):
    return authority(tmp_path / "ca", clock)


class Peer:
    """A silo whose keys the test holds, to renew it properly or to try without."""

    def __init__(self, ca, name):
        self.ca, self.name, self.links = ca, name, []
        self.key = certificates.new_key()
        self.cert = ca.sign_silo(certificates.make_request(self.key), name)

    def renew(self):
        new = certificates.new_key()
        old = certificates.load_certificate(self.cert, "test")
        public = certificates.load_key(new, "test").public_key()
        message = certificates.renewal_message(identity_of(old).identity, public)
        proof = certificates.sign(certificates.load_key(self.key, "test"), certificates.RENEWAL, message)
        self.cert = self.ca.renew(certificates.make_request(new), self.cert, proof)
        self.links.append(renewal_link(old, proof))
        self.key = new
        return self

    @property
    def member(self):
        return member(self.ca, self.cert, self.links)


@pytest.fixture
def silo(ca, tmp_path):
    return join(ca, tmp_path / "silo", "me")


def mine(ca, silo):
    return member(ca, silo.current_credentials().cert_pem)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'{"document": "x", "signature": "?"}', b"\xff"])
def test_what_is_no_packed_roster_is_refused(raw):
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        SignedRoster.unpack(raw)


def test_a_packed_roster_is_read_back(ca):
    signed = ca.roster([member(ca, certified(ca, "a"))], [], 1)
    assert SignedRoster.unpack(signed.pack()) == signed


def test_signed_and_read_back(ca):
    a, b = (member(ca, certified(ca, name)) for name in "ab")
    one, two = ca.roster([b, a], [], 7), ca.roster([a, b], [], 7)
    assert one.document == two.document  # canonical: the order of the list does not matter
    read = one.verify(ca.ca_pem, "demo")
    assert [m.name for m in read.members] == ["a", "b"]
    assert read.version == 7
    document = json.loads(one.document)
    assert document["members"][0]["fingerprint"] == identity_of(a.certificate.encode()).fingerprint
    assert json.dumps(document, sort_keys=True, separators=(",", ":")).encode() == one.document


def test_tampering_is_noticed(ca, tmp_path, clock):
    a = member(ca, certified(ca, "a"))
    signed = ca.roster([a], [], 7)
    other = authority(tmp_path / "other", clock)
    for forged, why in [
        (SignedRoster(signed.document.replace(b'"version":7', b'"version":8'), signed.signature), "signature"),
        (SignedRoster(signed.document, signed.signature[:-1] + b"x"), "signature"),
        (SignedRoster(signed.document, b""), "signature"),
        (SignedRoster(b"", signed.signature), "signature"),
        (other.roster([member(other, certified(other, "a"))], [], 9), "signature"),
        (ca.roster([a, a], [], 9), "twice"),
        (ca.roster([member(other, certified(other, "a"))], [], 9), "another authority"),
        (ca.roster([RosterMember("b", a.fingerprint, a.certificate, a.since)], [], 9), "is for silo://demo/a"),
        (ca.roster([RosterMember("a", "00" * 32, a.certificate, a.since)], [], 9), "another key"),
        (ca.roster([member(ca, ca.issue_lead("a").cert_pem)], [], 9), "is for lead://demo/a"),
        (ca.roster([a], [ca.revocation(a.certificate.encode(), "lost")], 9), "revoked"),
        (ca.roster([RosterMember("a", a.fingerprint, "no certificate", a.since)], [], 9), "cannot be read"),
    ]:
        with pytest.raises(RefusedError, match=why) as caught:
            forged.verify(ca.ca_pem, "demo")
        assert caught.value.code == "E-ID-14"
    with pytest.raises(RefusedError, match="consortium"):
        signed.verify(ca.ca_pem, "other")


def test_signed_but_not_canonical_is_refused(ca):
    _, key = ca._ca()
    honest = Roster("demo", 1, "2026-01-01T00:00:00+00:00", ())

    class Loose:
        def canonical(self):
            return json.dumps(json.loads(honest.canonical()), indent=1).encode()

    with pytest.raises(RefusedError, match="canonical"):
        SignedRoster.issue(Loose(), key).verify(ca.ca_pem, "demo")


def test_additions_and_removals(ca, silo):
    a, b = Peer(ca, "a"), Peer(ca, "b")
    change = silo.update_roster(roster(ca, [mine(ca, silo), a.member, b.member], 2))
    assert (change.added, change.removed, change.rekeyed, dict(change.held)) == (("a", "b"), (), (), {})
    assert silo.peers() == {"a": a.cert, "b": b.cert, "me": silo.current_credentials().cert_pem}
    gone = ca.revocation(a.cert, "left")
    change = silo.update_roster(roster(ca, [mine(ca, silo), b.member], 3, [gone]), accept_additions=False)
    assert (change.version, change.added, change.removed, change.rekeyed) == (3, (), ("a",), ())
    assert set(silo.peers()) == {"b", "me"}


def test_additions_wait_for_consent_where_the_policy_says_so(ca, silo):
    a, b = Peer(ca, "a"), Peer(ca, "b")
    signed = roster(ca, [mine(ca, silo), a.member, b.member], 2)
    change = silo.update_roster(signed, accept_additions=False)
    assert change.added == ()
    assert set(change.held) == {"a", "b"}
    assert all("E-ID-16" in why for why in change.held.values())
    assert set(silo.peers()) == {"me"}
    assert set(silo.pins().held()) == {"a", "b"}
    silo.pins().accept("b", b.member.fingerprint)
    assert set(silo.peers()) == {"b", "me"}
    assert set(silo.update_roster(signed, accept_additions=False).held) == {"a"}  # the consent stays
    assert set(silo.peers()) == {"b", "me"}


def test_consent_is_to_one_key_and_changes_nothing_where_it_does_not_fit(ca, silo):
    a, other = Peer(ca, "a"), Peer(ca, "a")
    silo.update_roster(roster(ca, [mine(ca, silo), a.member], 2), accept_additions=False)
    kept = silo.pins().path.read_bytes()
    for name, fingerprint in (("a", other.member.fingerprint), ("b", a.member.fingerprint)):
        with pytest.raises(ConfigError) as caught:
            silo.pins().accept(name, fingerprint)
        assert caught.value.code == "E-ID-16"
    assert silo.pins().path.read_bytes() == kept
    silo.pins().accept("a", a.member.fingerprint)
    # Another key that comes later under the same name is held again.
    change = silo.update_roster(roster(ca, [mine(ca, silo), other.member], 3), accept_additions=False)
    assert set(change.held) == {"a"}
    assert set(silo.peers()) == {"me"}


def test_rollback_and_two_lists_of_one_version_are_refused(ca, silo):
    a, b = Peer(ca, "a"), Peer(ca, "b")
    old = roster(ca, [mine(ca, silo), a.member], 2)
    silo.update_roster(old)
    new = roster(ca, [mine(ca, silo), b.member], 3)
    silo.update_roster(new)
    for signed in (old, roster(ca, [mine(ca, silo), a.member, b.member], 3)):
        with pytest.raises(RefusedError) as caught:
            silo.update_roster(signed)
        assert caught.value.code == "E-ID-14"
        assert set(silo.peers()) == {"b", "me"}
    assert silo.update_roster(new).added == ()  # the same again is no news


def test_a_renewal_is_followed_by_the_old_keys_signature(ca, silo):
    a = Peer(ca, "a")
    silo.update_roster(roster(ca, [mine(ca, silo), a.member], 2))
    change = silo.update_roster(roster(ca, [mine(ca, silo), a.renew().member], 3), accept_additions=False)
    assert change.rekeyed == ("a",)
    assert silo.peers()["a"] == a.cert
    for _ in range(3):  # a silo that was away for three renewals follows the chain
        a.renew()
    change = silo.update_roster(roster(ca, [mine(ca, silo), a.member], 9), accept_additions=False)
    assert change.rekeyed == ("a",)
    assert silo.peers()["a"] == a.cert


@pytest.mark.parametrize(
    "forge",
    [
        lambda good, bad: [],
        lambda good, bad: bad,
        lambda good, bad: [good[0]._replace(signature=bad[0].signature)],
        lambda good, bad: [good[0]._replace(previous=bad[0].previous)],
        lambda good, bad: [good[0], *bad],
        lambda good, bad: [good[0]._replace(previous="%%%")],
    ],
)
def test_another_key_without_proof_is_held(ca, silo, forge):
    """The coordinator holds the CA, so it can certify a key of its own as `a`; nobody must take it for a's."""
    a, impostor = Peer(ca, "a"), Peer(ca, "a")
    silo.update_roster(roster(ca, [mine(ca, silo), a.member], 2))
    a.renew()
    impostor.renew()
    forged = member(ca, impostor.cert, forge(a.links, impostor.links))
    signed = roster(ca, [mine(ca, silo), forged], 3)
    change = silo.update_roster(signed)
    assert change.rekeyed == ()
    assert "E-ID-16" in change.held["a"]
    assert set(silo.peers()) == {"me"}
    silo.pins().accept("a", impostor.member.fingerprint)  # the operator was told on the phone that this is the key
    assert silo.peers()["a"] == impostor.cert


def test_removing_and_adding_again_is_no_way_round_the_key(ca, silo):
    a = Peer(ca, "a")
    silo.update_roster(roster(ca, [mine(ca, silo), a.member], 2))
    silo.update_roster(roster(ca, [mine(ca, silo)], 3))
    change = silo.update_roster(roster(ca, [mine(ca, silo), Peer(ca, "a").member], 4))
    assert set(change.held) == {"a"}
    change = silo.update_roster(roster(ca, [mine(ca, silo), a.member], 5))  # back with its own key
    assert change.added == ("a",)


def test_damaged_pins(ca, silo):
    (silo.folder / "roster.json").write_text("{")
    with pytest.raises(StateError) as caught:
        silo.peers()
    assert caught.value.code == "E-STATE-43"
