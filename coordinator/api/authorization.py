"""The gate before every call: who is calling, may they, and what a person reads of it afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from coordinator.api.authorise import MembershipStatus, authorize
from coordinator.storage.members import MemberStore
from fl_core.errors import FederationError, RefusedError
from protos.pki.identity import Kind, PeerCertificate, peer_of

audit = logging.getLogger("consilium.audit")

_SERVICE = "/consilium.v1."
SILO, LEAD, INVITE = frozenset({Kind.SILO}), frozenset({Kind.LEAD}), frozenset({Kind.INVITE})
ALLOWED_ROLES: Mapping[str, frozenset[Kind]] = {
    "Enrolment/Join": INVITE,
    "Enrolment/Renew": SILO,
    "Control/Session": SILO,
    "Transfer/Open": SILO,
    "Transfer/Put": SILO,
    "Transfer/Commit": SILO,
    "Transfer/Get": SILO | LEAD,
    "Lead/Submit": LEAD,
    "Lead/Runs": LEAD,
    "Lead/Show": LEAD,
    "Lead/Watch": LEAD,
    "Lead/Abort": LEAD,
    "Lead/Resume": LEAD,
    "Lead/Silos": LEAD,
}
PUBLIC_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Services that any certificate of the consortium may call."""


@dataclass(frozen=True, slots=True)
class Authorizer:
    """Decides about each call from its certificate and the store, as they are at that moment.

    refused: told of every refusal of a peer whose certificate could be read.
    Guarantees: nothing is remembered between calls, so a revocation counts from the very next one.
    """

    consortium: str
    members: MemberStore
    refused: Callable[[PeerCertificate, FederationError], None] = lambda _peer, _error: None

    def caller(self, context: grpc.ServicerContext) -> PeerCertificate:
        """Read who makes a call that was let in."""
        return _peer(context)

    def authorize_call(self, method: str, context: grpc.ServicerContext) -> PeerCertificate:
        """Return the caller of a method; raises RefusedError, after writing it to the audit log."""
        try:
            peer = _peer(context)
        except RefusedError as error:
            audit.warning("refused %s from %s: %s", method, context.peer(), error)
            raise
        self.authorize_peer(peer, method, context.peer())
        return peer

    def authorize_peer(
        self, peer: PeerCertificate, method: str = _SERVICE + "Control/Session", place: str = ""
    ) -> None:
        """Raise RefusedError unless this peer may call this method now; also for each heartbeat of a session."""
        if method.startswith(PUBLIC_SERVICES):
            error = authorize(peer, list(Kind), self.consortium, self._unrevoked)
        else:
            allowed = ALLOWED_ROLES.get(method.removeprefix(_SERVICE), frozenset())
            error = authorize(peer, allowed, self.consortium, self._standing)
        if error is not None:
            audit.warning("refused %s to %s (certificate %s) %s: %s", method, peer.identity, peer.serial, place, error)
            self.refused(peer, error)
            raise error

    def _unrevoked(self, peer: PeerCertificate) -> MembershipStatus:
        return MembershipStatus(self.members.why_revoked(peer.serial), member=True)

    def _standing(self, peer: PeerCertificate) -> MembershipStatus:
        if peer.identity.kind is Kind.SILO:
            return self.members.standing(peer.identity.name, peer.serial)
        if peer.identity.kind is Kind.INVITE:
            return MembershipStatus(self.members.why_revoked(peer.serial), self.members.is_invited(peer.serial))
        return MembershipStatus(self.members.why_revoked(peer.serial), peer.identity.kind is Kind.LEAD)


def _peer(context: grpc.ServicerContext) -> PeerCertificate:
    return peer_of(context.auth_context())  # type: ignore[arg-type]  # the stub says bytes; gRPC gives lists of bytes
