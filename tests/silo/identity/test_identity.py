from __future__ import annotations

import stat

import pytest

from fl_core.errors import RefusedError, StateError
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, certificate_fingerprint, identity_of
from service_core.pki.invitation import InvitationToken
from service_core.storage import private_files
from silo.identity.identity import SiloIdentity
from tests.support.pki import authority, certified, join, member, roster, today


@pytest.fixture
def clock():
    return today()


@pytest.fixture
def ca(tmp_path, clock):
    return authority(tmp_path / "ca", clock)


@pytest.fixture
def silo(ca, tmp_path):
    return join(ca, tmp_path / "silo", "center3", (member(ca, certified(ca, "b")),))


def token_for(ca, name="center3"):
    return InvitationToken.decode(ca.invite(name).token, ca.clock())


def test_join(ca, silo, tmp_path):
    own = silo.load()
    assert own.identity == Identity(CertificateRole.SILO, "demo", "center3")
    key, _, authority_pem = silo.current_credentials()
    assert authority_pem == ca.ca_pem
    assert certificates.fingerprint_of(certificates.load_key(key, "t").public_key()) == own.fingerprint
    assert silo.fingerprint() == own.fingerprint
    assert silo.ca_fingerprint() == ca.fingerprint() == certificate_fingerprint(ca.ca_pem)
    assert set(silo.peers()) == {"center3", "b"}
    assert stat.S_IMODE((silo.folder / "silo.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(silo.folder.stat().st_mode) == 0o700
    assert not (silo.folder / "key.next").exists()
    assert "PRIVATE" not in repr(silo) + repr(silo.current_credentials())


def test_before_joining(tmp_path):
    silo = SiloIdentity(tmp_path)
    assert not silo.joined
    for use in (silo.load, silo.current_credentials, silo.renewal_request, silo.peers, silo.fingerprint):
        with pytest.raises(StateError, match="silo join") as caught:
            use()
        assert caught.value.code == "E-STATE-44"


def test_the_key_never_leaves(ca, tmp_path):
    silo = SiloIdentity(tmp_path / "s", ca.clock)
    material = silo.join_material(token_for(ca))
    body = (silo.folder / "key.next").read_bytes().splitlines()[1]
    assert body not in material.csr_pem + b"".join(material.invitation)
    assert body.decode() not in repr(material)
    assert material.proof == b""


def test_a_join_whose_answer_was_lost_asks_for_the_same_key(ca, tmp_path):
    silo = SiloIdentity(tmp_path / "s", ca.clock)
    token = token_for(ca)
    keys = {
        certificates.fingerprint_of(
            certificates.public_key(certificates.load_request(silo.join_material(token).csr_pem))
        )
        for _ in range(3)
    }
    assert len(keys) == 1


def test_certificates_that_were_not_asked_for(ca, tmp_path, clock):
    silo = SiloIdentity(tmp_path / "s", clock)
    csr = silo.join_material(token_for(ca)).csr_pem
    other = authority(tmp_path / "other", clock)
    good = ca.sign_silo(csr, "center3")
    for cert, pem in [
        (certified(ca, "center3"), ca.ca_pem),
        (other.sign_silo(csr, "center3"), ca.ca_pem),
        (good, other.ca_pem),
        (ca.issue_lead("center3").cert_pem, ca.ca_pem),
        (ca.ca_pem, ca.ca_pem),
    ]:
        with pytest.raises(RefusedError) as caught:
            silo.install(cert, pem)
        assert caught.value.code == "E-ID-31"
        assert not silo.joined
    clock.advance(days=91)
    with pytest.raises(RefusedError, match="clock"):
        silo.install(good, ca.ca_pem)
    clock.advance(days=-91)
    foreign = other.roster([member(other, certified(other, "b"))], [], 1)
    with pytest.raises(RefusedError) as caught:
        silo.install(good, ca.ca_pem, foreign)
    assert caught.value.code == "E-ID-14"
    assert not silo.joined
    assert silo.install(good, ca.ca_pem).identity.name == "center3"


def test_one_home_one_membership(ca, silo, tmp_path, clock):
    other = authority(tmp_path / "other", clock)
    for token in (token_for(ca, "center4"), token_for(other, "center3")):
        with pytest.raises(StateError) as caught:
            silo.join_material(token)
        assert caught.value.code == "E-STATE-44"


def test_renewal_is_due_after_two_thirds(silo, clock):
    clock.advance(days=59)
    assert not silo.renewal_due()
    clock.advance(days=1.5)
    assert silo.renewal_due()
    assert not silo.renewal_due(silo.load().not_before)


def renew(ca, silo):
    request = silo.renewal_request()
    return ca.renew(request.csr_pem, silo.current_credentials().cert_pem, request.proof)


def test_renewal_changes_key_and_certificate_without_a_restart(ca, silo, clock):
    before = silo.load()
    clock.advance(days=61)
    cert = renew(ca, silo)
    assert silo.load() == before  # asking changes nothing in force
    silo.install(cert, ca.ca_pem)
    after = silo.load()
    assert after.fingerprint != before.fingerprint
    assert after.serial == identity_of(cert).serial != before.serial
    assert after.not_after > before.not_after
    assert not silo.renewal_due()
    assert silo.install(cert, ca.ca_pem) == after  # a repeated answer
    assert silo.peers()["center3"] != cert  # peers hear of it by the next roster


def test_a_renewal_does_not_disturb_the_next_one(ca, silo, clock):
    first = renew(ca, silo)
    silo.install(first, ca.ca_pem)
    waiting = silo.renewal_request().csr_pem
    silo.install(first, ca.ca_pem)
    again = silo.renewal_request().csr_pem
    keys = [certificates.spki(certificates.public_key(certificates.load_request(c))) for c in (waiting, again)]
    assert keys[0] == keys[1]


def test_joining_anew_proves_that_it_is_the_same_silo(ca, silo, clock):
    old = silo.load()
    old_public = certificates.public_key(certificates.load_certificate(silo.current_credentials().cert_pem, "t"))
    clock.advance(days=100)  # expired: it cannot renew, it can be invited again
    material = silo.join_material(token_for(ca))
    new = certificates.public_key(certificates.load_request(material.csr_pem))
    message = certificates.renewal_message(old.identity, new)
    assert certificates.verify(old_public, certificates.RENEWAL, message, material.proof)
    silo.install(ca.sign_silo(material.csr_pem, "center3"), ca.ca_pem)
    assert silo.load().not_after > clock()


class Cut(BaseException):
    """The process dies here."""


def cut_at(monkeypatch, step, moment):
    """Let the process die before or after the `step`-th change of a file (written, or removed)."""
    count = 0

    def wrap(real):
        def change(*args):
            nonlocal count
            count += 1
            if count == step and moment == "before":
                raise Cut
            real(*args)
            if count == step:
                raise Cut

        return change

    monkeypatch.setattr(private_files, "_replace", wrap(private_files._replace))
    monkeypatch.setattr(private_files, "remove", wrap(private_files.remove))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_renewal_survives_a_crash_at_every_write(ca, silo, clock, monkeypatch, step, moment):
    """Steps: 1 key.next, 2 silo.previous.pem, 3 silo.pem, 4 removal of key.next."""
    before = silo.load()
    cut_at(monkeypatch, step, moment)
    with pytest.raises(Cut):
        silo.install(renew(ca, silo), ca.ca_pem)
    monkeypatch.undo()
    reborn = SiloIdentity(silo.home, clock)
    now = reborn.load()  # whole, old or new
    assert (now != before) == (step == 4 or (step == 3 and moment == "after"))
    fresh = renew(ca, reborn)
    reborn.install(fresh, ca.ca_pem)
    assert reborn.load().serial == identity_of(fresh).serial
    assert not (reborn.folder / "key.next").exists()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_joining_survives_a_crash_at_every_write(ca, tmp_path, monkeypatch, step, moment):
    """Steps: 1 key.next, 2 ca.crt, 3 roster.json, 4 silo.pem, 5 removal of key.next."""
    home = tmp_path / "s"
    cut_at(monkeypatch, step, moment)
    with pytest.raises(Cut):
        join(ca, home, "center3")
    monkeypatch.undo()
    reborn = SiloIdentity(home, ca.clock)
    assert reborn.joined == (step == 5 or (step == 4 and moment == "after"))
    if not reborn.joined:
        reborn = join(ca, home, "center3")
    assert reborn.load().identity.name == "center3"
    assert set(reborn.peers()) == {"center3"}
    reborn.renewal_request()
    assert reborn.load().identity.name == "center3"


def test_an_answer_that_arrives_after_the_crash_still_fits(ca, silo, clock):
    request = silo.renewal_request()
    cert = ca.renew(request.csr_pem, silo.current_credentials().cert_pem, request.proof)
    reborn = SiloIdentity(silo.home, clock)
    assert reborn.renewal_request().csr_pem != b""
    assert reborn.install(cert, ca.ca_pem).serial == identity_of(cert).serial


def test_loose_modes_are_refused(silo):
    (silo.folder / "silo.pem").chmod(0o640)
    with pytest.raises(StateError, match="chmod 600") as caught:
        silo.current_credentials()
    assert caught.value.code == "E-STATE-42"


def test_signatures_for_one_purpose(silo):
    public = certificates.public_key(certificates.load_certificate(silo.current_credentials().cert_pem, "t"))
    signature = silo.sign("secure aggregation keys", b"message")
    assert certificates.verify(public, "secure aggregation keys", b"message", signature)
    assert not certificates.verify(public, "receipt", b"message", signature)
    assert not certificates.verify(public, "secure aggregation keys", b"messagf", signature)


def test_own_new_key_counts_once_the_roster_says_so(ca, silo):
    old = certificates.load_certificate(silo.current_credentials().cert_pem, "t")
    request = silo.renewal_request()
    cert = ca.renew(request.csr_pem, silo.current_credentials().cert_pem, request.proof)
    silo.install(cert, ca.ca_pem)
    from service_core.pki.roster import renewal_link

    signed = roster(ca, [member(ca, cert, [renewal_link(old, request.proof)])], 2)
    assert silo.update_roster(signed, accept_additions=False).rekeyed == ("center3",)
    assert silo.peers() == {"center3": cert}
