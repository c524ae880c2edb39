"""Heads of audit logs: the number and hash of the newest line, signed by the side whose log it is.

Each side keeps the other's heads. So a rewritten log is noticed unless the other side's copies are rewritten too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fl_core.errors import FederationError, RefusedError
from service_core.pki import certificates
from service_core.pki.identity import identity_of, parse_certificate
from service_core.storage.private_files import Credentials

CONTEXT = "consilium audit head v1"


@dataclass(frozen=True, slots=True)
class SignedHead:
    """The signed head of a log.

    Attributes:
        of: identity of the log's owner
        number, hash: of the newest line
        certificate: the signer's, PEM
        restored, restored_hash: of the newest line that records a restore; 0 and empty without one
    """

    of: str
    number: int
    hash: str
    signature: bytes = b""
    certificate: bytes = b""
    restored: int = 0
    restored_hash: str = ""

    @classmethod
    def sign(
        cls, of: str, number: int, hash: str, credentials: Credentials, restored: int = 0, restored_hash: str = ""
    ) -> SignedHead:
        plain = cls(of, number, hash, restored=restored, restored_hash=restored_hash)
        key = certificates.load_key(credentials.key_pem, "the key in force")
        return replace(
            plain, signature=certificates.sign(key, CONTEXT, plain.canonical_text()), certificate=credentials.cert_pem
        )

    def canonical_text(self) -> bytes:
        restored = [self.restored, self.restored_hash] if self.restored else []
        return json.dumps([self.of, self.number, self.hash, *restored], separators=(",", ":")).encode()

    def lacks(self, before: SignedHead) -> bool:
        """Return whether a log with this head lacks lines that an earlier head of the same side covers."""
        put_back = (self.restored, self.restored_hash) != (before.restored, before.restored_hash)
        return (
            self.number < before.number
            or (self.number == before.number and self.hash != before.hash)
            or (put_back and 0 < self.restored <= before.number)
        )

    def require_signed(self, authority_pem: bytes) -> None:
        """Raise RefusedError (E-ID-14) unless it is signed with a certificate that the authority issued for `of`.

        Expired certificates are accepted: a log outlives them.
        """
        try:
            signer = parse_certificate(self.certificate)
            authority = parse_certificate(authority_pem)
            sound = (
                certificates.issued_by(signer, authority)
                and identity_of(signer).identity.uri == self.of
                and certificates.verify(certificates.public_key(signer), CONTEXT, self.canonical_text(), self.signature)
            )
        except (ValueError, FederationError):
            sound = False
        if not sound:
            raise RefusedError(
                "E-ID-14",
                f"the head of the audit log is not signed by {self.of[:80]!r}",
            )

    def to_json(self) -> Mapping[str, object]:
        return {
            "of": self.of,
            "number": self.number,
            "hash": self.hash,
            "signature": self.signature.hex(),
            "certificate": self.certificate.decode("ascii", "replace"),
            **({"restored": self.restored, "restored_hash": self.restored_hash} if self.restored else {}),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> SignedHead:
        """Parse what `to_json` returned; raises ValueError, TypeError or KeyError on anything else."""
        of, number, hash, signature, certificate = (
            raw[name] for name in ("of", "number", "hash", "signature", "certificate")
        )
        restored, restored_hash = raw.get("restored", 0), raw.get("restored_hash", "")
        texts = (of, hash, signature, certificate, restored_hash)
        if type(number) is not int or type(restored) is not int or not all(isinstance(v, str) for v in texts):
            raise TypeError("not the head of an audit log")
        signed = bytes.fromhex(str(signature)), str(certificate).encode()
        return cls(str(of), number, str(hash), *signed, restored, str(restored_hash))
