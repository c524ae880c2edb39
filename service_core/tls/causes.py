"""Causes of failed TLS connections that a client can distinguish, each with its remedy."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509

from fl_core.errors import FederationError, RefusedError, UnavailableError
from service_core.pki import certificates
from service_core.pki.identity import identity_of, key_fingerprint

PASSING = frozenset({"E-TLS-01", "E-TLS-13", "E-TLS-06", "E-TLS-08", "E-TLS-12"})
"""Codes that may pass by themselves: the network, or a clock on either side. All others need a repair on this side."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a failed connection as this side sees it. code: None if the connection works."""

    code: str | None
    explanation: str
    remedy: str

    @property
    def ok(self) -> bool:
        return self.code is None

    @property
    def worth_retrying(self) -> bool:
        """Whether a retry may work: the other side, the network or a clock is at fault."""
        return self.code in PASSING

    def __str__(self) -> str:
        return f"{self.explanation}; {self.remedy}" if self.ok else f"{self.code}: {self.explanation}; {self.remedy}"

    def error(self) -> FederationError:
        if self.code is None:
            raise ValueError("a connection that works is no error")
        kind = UnavailableError if self.worth_retrying else RefusedError
        return kind(self.code, f"{self.explanation}; {self.remedy}")


class ConnectionFailedError(Exception):
    """A connection failed before TLS."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(str(diagnosis))
        self.diagnosis = diagnosis


_ALERTS = {
    "CERTIFICATE_REQUIRED": (
        "E-TLS-09",
        "asks for a client certificate, but this side sent none",
        "run `silo join TOKEN`",
    ),
    "CERTIFICATE_EXPIRED": (
        "E-TLS-08",
        "says that this side's certificate has expired; by this machine's clock it is valid",
        "compare the clocks of both machines",
    ),
    "UNKNOWN_CA": (
        "E-TLS-09",
        "does not know the authority of this side's certificate",
        "this is the coordinator of another consortium: check the address, or run `silo join TOKEN` again",
    ),
    "UNRECOGNIZED_NAME": ("E-TLS-07", "does not answer to this name", "use the name that the lead gave"),
}
_VERSION = ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "WRONG_SSL_VERSION", "HANDSHAKE_FAILURE", "NO_PROTOCOLS")
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


def own_certificate(cert_pem: bytes, key_pem: bytes | None, ca_pem: bytes, now: datetime) -> Diagnosis | None:
    """Check this side's certificate; None if it is valid. A coordinator would refuse it without a reason."""
    cert = certificates.load_certificate(cert_pem, "this side's certificate")
    ca = certificates.load_certificate(ca_pem, "the pinned authority")
    start, end = cert.not_valid_before_utc, cert.not_valid_after_utc
    if now > end:
        return Diagnosis(
            "E-TLS-08",
            f"this side's own certificate expired on {end:%Y-%m-%d %H:%M} UTC ({(now - end).days} days ago)",
            "an expired certificate cannot be renewed: ask the lead for an invitation and run `silo join TOKEN` again; "
            f"if the date is wrong, set this machine's clock ({now:%Y-%m-%d %H:%M} UTC)",
        )
    if now < start:
        return Diagnosis(
            "E-TLS-08",
            f"this side's own certificate is valid from {start:%Y-%m-%d %H:%M} UTC and this machine's clock says "
            f"{now:%Y-%m-%d %H:%M} UTC",
            "set this machine's clock",
        )
    if not certificates.issued_by(cert, ca):
        return Diagnosis(
            "E-TLS-09",
            f"this side's own certificate was issued by {_issuer(cert)}, not by the pinned authority",
            "certificate and authority come from two consortia: run `silo join TOKEN` again",
        )
    if key_pem is not None:
        key = certificates.load_key(key_pem, "this side's key")
        if certificates.fingerprint_of(key.public_key()) != key_fingerprint(cert):
            return Diagnosis(
                "E-TLS-09", "this side's key does not match its certificate", "run `silo join TOKEN` again"
            )
    return None


def server_certificate(
    error: ssl.SSLCertVerificationError, shown: x509.Certificate | None, name: str, ca_pem: bytes, now: datetime
) -> Diagnosis:
    """Explain why the other side's certificate was refused."""
    ca = certificates.load_certificate(ca_pem, "the pinned authority")
    if shown is None:
        return Diagnosis(
            "E-TLS-05", f"the certificate of {name} was refused ({error.verify_message})", "compare `silo fingerprint`"
        )
    dates = f"{shown.not_valid_before_utc:%Y-%m-%d %H:%M} to {shown.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if not certificates.issued_by(shown, ca):
        return Diagnosis(
            "E-TLS-05",
            f"expected a certificate of {_issuer(ca)} (pinned at joining), found one of "
            + ("an authority with the same name and another key" if shown.issuer == ca.subject else _issuer(shown)),
            "an intercepting proxy is in between, or this is another consortium's coordinator: ask your network "
            "team to exempt this address from inspection, and compare `silo fingerprint` with the lead's",
        )
    if not shown.not_valid_before_utc <= now <= shown.not_valid_after_utc:
        return Diagnosis(
            "E-TLS-06",
            f"the coordinator's certificate is valid from {dates} and this machine's clock says "
            f"{now:%Y-%m-%d %H:%M} UTC",
            "set the clock if it is wrong; else the operator restarts the coordinator, which renews its certificate",
        )
    names = _names(shown)
    if "mismatch" in error.verify_message.lower() or "not valid for" in error.verify_message.lower():
        return Diagnosis(
            "E-TLS-07",
            f"expected a certificate for {name}, found one for {', '.join(names) or 'no host at all'}",
            "use one of these names, or ask the lead to add this one to the coordinator's addresses",
        )
    return Diagnosis(
        "E-TLS-09",
        f"the certificate of {name} ({', '.join(names)}) is not a server certificate ({error.verify_message})",
        "another member's machine answers at this address: check the address with the lead",
    )


def tls_error(error: ssl.SSLError, place: str) -> Diagnosis:
    reason = error.reason or type(error).__name__
    for sign, (code, what, remedy) in _ALERTS.items():
        if sign in reason:
            return Diagnosis(code, f"{place} {what}", remedy)
    if any(sign in reason for sign in _VERSION):
        return Diagnosis(
            "E-TLS-15",
            f"{place} offers only versions older than TLS 1.3 ({reason})",
            "a proxy or an old service answers there: let it pass TCP through (layer 4), or upgrade it",
        )
    if any(sign in reason for sign in _PLAIN):
        return Diagnosis(
            "E-TLS-15",
            f"{place} does not use TLS: its answer is plain text ({reason})",
            "another service or a proxy uses this port: check the address and port",
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError) or "EOF" in reason:
        return connection_dropped(place, "it closed the connection in the middle of the handshake")
    return Diagnosis(
        "E-TLS-12",
        f"{place} refused the connection without a known reason ({reason})",
        "ask the coordinator's operator: its log has the reason and the time of this connection",
    )


def connection_dropped(place: str, how: str) -> Diagnosis:
    return Diagnosis(
        "E-TLS-13",
        f"the TLS handshake with {place} was cut off ({how})",
        "a firewall, an inspecting proxy or a restart may be the cause: try again, then ask your network team",
    )


def _issuer(cert: x509.Certificate) -> str:
    return repr(cert.issuer.rfc4514_string())


def _names(cert: x509.Certificate) -> list[str]:
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    hosts = names.get_values_for_type(x509.DNSName) + [str(ip) for ip in names.get_values_for_type(x509.IPAddress)]
    try:
        return [*hosts, identity_of(cert).identity.uri]
    except FederationError:
        return hosts
