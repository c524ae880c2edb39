from __future__ import annotations

from datetime import timedelta

import pytest

from coordinator.api.authorization import authorize
from coordinator.storage.records import MembershipStatus
from service_core.pki.identity import CertificateRole, Identity, PeerCertificate
from tests.support.pki import today

CLOCK = today()


def peer(kind=CertificateRole.SILO, consortium="demo", name="a", **change):
    values = {
        "identity": Identity(kind, consortium, name),
        "serial": "ab12",
        "fingerprint": "cd" * 32,
        "not_before": CLOCK() - timedelta(hours=1),
        "not_after": CLOCK() + timedelta(days=1),
    }
    return PeerCertificate(**{**values, **change})


def ask(who, kinds=(CertificateRole.SILO, CertificateRole.LEAD), revoked=(), member=True, now=None):
    found = MembershipStatus("left" if who.serial in revoked else None, member)
    error = authorize(who, kinds, "demo", lambda _: found, now or CLOCK())
    return None if error is None else error.code


@pytest.mark.parametrize("kind", [CertificateRole.SILO, CertificateRole.LEAD])
def test_members_may(kind):
    assert ask(peer(kind)) is None


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("E-ID-10", {"who": peer(consortium="other")}),
        ("E-ID-11", {"who": peer(CertificateRole.INVITE)}),
        ("E-ID-11", {"who": peer(), "kinds": (CertificateRole.LEAD,)}),
        ("E-ID-11", {"who": peer(), "kinds": ()}),
        ("E-TLS-08", {"who": peer(), "now": CLOCK() + timedelta(days=2)}),
        ("E-TLS-08", {"who": peer(), "now": CLOCK() - timedelta(hours=2)}),
        ("E-ID-12", {"who": peer(), "revoked": ("ab12",)}),
        ("E-ID-12", {"who": peer(), "revoked": ("ab12",), "member": False}),
        ("E-ID-13", {"who": peer(), "member": False}),
        ("E-ID-13", {"who": peer(CertificateRole.INVITE), "kinds": (CertificateRole.INVITE,), "member": False}),
    ],
)
def test_each_refusal_has_its_code(code, arguments):
    assert ask(**arguments) == code


def test_the_lists_are_not_asked_about_a_peer_that_its_certificate_refuses():
    for who in (peer(consortium="other"), peer(CertificateRole.INVITE), peer(not_after=CLOCK() - timedelta(minutes=1))):
        assert authorize(who, [CertificateRole.SILO], "demo", lambda _: pytest.fail("asked"), CLOCK()) is not None


def test_messages_name_the_peer_and_the_remedy():
    error = authorize(peer(), [CertificateRole.SILO], "demo", lambda _: MembershipStatus(None, member=False), CLOCK())
    assert "silo://demo/a" in error.message
    assert "invitation" in error.message
