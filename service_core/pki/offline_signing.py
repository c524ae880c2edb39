"""Files for offline signing, when the authority's key is kept off the network: a silo's request and the answer.

Both are JSON text without secrets: a request has a public key, an answer the signed roster and certificate.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from fl_core.errors import ConfigError, FederationError
from service_core.pki.identity import Address
from service_core.pki.roster import SignedRoster

REQUEST = "consilium.request.v1"
ADMISSION = "consilium.admission.v1"


@dataclass(frozen=True, slots=True)
class SigningRequest:
    """A key to be certified. proof: the current key's signature over it; empty in a new home."""

    csr_pem: bytes
    proof: bytes = b""

    def to_json(self) -> str:
        raw = {"format": REQUEST, "csr": self.csr_pem.decode(), "proof": base64.b64encode(self.proof).decode()}
        return json.dumps(raw, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SigningRequest:
        """Read what `to_json` wrote; raises ConfigError (E-ID-31). The request in it is checked when it is signed."""
        raw = _read(text, REQUEST, "a request of `silo request`")
        try:
            return cls(raw["csr"].encode(), base64.b64decode(raw["proof"], validate=True))
        except (KeyError, ValueError, AttributeError, TypeError):
            raise _wrong_file("a request of `silo request`", "a damaged one") from None


@dataclass(frozen=True, slots=True)
class Admission:
    """The authority's answer: its newest roster and, after a request, a certificate.

    certificate_pem: empty without a request, for instance after a revocation. Nothing is verified yet: the service
    checks it against its authority, a new silo against the fingerprint that the lead reads out.
    """

    addresses: tuple[Address, ...]
    ca_pem: bytes
    roster: SignedRoster
    certificate_pem: bytes = b""

    def to_json(self) -> str:
        raw = {
            "format": ADMISSION,
            "addresses": [str(a) for a in self.addresses],
            "authority": self.ca_pem.decode(),
            "certificate": self.certificate_pem.decode(),
            "roster": json.loads(self.roster.pack()),
        }
        return json.dumps(raw, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Admission:
        """Read what `to_json` wrote; raises ConfigError (E-ID-31)."""
        what = "an admission of `coordinator ca`"
        raw = _read(text, ADMISSION, what)
        try:
            where = tuple(Address.parse(a) for a in raw["addresses"])
            roster = SignedRoster.unpack(json.dumps(raw["roster"]))
            return cls(where, raw["authority"].encode(), roster, raw["certificate"].encode())
        except (KeyError, ValueError, AttributeError, TypeError, FederationError):
            raise _wrong_file(what, "a damaged one") from None


def _read(text: str, form: str, what: str) -> dict[str, str]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong_file(what, "text that is not JSON") from None
    if not isinstance(raw, dict) or raw.get("format") != form:
        actual = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise _wrong_file(what, f"the format {actual!r}")
    return raw


def _wrong_file(what: str, actual: str) -> ConfigError:
    return ConfigError("E-ID-31", f"expected {what}, found {actual}: give the file as it was written")
