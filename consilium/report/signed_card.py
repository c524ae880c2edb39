"""A signed card: the document, a lead's signature, and the certificates to verify it.

The exporting lead signs with the key of a certificate from the consortium's authority, because the authority's own key
may be offline. The signature covers the document's canonical bytes (JSON with sorted keys, no blanks, ASCII), so that
a file may be indented.

*Guarantees* of `verify`: the holder of the lead's key signed exactly this document, and the authority with the
fingerprint that the reader supplied has certified that key for a lead of the consortium that the card names. *Not
guaranteed*: that the coordinator's counts are true; that the lead was not revoked (only the coordinator has the list of
leads); the time, which is the signer's clock and is only checked against the certificate's validity.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from consilium.report.card import Card
from fl_core.converter import ConversionError, parse_json
from fl_core.errors import ConfigError, FederationError, RefusedError
from service_core.pki import certificates
from service_core.pki.identity import (
    CertificateRole,
    PeerCertificate,
    certificate_fingerprint,
    format_fingerprint,
    identity_of,
)
from service_core.storage.private_files import Credentials

CONTEXT = "consilium model card v1"
MAX_BYTES = 16 << 20
_PARTS = {"card", "signature", "certificate", "authority"}
OPENING, CLOSING = '<script type="application/json" id="signed-card">', "</script>"
"""Delimiters of the signed card in its page: a script of a type that no browser runs."""


def canonical(document: object) -> bytes:
    """Return the bytes to sign; raises ValueError on NaN and infinity, which JSON does not have."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class SignedCard:
    """A card with its signature, unchecked until `verify`. certificate, authority: PEM."""

    document: Mapping[str, object]
    signature: bytes
    certificate: bytes
    authority: bytes

    @classmethod
    def sign(cls, card: Card, credentials: Credentials) -> SignedCard:
        """Sign as a lead. credentials: the lead's key, its certificate and the authority's."""
        document: dict[str, object] = json.loads(
            canonical(card.facts())
        )  # turns tuples into lists, as readers get them
        key = certificates.load_key(credentials.key_pem, "the lead's key")
        signature = certificates.sign(key, CONTEXT, canonical(document))
        return cls(document, signature, credentials.cert_pem, credentials.ca_pem)

    @property
    def digest(self) -> str:
        """SHA-256 of the signed bytes, in hex; documents from the card cite it."""
        return hashlib.sha256(canonical(self.document)).hexdigest()

    def to_json(self) -> str:
        raw = {
            "card": self.document,
            "signature": base64.b64encode(self.signature).decode(),
            "certificate": self.certificate.decode(),
            "authority": self.authority.decode(),
        }
        return json.dumps(raw, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def read(cls, file: Path) -> SignedCard:
        """Read a card, or a page with a card in it; raises ConfigError (E-CFG-02, E-ID-34) on any other file."""
        text = card_text(file)
        if text.lstrip().startswith("<"):
            _, opening, rest = text.partition(OPENING)
            inside, closed, _ = rest.partition(CLOSING)
            if not (opening and closed):
                raise _unsound("a card's page", "a page without a signed card in it")
            text = inside
        return cls.from_json(text)

    @classmethod
    def from_json(cls, text: str) -> SignedCard:
        """Invert `to_json`; raises ConfigError (E-ID-34) on other texts, and on duplicate names."""
        try:
            raw = parse_json(text)
            if not isinstance(raw, dict) or set(raw) != _PARTS or not isinstance(raw["card"], dict):
                raise ValueError(f"other parts than {', '.join(sorted(_PARTS))}")
            signature = base64.b64decode(raw["signature"], validate=True)
            canonical(raw["card"])
            return cls(raw["card"], signature, raw["certificate"].encode(), raw["authority"].encode())
        except (ConversionError, ValueError, TypeError, AttributeError) as error:
            raise _unsound("a signed card", str(error)) from None

    def verify(self, authority: str) -> tuple[Card, PeerCertificate]:
        """Return the card and the lead who signed it. authority: the fingerprint (SHA-256 of the certificate, hex).

        Raises RefusedError (E-ID-10) if the card is under another authority; ConfigError (E-ID-34) on an invalid
        signature or certificate.
        """
        try:
            fingerprint = certificate_fingerprint(self.authority)
            signer = identity_of(self.certificate)
            holder = certificates.load_certificate(self.certificate, "the card")
            ca = certificates.load_certificate(self.authority, "the card")
            public = certificates.public_key(holder)
        except (ValueError, FederationError) as error:
            raise _unsound("a card with its certificates", f"one that cannot be read ({error})") from None
        if fingerprint != authority:
            raise RefusedError(
                "E-ID-10",
                f"expected a card under the authority {format_fingerprint(authority)}, found "
                f"{format_fingerprint(fingerprint)}: it is from another consortium, or forged; compare the fingerprint "
                "with the lead by telephone",
            )
        if not certificates.issued_by(holder, ca):
            raise _unsound("a signature of a lead of this consortium", "a certificate that the authority did not issue")
        if signer.identity.kind is not CertificateRole.LEAD:
            raise _unsound("a signature of a lead", f"one of {signer.identity}")
        if not certificates.verify(public, CONTEXT, canonical(self.document), self.signature):
            raise _unsound("the card as signed", "a changed card, or another signature")
        card = Card.of(self.document)
        if card.consortium != signer.identity.consortium or card.written_by != signer.identity.name:
            raise _unsound(f"a card of {signer.identity}", f"one of {card.written_by} of {card.consortium}")
        if not signer.not_before <= _time(card.written) <= signer.not_after:
            raise _unsound(
                f"a card that was written while its certificate was valid, {signer.not_before:%Y-%m-%d} to "
                f"{signer.not_after:%Y-%m-%d}",
                f"one of {card.written}",
            )
        return card, signer


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Result for a file that a card names, in the card's folder. outcome: "the same", "another" or "not here"."""

    name: str
    outcome: str


def check_files(card: Card, folder: Path) -> list[FileCheck]:
    """Compare the files in a card's folder with the digests in it.

    Raises ConfigError (E-ID-34) on a name that leads out of the folder.
    """
    checks = []
    for name, digest in sorted(card.files.items()):
        if Path(name).name != name:
            raise _unsound("names of files without folders", f"{name[:60]!r}")
        file = folder / name
        same = file.is_file() and file_sha256(file) == digest
        checks.append(FileCheck(name, "the same" if same else "another" if file.is_file() else "not here"))
    return checks


def card_text(file: Path) -> str:
    """Read a file as text; raises ConfigError (E-CFG-02) if it cannot be read, or is larger than any card."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("E-CFG-02", f"cannot read a card from {file} ({error}): check the path") from None


def file_sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def utc(unix: float) -> str:
    """Format a time for cards, as ISO 8601 in UTC; "" for 0."""
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="seconds") if unix else ""


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise _unsound("a time", f"{text[:40]!r}") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _unsound(expected: str, found: str) -> ConfigError:
    return ConfigError(
        "E-ID-34", f"expected {expected}, found {found[:300]}: do not rely on it, and ask the lead for the file"
    )
