"""Decide, per call, whether a peer that TLS has let in may do what it asks: role, consortium, membership, revocation.

TLS knows only that our CA signed the certificate; a revoked silo's still passes it, and so does an invitation's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime
from typing import NamedTuple

from fl_core.errors import RefusedError
from protos.pki.certificates import utc_now
from protos.pki.identity import Kind, PeerCertificate


class MembershipStatus(NamedTuple):
    """What the lists say of a certificate at one moment.

    revoked: the reason on the list of revocations, None off it. member: whether a silo or lead of this name and key is
    in force, or an invitation of this serial is open.
    """

    revoked: str | None
    member: bool


def authorize(
    peer: PeerCertificate,
    allowed_kinds: Collection[Kind],
    consortium: str,
    standing: Callable[[PeerCertificate], MembershipStatus],
    now: datetime | None = None,
) -> RefusedError | None:
    """Return why `peer` may not make this call, or None; call it per call and per heartbeat.

    standing: looks the peer up; asked once, and only about a peer whose certificate alone does not refuse it.

    | code     | the peer                                                                    |
    |----------|-----------------------------------------------------------------------------|
    | E-ID-10  | is of another consortium                                                    |
    | E-ID-11  | has a role that may not make this call (an invitation opens enrolment alone)|
    | E-TLS-08 | has a certificate that expired while its connection stayed open             |
    | E-ID-12  | has been revoked                                                            |
    | E-ID-13  | is not on the list of members, or its invitation is used up                 |
    """
    who, time = peer.identity, now or utc_now()
    if who.consortium != consortium:
        return RefusedError("E-ID-10", f"expected a peer of consortium {consortium!r}, found {who}; check the address")
    if who.kind not in allowed_kinds:
        allowed = " or ".join(sorted(kind.value for kind in allowed_kinds))
        return RefusedError(
            "E-ID-11", f"expected a call by a {allowed}, found one by {who}; use that role's certificate"
        )
    if not peer.not_before <= time <= peer.not_after:
        return RefusedError(
            "E-TLS-08",
            f"expected a certificate in force, found one of {who} valid from {peer.not_before:%Y-%m-%d %H:%M} to "
            f"{peer.not_after:%Y-%m-%d %H:%M} UTC; renew it, or enrol again with a new invitation",
        )
    found = standing(peer)
    if found.revoked is not None:
        return RefusedError(
            "E-ID-12",
            f"expected a certificate in force, found the revoked one {peer.serial} of {who} ({found.revoked}); ask the "
            "lead",
        )
    if not found.member:
        what = "an open invitation" if who.kind is Kind.INVITE else "a member of the consortium"
        return RefusedError(
            "E-ID-13", f"expected {what}, found {who} (key {peer.fingerprint[:16]}...); ask the lead for an invitation"
        )
    return None
