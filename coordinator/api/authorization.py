"""Authorization of every call: role, consortium, membership, revocation; refusals go to the audit log.

TLS only checks that our CA signed the certificate: the certificates of revoked silos and of invitations still pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

import grpc

from coordinator.storage.members import MemberStore
from coordinator.storage.records import MembershipStatus
from fl_core.errors import FederationError, RefusedError
from service_core.pki.certificates import utc_now
from service_core.pki.identity import CertificateRole, PeerCertificate, peer_of

audit = logging.getLogger("consilium.audit")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_SERVICE = "/consilium.v1."
SILO, LEAD, INVITE = (
    frozenset({CertificateRole.SILO}),
    frozenset({CertificateRole.LEAD}),
    frozenset({CertificateRole.INVITE}),
)
ALLOWED_ROLES: Mapping[str, frozenset[CertificateRole]] = {
    "Enrolment/Join": INVITE,
    "Enrolment/Renew": SILO,
    "Control/Session": SILO,
    "Transfer/Open": SILO,
    "Transfer/Put": SILO,
    "Transfer/Commit": SILO,
    "Transfer/Get": SILO | LEAD,
    "Lead/OpenWeights": LEAD,
    "Lead/PutWeights": LEAD,
    "Lead/Submit": LEAD,
    "Lead/Runs": LEAD,
    "Lead/Show": LEAD,
    "Lead/Watch": LEAD,
    "Lead/Abort": LEAD,
    "Lead/Resume": LEAD,
    "Lead/Exclude": LEAD,
    "Lead/Extend": LEAD,
    "Lead/Withdraw": LEAD,
    "Lead/Silos": LEAD,
}
PUBLIC_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Services that members and leads may call."""


def authorize(
    peer: PeerCertificate,
    allowed_kinds: Collection[CertificateRole],
    consortium: str,
    membership: Callable[[PeerCertificate], MembershipStatus],
    now: datetime | None = None,
) -> RefusedError | None:
    """Return why `peer` may not make this call, or None; call it for each call, and again while a stream is open.

    membership: looks the peer up; called once, unless the certificate alone refuses the peer.

    | code     | the peer                                                                    |
    |----------|-----------------------------------------------------------------------------|
    | E-ID-10  | is of another consortium                                                    |
    | E-ID-11  | has a role that may not make this call (an invitation can only enrol)       |
    | E-TLS-08 | has a certificate that expired while its connection stayed open             |
    | E-ID-12  | has been revoked                                                            |
    | E-ID-28  | has a certificate whose successor is in use                                 |
    | E-ID-13  | is not on the list of members, or its invitation is used up                 |
    """
    who, time = peer.identity, now or utc_now()
    if who.consortium != consortium:
        return RefusedError("E-ID-10", f"expected a peer of consortium {consortium!r}, found {who}; check the address")
    if who.kind not in allowed_kinds:
        allowed = " or ".join(sorted(kind.value for kind in allowed_kinds))
        return RefusedError(
            "E-ID-11",
            f"only a {allowed} may make this call, and this certificate is of {who}: use that role's certificate",
        )
    if not peer.not_before <= time <= peer.not_after:
        return RefusedError(
            "E-TLS-08",
            f"the certificate of {who} is not valid now. It is valid from {peer.not_before:%Y-%m-%d %H:%M} to "
            f"{peer.not_after:%Y-%m-%d %H:%M} UTC: renew it, or enrol again with a new invitation",
        )
    status = membership(peer)
    if status.revoked is not None:
        return RefusedError(
            "E-ID-12",
            f"the certificate {peer.serial} of {who} was revoked ({status.revoked}): ask the lead",
        )
    if status.renewed_at is not None:
        return RefusedError(
            "E-ID-28",
            f"expected the newest certificate of {who}, found {peer.serial}: it was renewed, and its successor has "
            f"been in use since {datetime.fromtimestamp(status.renewed_at, UTC):%Y-%m-%d %H:%M} UTC. If this was not "
            f"you, somebody else has the key: tell the lead at once; `coordinator invite {who.name} --again` and "
            "`silo join --again` lock the other one out (for a lead: coordinator leads revoke, leads add)",
        )
    if not status.member:
        what = "an open invitation" if who.kind is CertificateRole.INVITE else "a member of the consortium"
        return RefusedError(
            "E-ID-13", f"expected {what}, found {who} (key {peer.fingerprint[:16]}...); ask the lead for an invitation"
        )
    return None


@dataclass(frozen=True, slots=True)
class Authorizer:
    """Decides about each call from its certificate and the current store.

    on_refusal: called with every refused peer whose certificate could be read.
    Guarantees: nothing is cached between calls, so a revocation applies from the next call on.
    """

    consortium: str
    members: MemberStore
    on_refusal: Callable[[PeerCertificate, FederationError], None] = lambda _peer, _error: None

    def caller(self, context: Context) -> PeerCertificate:
        """Return the peer of a call that was authorized before."""
        return _peer(context)

    def peer(self, method: str, context: Context) -> PeerCertificate:
        """Return the caller; raises RefusedError, after writing it to the audit log."""
        try:
            return _peer(context)
        except RefusedError as error:
            audit.warning("refused %s from %s: %s", method, context.peer(), error)
            raise

    def authorize_peer(
        self, peer: PeerCertificate, method: str = _SERVICE + "Control/Session", address: str = ""
    ) -> None:
        """Raise RefusedError unless this peer may call this method now; repeated while a stream is open."""
        if method.startswith(PUBLIC_SERVICES):
            error = authorize(peer, SILO | LEAD, self.consortium, self._membership_status)
        else:
            allowed = ALLOWED_ROLES.get(method.removeprefix(_SERVICE), frozenset())
            error = authorize(peer, allowed, self.consortium, self._membership_status)
        if error is not None:
            audit.warning(
                "refused %s to %s (certificate %s) %s: %s", method, peer.identity, peer.serial, address, error
            )
            if error.code == "E-ID-28":
                self.members.raise_alarm(peer.identity.name, str(error))
            self.on_refusal(peer, error)
            raise error

    def silos_in_force(self) -> Callable[[PeerCertificate], bool]:
        """Look up all silos at once; return a test whether a caller is a silo that is certainly allowed.

        Checking a thousand open streams one by one would take a whole core. Check all other callers with
        `authorize_peer`.
        """
        in_force, now = self.members.in_force(), utc_now()

        def is_in_force(peer: PeerCertificate) -> bool:
            of_silo = peer.identity.kind is CertificateRole.SILO and (peer.identity.name, peer.serial) in in_force
            return of_silo and peer.identity.consortium == self.consortium and peer.not_before <= now <= peer.not_after

        return is_in_force

    def _membership_status(self, peer: PeerCertificate) -> MembershipStatus:
        if peer.identity.kind is CertificateRole.SILO:
            return self.members.membership_status(peer.identity.name, peer.serial)
        if peer.identity.kind is CertificateRole.INVITE:
            return MembershipStatus(self.members.why_revoked(peer.serial), self.members.is_invited(peer.serial))
        if peer.identity.kind is CertificateRole.LEAD:
            return self.members.leads.status(peer)
        return MembershipStatus(self.members.why_revoked(peer.serial), member=False)


def _peer(context: Context) -> PeerCertificate:
    return peer_of(context.auth_context())
