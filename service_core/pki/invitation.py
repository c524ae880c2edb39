"""Invitation tokens: one line of text with all that a first connection needs, and a checksum.

    text    = "consilium1." base64url( size u32 | sha256(body)[:8] | zlib(body) )      size = len(zlib(body))
    body    = fields, each u16 length and bytes: consortium, name, addresses, CA (DER), certificate (DER), scalar (32)

A token contains the CA that the new silo will trust, and a private key, which opens only the Enrolment service, once,
until it expires. Send it over a trusted channel.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from dataclasses import dataclass, field
from datetime import datetime

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_core.errors import ConfigError, FederationError
from fl_core.text import INVISIBLE
from service_core.pki import certificates
from service_core.pki.identity import (
    Address,
    CertificateRole,
    Identity,
    PeerCertificate,
    identity_of,
    parse_certificate,
)
from service_core.storage.private_files import Credentials

PREFIX = "consilium1."
_LIMIT = 1 << 16
_FIELDS = 6


@dataclass(frozen=True, slots=True)
class InvitationToken:
    """The content of an invitation; its repr hides the key."""

    consortium: str
    name: str
    addresses: tuple[Address, ...]
    ca_pem: bytes = field(repr=False)
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)

    @property
    def certificate(self) -> PeerCertificate:
        return identity_of(self.cert_pem)

    @property
    def credentials(self) -> Credentials:
        """Credentials of the first connection; they open the Enrolment service only."""
        return Credentials(self.key_pem, self.cert_pem, self.ca_pem)

    def encode(self) -> str:
        der = [parse_certificate(p).public_bytes(serialization.Encoding.DER) for p in (self.ca_pem, self.cert_pem)]
        scalar = certificates.load_key(self.key_pem, "the invitation").private_numbers().private_value
        where = ",".join(map(str, self.addresses)).encode()
        parts = [self.consortium.encode(), self.name.encode(), where, *der, scalar.to_bytes(32, "big")]
        body = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
        packed = zlib.compress(body, 9)
        raw = len(packed).to_bytes(4, "big") + hashlib.sha256(body).digest()[:8] + packed
        return PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str, now: datetime | None = None) -> InvitationToken:
        """Decode a pasted token; line breaks, blanks and invisible characters that mail programs add are ignored.

        Raises ConfigError: E-ID-01 on a damaged, incomplete or foreign token, E-WIRE-01 on another version, E-ID-13 on
        one that has expired or is not valid yet.
        Guarantees: every field of the result is byte for byte what `encode` wrote.
        """
        token = _assemble(_unpack("".join(c for c in text if not c.isspace() and c not in INVISIBLE)))
        token._check(now or certificates.utc_now())
        return token

    def _check(self, now: datetime) -> None:
        ca, cert = (parse_certificate(pem) for pem in (self.ca_pem, self.cert_pem))
        key = certificates.load_key(self.key_pem, "the invitation").public_key()
        try:
            peer = self.certificate
        except FederationError:
            raise _damaged("its certificate has no identity") from None
        if peer.identity != Identity(CertificateRole.INVITE, self.consortium, self.name):
            raise _damaged(f"its certificate is for {peer.identity}")
        if not certificates.issued_by(cert, ca) or certificates.spki(
            certificates.public_key(cert)
        ) != certificates.spki(key):
            raise _damaged("its certificate, key and authority do not belong together")
        if not peer.not_before <= now <= peer.not_after:
            raise ConfigError(
                "E-ID-13",
                f"the invitation for {self.name!r} is not valid now. It is valid from "
                f"{peer.not_before:%Y-%m-%d %H:%M} to {peer.not_after:%Y-%m-%d %H:%M} UTC, and this machine's clock "
                f"says {now:%Y-%m-%d %H:%M} UTC; ask the lead for `coordinator invite {self.name}` (or set the "
                "clock)",
            )


def _damaged(what: str) -> ConfigError:
    return ConfigError("E-ID-01", f"the invitation is damaged: {what}. Copy it again, or ask for a new one")


def _unpack(text: str) -> list[bytes]:
    """Decode prefix, base64, size, compression, checksum and field lengths."""
    if not text.startswith(PREFIX):
        other = re.match(r"consilium(\d+)\.", text)
        if other:
            raise ConfigError("E-WIRE-01", f"expected an invitation of version 1, found {other[1]}; upgrade the silo")
        raise _damaged(f"it starts with {text[:12]!r} instead of {PREFIX!r}")
    encoded = text[len(PREFIX) :]
    try:
        if not re.fullmatch(r"[A-Za-z0-9_-]*", encoded) or len(encoded) > _LIMIT:
            raise _damaged("it has invalid characters or is far too long")
        usable = encoded[: len(encoded) - 1] if len(encoded) % 4 == 1 else encoded
        raw = base64.urlsafe_b64decode(usable + "=" * (-len(usable) % 4))
    except binascii.Error:
        raise _damaged("it is not base64url text") from None
    size = int.from_bytes(raw[:4], "big")
    if len(raw) < 12 or (len(raw) - 12 < size <= _LIMIT):
        raise ConfigError(
            "E-ID-01",
            f"the invitation is incomplete. It has only its first {len(text)} characters: copy the whole line",
        )
    packed = raw[12:]
    if len(packed) != size or len(usable) != len(encoded):
        raise _damaged(f"it is {len(packed)} bytes long and says {size}")
    unzip = zlib.decompressobj()
    try:
        body = unzip.decompress(packed, _LIMIT)
    except zlib.error:
        raise _damaged("its content cannot be decompressed") from None
    if not unzip.eof or unzip.unused_data or hashlib.sha256(body).digest()[:8] != raw[4:12]:
        raise _damaged("its checksum is wrong")
    fields, rest = [], body
    while len(rest) >= 2:
        length = int.from_bytes(rest[:2], "big")
        fields.append(rest[2 : 2 + length])
        rest = rest[2 + length :]
    if rest or len(fields) != _FIELDS:
        raise _damaged("its fields are not those of version 1")
    return fields


def _assemble(fields: list[bytes]) -> InvitationToken:
    try:
        consortium, name, where = (part.decode() for part in fields[:3])
        ca, cert = (certificates.to_pem(parse_certificate(der)) for der in fields[3:5])
        key = ec.derive_private_key(int.from_bytes(fields[5], "big"), ec.SECP256R1())
        addresses = tuple(Address.parse(address) for address in where.split(","))
    except (ValueError, ConfigError):
        raise _damaged("its fields cannot be read") from None
    return InvitationToken(consortium, name, addresses, ca, cert, certificates.key_to_pem(key))
