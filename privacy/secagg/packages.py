"""Encrypted shares of seeds, sent through the coordinator, and commitments to the seeds."""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fl_core.types.secagg import SHARE
from privacy.secagg.terms import Round, SecaggError, digest, frame, kdf

_NONCE = bytes(12)  # a key is used once: the salt is new with every upload


def commitment(round: Round, dealer: int, slot: int, block: int, seed: bytes) -> bytes:
    return digest("commit", round.context, dealer, slot, block, seed)


def _cipher(round: Round, chain: bytes, salt: bytes, dealer: int, member: int) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(kdf(chain, salt, "channel", round.context, dealer, member))


def encrypt(round: Round, chain: bytes, salt: bytes, dealer: int, member: int, plain: bytes) -> bytes:
    """Encrypt a dealer's shares for one member. chain: that of the two members, at the round's position."""
    associated_data = frame("package", round.context, dealer, member)
    return _cipher(round, chain, salt, dealer, member).encrypt(_NONCE, plain, associated_data)


def decrypt(round: Round, chain: bytes, salt: bytes, dealer: int, member: int, package: bytes) -> bytes:
    """Decrypt a package into 66 n bytes; raises SecaggError (E-RUN-48), which blames the dealer.

    Guarantees: it was made by the dealer, for this member, in this task, with this salt.
    """
    associated_data = frame("package", round.context, dealer, member)
    try:
        plain = _cipher(round, chain, salt, dealer, member).decrypt(_NONCE, package, associated_data)
    except InvalidTag:
        plain = b""
    if len(plain) != 2 * SHARE * round.n:
        raise SecaggError(
            "E-RUN-48",
            f"expected the package of {round.run.members[dealer]} in {round.kind} of round {round.number}, found other "
            "bytes: another upload's, another member's, or changed on the way",
            dealer,
        )
    return plain


def share_at(round: Round, plain: bytes, block: int, slot: int) -> bytes:
    """Return the share of one seed in a decrypted package."""
    at = SHARE * (block * round.n + round.place(slot))
    return plain[at : at + SHARE]
