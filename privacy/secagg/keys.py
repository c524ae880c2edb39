"""Keys of one run: their owners, and the chains of secrets that two members share.

Each member makes an X25519 and an Ed25519 pair from the operating system's entropy and signs them with its identity.
The digest of all members' keys is K, on which every later value depends. Each pair of members has a chain of secrets:

chain_uv(0) = KDF(X25519(agree_u, Agree_v), K, "root", lo, hi)      chain(i + 1) = KDF(chain(i), "", "next")

A chain only goes forward: secrets of an earlier position cannot be derived again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fl_core.errors import FederationError
from fl_core.types.secagg import SECRET
from privacy.secagg.shamir import Random
from privacy.secagg.terms import Round, SecaggError, SecaggRun, digest, frame, kdf
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, identity_of, parse_certificate
from service_core.pki.roster import RosterMember, renewed_from

KEYS_CONTEXT = "consilium secagg keys v1"
"""Context in which an identity key signs an entry."""


class MemberKeys(NamedTuple):
    """A member's public keys of one run, 32 bytes each; the signature is its identity key's (DER) over `message`."""

    name: str
    agree: bytes
    sign: bytes
    certificate_pem: bytes
    signature: bytes

    def message(self, run: SecaggRun) -> bytes:
        return frame("entry", run.run_id, run.manifest_digest, self.name, self.agree, self.sign)


class VerifiedKeys(NamedTuple):
    """All members' keys after verification. digest: K. sign: Ed25519 public keys, in the manifest's order."""

    digest: bytes
    sign: tuple[bytes, ...]


KeyVerifier = Callable[[MemberKeys, bytes], bool]
"""Returns whether the entry's signature over these bytes was made by the identity that is pinned for its name."""


def verify_keys(run: SecaggRun, entries: Sequence[MemberKeys], trusted: KeyVerifier) -> VerifiedKeys:
    """Verify all members' entries; raises SecaggError (E-ID-33), which blames the member with the wrong entry.

    Guarantees: the entries are those of the manifest's members, once each and in its order. No two members share a key,
    and `trusted` accepts every signature.
    """
    if (names := tuple(entry.name for entry in entries)) != run.members:
        raise SecaggError(
            "E-ID-33", f"expected the keys of {list(run.members)}, in this order, found those of {list(names)}"
        )
    seen: set[bytes] = set()
    for u, entry in enumerate(entries):
        keys = {entry.agree, entry.sign}
        if {len(entry.agree), len(entry.sign)} != {SECRET} or len(keys) < 2 or keys & seen:
            raise SecaggError("E-ID-33", f"expected two keys of {entry.name} that no other member has", u)
        if not trusted(entry, entry.message(run)):
            raise SecaggError(
                "E-ID-33",
                f"expected keys of {entry.name} signed by the identity that was confirmed here, but the signature is "
                "different: compare fingerprints with that hospital, then submit the run again",
                u,
            )
        seen |= keys
    flat = [part for entry in entries for part in (entry.name, entry.agree, entry.sign)]
    return VerifiedKeys(digest("keys", run.run_id, run.manifest_digest, *flat), tuple(entry.sign for entry in entries))


def pinned_signature(
    entry: MemberKeys, message: bytes, consortium: str, pins: Mapping[str, str], members: Mapping[str, RosterMember]
) -> bool:
    """Return whether the pinned identity of a name signed its entry.

    pins: fingerprints by name. members: the verified roster by name, for its chains of renewals: the signing key may be
    the pinned one, an older one that was renewed to it, or a newer one to which it was renewed.
    Guarantees: never raises, for any bytes.
    """
    pinned, member = pins.get(entry.name), members.get(entry.name)
    try:
        certificate = parse_certificate(entry.certificate_pem)
        holder, key = identity_of(certificate), certificates.public_key(certificate)
    except (FederationError, ValueError):
        return False
    if pinned is None or holder.identity != Identity(CertificateRole.SILO, consortium, entry.name):
        return False
    if holder.fingerprint != pinned:
        if member is None or member.fingerprint not in (pinned, holder.fingerprint):
            return False
        older = pinned if member.fingerprint == holder.fingerprint else holder.fingerprint
        if not renewed_from(member, consortium, older):
            return False
    return certificates.verify(key, KEYS_CONTEXT, message, entry.signature)


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """A silo's private keys of a run until all members' keys are known (state `keyed`), raw bytes.

    Store them before sending the entry. Guarantees: the repr hides them.
    """

    agree: bytes = field(repr=False)
    sign: bytes = field(repr=False)

    @classmethod
    def new(cls, random: Random = secrets.token_bytes) -> OwnKeys:
        return cls(random(SECRET), random(SECRET))

    def publics(self) -> tuple[bytes, bytes]:
        agree = X25519PrivateKey.from_private_bytes(self.agree).public_key().public_bytes_raw()
        return agree, Ed25519PrivateKey.from_private_bytes(self.sign).public_key().public_bytes_raw()

    def entry(self, run: SecaggRun, name: str, certificate_pem: bytes, sign: Callable[[bytes], bytes]) -> MemberKeys:
        """Make the entry that the silo sends. sign: signs with its identity key, under KEYS_CONTEXT."""
        entry = MemberKeys(name, *self.publics(), certificate_pem, b"")
        return entry._replace(signature=sign(entry.message(run)))


@dataclass(frozen=True, slots=True)
class RunKeys:
    """A silo's secrets of a run once all members' keys are known (state `ready`). Raw bytes, to be stored as they are.

    index: of this silo. chains: with every member including itself, at `position`. peers: all members' public keys for
    confirmations.
    Guarantees: the repr hides the signing key and the chains.
    """

    index: int
    keys_digest: bytes
    sign: bytes = field(repr=False)
    peers: tuple[bytes, ...]
    chains: tuple[bytes, ...] = field(repr=False)
    position: int = 0

    @classmethod
    def agree(
        cls, run: SecaggRun, name: str, own_keys: OwnKeys, entries: Sequence[MemberKeys], trusted: KeyVerifier
    ) -> RunKeys:
        """Derive the secrets from all members' keys, once; raises SecaggError (E-ID-33).

        Store the result in place of `own_keys`, which are deleted.
        Guarantees: as `verify_keys`; and the keys under this silo's name are its own.
        """
        verified = verify_keys(run, entries, trusted)
        if name not in run.members:
            raise SecaggError("E-ID-33", f"expected {name} among the members of the run, found {list(run.members)}")
        index = run.members.index(name)
        if (entries[index].agree, entries[index].sign) != own_keys.publics():
            raise SecaggError("E-ID-33", f"expected the keys that {name} made for this run, found others in its name")
        private = X25519PrivateKey.from_private_bytes(own_keys.agree)
        chains = []
        for v, entry in enumerate(entries):
            try:
                secret = private.exchange(X25519PublicKey.from_public_bytes(entry.agree))
            except ValueError:
                raise SecaggError(
                    "E-ID-33", f"the key of {entry.name} is invalid, so no shared secret can be computed", v
                ) from None
            chains.append(kdf(secret, verified.digest, "root", min(index, v), max(index, v)))
        return cls(index, verified.digest, own_keys.sign, verified.sign, tuple(chains))

    def check_open(self, round: Round) -> None:
        """Raise SecaggError (E-RUN-50) if the chains have passed the task's position."""
        if round.position < self.position:
            raise SecaggError(
                "E-RUN-50",
                f"{round.kind} of round {round.number} is closed here and its keys are deleted: it cannot be masked "
                "or opened again",
            )

    def closed(self, round: Round) -> RunKeys:
        """Return the keys after a round's close; unchanged if it was processed. Store them in one transaction."""
        return self.at(max(self.position, round.position + 1))

    def of(self, round: Round) -> RunKeys:
        """Return the keys at a task's position; raises SecaggError (E-RUN-50) if the task is closed."""
        self.check_open(round)
        return self.at(round.position)

    def at(self, position: int) -> RunKeys:
        """Return the keys at this position, which is not before the present one."""
        chains = self.chains
        for _ in range(position - self.position):
            chains = tuple(kdf(chain, b"", "next") for chain in chains)
        return replace(self, chains=chains, position=position)

    def pair_seed(self, round: Round, other: int, block: int) -> bytes:
        """Derive the seed shared with another member; the keys must be at the round's position."""
        lo, hi = sorted((self.index, other))
        return kdf(self.chains[other], round.context, "pair", block, lo, hi)

    def confirm(self, seal_hash: bytes) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.sign).sign(_confirmed(seal_hash))


def _confirmed(seal_hash: bytes) -> bytes:
    return frame("confirm", seal_hash)


def confirmed_by(sign_key: bytes, seal_hash: bytes, signature: bytes) -> bool:
    """Return whether a member's key of the run signed a seal; never raises, for any bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(sign_key).verify(signature, _confirmed(seal_hash))
    except (InvalidSignature, ValueError):
        return False
    return True
