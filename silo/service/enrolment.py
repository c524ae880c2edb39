"""Membership: join by invitation, renew before expiry, follow the roster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from fl_core.errors import ConfigError, FederationError, ProtocolError, RefusedError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki import certificates
from service_core.pki.certificates import Clock, utc_now
from service_core.pki.identity import Address, PeerCertificate, certificate_fingerprint, format_fingerprint
from service_core.pki.invitation import InvitationToken
from service_core.pki.offline_signing import Admission, SigningRequest
from service_core.pki.roster import SignedRoster
from service_core.storage import private_files
from service_core.storage.private_files import Credentials
from service_core.tls.causes import Diagnosis
from silo.admission.policy_in_force import accepts_new_peers
from silo.connection.channel import Connect, Connection, ConnectionManager, connect_with, diagnose_channel
from silo.connection.retry import to_federation_error
from silo.events import EmitEvent, error_event, event
from silo.identity.identity import SiloIdentity
from silo.identity.pinned_peers import PinnedPeers
from silo.storage.home import Home

CALL_TIMEOUT_S = 60.0


def pinned_version(identity: SiloIdentity) -> int:
    """Read the version of the pinned roster; 0 without a roster, or one without a version."""
    consortium = identity.load().identity.consortium
    peers = PinnedPeers(identity.folder / "roster.json", identity.current_credentials().ca_pem, consortium)
    signed = peers.load().signed
    try:
        return int(json.loads(signed.document)["version"]) if signed else 0
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return 0


def join(
    token: str,
    home: Home,
    again: bool = False,
    authority: str | None = None,
    clock: Clock = utc_now,
    connect: Callable[[Credentials], Connect] = lambda credentials: connect_with(lambda: credentials),
    diagnose: Callable[[Address, Credentials], Diagnosis] = diagnose_channel,
) -> PeerCertificate:
    """Turn an invitation into this home's identity.

    again: ask for a new key although this home has a certificate in force of the same silo   authority: its
    fingerprint as the lead reads it out. Raises ConfigError (E-ID-01, E-ID-13, E-WIRE-01) on a bad token, RefusedError
    (E-ID-10) on one of another authority, before anything is sent or written; UnavailableError or RefusedError when no
    address gives a valid answer, and the coordinator's refusals. Guarantees: an interrupted join can be repeated with
    the same token and home; a complete one is not changed.
    """
    invitation = InvitationToken.decode(token, clock())
    if authority is not None:
        _require_authority(_read_fingerprint(authority), certificate_fingerprint(invitation.ca_pem))
    home.make()
    identity = SiloIdentity(home.path, clock)
    if identity.joined and not again and (certificate := _certificate_in_force(identity, invitation, clock)):
        return certificate
    material = identity.join_material(invitation)
    request = pb.JoinRequest(csr_pem=material.csr_pem, renewal_proof=material.proof)
    answer = _first_answer(material.addresses, request, connect(material.invitation), material.invitation, diagnose)
    if certificate_fingerprint(answer.authority_pem) != certificate_fingerprint(invitation.ca_pem):
        raise ProtocolError("E-WIRE-06", "the coordinator's authority is not that of the invitation: ask the lead")
    roster = SignedRoster.unpack(answer.signed_roster) if answer.signed_roster else None
    home.write_addresses(material.addresses)
    home.join_for(answer.validation_only)  # before the identity: the service does not start without one
    return identity.install(answer.certificate_pem, invitation.ca_pem, roster)


def _certificate_in_force(identity: SiloIdentity, token: InvitationToken, clock: Clock) -> PeerCertificate | None:
    """Return the certificate in force if this token was, or may have been, used up for it already."""
    certificate = identity.load()
    same = (certificate.identity.consortium, certificate.identity.name, identity.ca_fingerprint()) == (
        token.consortium,
        token.name,
        certificate_fingerprint(token.ca_pem),
    )
    return certificate if same and certificate.not_before <= clock() <= certificate.not_after else None


def _first_answer(
    addresses: tuple[Address, ...],
    request: pb.JoinRequest,
    connect: Connect,
    credentials: Credentials,
    diagnose: Callable[[Address, Credentials], Diagnosis],
) -> pb.Membership:
    failure: FederationError = UnavailableError("E-NET-01", "the invitation has no address of the coordinator")
    for address in addresses:
        connection = Connection.over(address, connect(address))
        try:
            return connection.enrolment.Join(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            failure = to_federation_error(error)
            if not isinstance(failure, UnavailableError):
                raise failure from error
            if failure.code == "E-NET-01" and not (finding := diagnose(address, credentials)).ok:
                failure = finding.error()
        finally:
            connection.channel.close()
    raise failure


def write_request(home: Home, out: Path, clock: Clock = utc_now) -> str:
    home.make()
    signing_request = SiloIdentity(home.path, clock).signing_request()
    private_files.write_public(out, SigningRequest(signing_request.csr_pem, signing_request.proof).to_json().encode())
    return certificates.fingerprint_of(certificates.public_key(certificates.load_request(signing_request.csr_pem)))


def install_signed(text: str, home: Home, authority: str | None, clock: Clock = utc_now) -> PeerCertificate:
    """Install the authority's answer to `write_request`: the certificate, the addresses and the roster.

    authority: its fingerprint as the lead reads it out; needed once, then pinned. Raises ConfigError (E-ID-31) on
    another file, RefusedError: E-ID-10 on another authority, E-ID-31 on another certificate, E-ID-14 on an invalid
    roster.
    """
    answer = Admission.from_json(text)
    if not answer.certificate_pem:
        raise ConfigError(
            "E-ID-31", "the admission has only a list of members and no certificate: use the answer to `silo request`"
        )
    identity = SiloIdentity(home.path, clock)
    fingerprint = certificate_fingerprint(answer.ca_pem)
    if authority is not None:
        _require_authority(_read_fingerprint(authority), fingerprint)
    elif not identity.joined:
        raise RefusedError(
            "E-ID-10",
            "--authority is missing: give the fingerprint that the lead reads out. The answer is from the "
            f"authority {format_fingerprint(fingerprint)}",
        )
    if identity.joined:
        _require_authority(identity.ca_fingerprint(), fingerprint)
    home.make()
    renewed = identity.joined
    peer = identity.install(answer.certificate_pem, answer.ca_pem, answer.roster)
    if renewed:
        identity.update_roster(answer.roster, accepts_new_peers(home))
    home.write_addresses(answer.addresses)
    return peer


def _read_fingerprint(text: str) -> str:
    """Read a fingerprint typed by a person; raises ConfigError (E-CFG-02)."""
    digest = re.sub(r"[:\s]", "", text).lower()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ConfigError(
            "E-CFG-02",
            f"expected --authority with the whole fingerprint that the lead reads out (64 hexadecimal digits), found "
            f"{text[:100]!r}",
        )
    return digest


def _require_authority(wanted: str, fingerprint: str) -> None:
    if wanted != fingerprint:
        raise RefusedError(
            "E-ID-10",
            f"expected the authority {format_fingerprint(wanted)}, found {format_fingerprint(fingerprint)}: the "
            "invitation or the answer is another consortium's, or was changed on its way. Nothing was sent; ask the "
            "lead by telephone",
        )


@dataclass(slots=True)
class MembershipMaintainer:
    """Renews the membership while the service runs. on_renewal: called after each renewal."""

    identity: SiloIdentity
    connections: ConnectionManager
    emit: EmitEvent
    on_renewal: Callable[[], None]
    clock: Clock = utc_now
    accepts_new: Callable[[], bool] = lambda: True
    _last_error: str = field(default="")

    def renew_if_due(self) -> bool:
        """Renew the certificate after two thirds of its life; return whether it was renewed.

        A failure is reported once and retried at the next check; the certificate in force stays.
        """
        if not self.identity.renewal_due(self.clock()):
            return False
        try:
            pinned = pinned_version(self.identity)
            request = self.identity.renewal_request()
            message = pb.RenewRequest(csr_pem=request.csr_pem, renewal_proof=request.proof)
            try:
                answer = self.connections.current().enrolment.Renew(message, timeout=CALL_TIMEOUT_S)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed for a newer one
                raise _call_error(error) from error
            peer = self.identity.install(answer.certificate_pem, self.identity.current_credentials().ca_pem)
        except FederationError as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                self.emit(error_event(error))
            return False
        self._last_error = ""
        if answer.signed_roster:
            self.apply_roster(answer.signed_roster, pinned)
        self.emit(event("renewed", f"certificate renewed until {peer.not_after:%Y-%m-%d}"))
        self.on_renewal()
        return True

    def apply_roster(self, raw: bytes, pinned: int | None = None) -> None:
        """Pin a newer roster and report its changes; raises RefusedError (E-ID-14) on an invalid one.

        pinned: the version that was pinned when this roster was asked for, if known. If a newer version was pinned
        since, this roster is ignored.
        """
        if not raw:
            return
        change = self.identity.update_roster(SignedRoster.unpack(raw), self.accepts_new(), pinned)
        for verb, names in (("joined", change.added), ("left", change.removed), ("has a new key", change.rekeyed)):
            for name in names:
                self.emit(
                    event("roster", f"{name} {verb} (roster {change.version})", facts={"silo": name, "how": verb})
                )
        for name, reason in change.held.items():
            remedy = f"compare fingerprints with that hospital, then: silo peers accept {name} FINGERPRINT"
            self.emit(
                event("held", f"{name} is not accepted: {reason}; {remedy}", facts={"silo": name, "reason": reason})
            )


def _call_error(error: grpc.RpcError | ValueError) -> FederationError:
    if isinstance(error, grpc.RpcError):
        return to_federation_error(error)
    return UnavailableError("E-NET-01", f"the connection was replaced: {error}")
