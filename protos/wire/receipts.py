"""Signed receipts: a hospital's proof that its update was taken, made after the update is on the coordinator's disk."""

from __future__ import annotations

import json

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError, Message

from fl_core.errors import RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki import certificates
from service_core.pki.identity import identity_of, parse_certificate

_SIGNED = ("contribution_id", "run_id", "round", "silo", "manifest_digest", "object_digest", "size", "at_unix")


def canonical_text(receipt: pb.Receipt) -> bytes:
    """Return what is signed: the fields before the signer and the attestation, as JSON with sorted keys."""
    stated = receipt.attestation
    fields: dict[str, object] = {name: getattr(receipt, name) for name in _SIGNED}
    fields["kind"] = pb.TaskKind.Name(receipt.kind)
    if receipt.HasField("attestation"):
        fields["attestation"] = [stated.policy_digest, stated.ledger_seq, stated.ledger_head]
        if stated.ledger_sealed or stated.ledger_restored:  # absent in older receipts
            fields["ledger"] = [stated.ledger_sealed.hex(), stated.ledger_restored]
    return b"receipt|" + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def sign(receipt: pb.Receipt, key_pem: bytes, certificate_pem: bytes) -> pb.Receipt:
    """Return the receipt with the coordinator's certificate and signature."""
    key = certificates.load_key(key_pem, "the coordinator's credentials")
    signed = pb.Receipt()
    signed.CopyFrom(receipt)
    signed.signer_pem = certificate_pem
    signed.signature = key.sign(canonical_text(receipt), ec.ECDSA(hashes.SHA256()))
    return signed


def shorten_receipt(receipt: bytes, facts: pb.Receipt) -> tuple[bytes, bytes]:
    """Return the fields of a receipt that differ from `facts`, and its signer's certificate, which many receipts share.

    The head of the coordinator's log is left out: it is signed and stored separately. Other bytes, and a receipt that
    cannot be rebuilt from `facts`, are returned unchanged and without a certificate.
    """
    try:
        message = pb.Receipt.FromString(receipt)
    except DecodeError:
        return receipt, b""
    message.ClearField("log_head")
    rest = pb.Receipt()
    rest.CopyFrom(message)
    rest.ClearField("signer_pem")
    parts: list[tuple[Message, Message]] = [(rest, facts), (rest.attestation, facts.attestation)]
    for part, fact in parts:
        for name in part.DESCRIPTOR.fields_by_name:
            if name != "attestation" and getattr(part, name) == getattr(fact, name):
                part.ClearField(name)
    if rest.attestation == pb.Attestation():
        rest.ClearField("attestation")
    kept, signer = rest.SerializeToString(deterministic=True), message.signer_pem
    as_it_came = message.SerializeToString(deterministic=True)
    return (kept, signer) if signer and restore_receipt(kept, facts, signer) == as_it_came else (as_it_came, b"")


def restore_receipt(kept: bytes, facts: pb.Receipt, signer_pem: bytes) -> bytes:
    """Rebuild a shortened receipt; raises DecodeError on other bytes."""
    message = pb.Receipt(signer_pem=signer_pem)
    message.MergeFrom(facts)
    message.MergeFrom(pb.Receipt.FromString(kept))
    return message.SerializeToString(deterministic=True)


def verify(receipt: pb.Receipt, authority_pem: bytes, consortium: str) -> None:
    """Raise RefusedError (E-ID-14) unless the coordinator of this consortium, under the pinned authority, signed it."""
    try:
        signer = parse_certificate(receipt.signer_pem)
        issued = certificates.issued_by(signer, parse_certificate(authority_pem))
        if not issued or identity_of(signer).identity.uri != f"coordinator://{consortium}":
            raise ValueError("the signer is not the coordinator")
        key = certificates.public_key(signer)
        key.verify(receipt.signature, canonical_text(receipt), ec.ECDSA(hashes.SHA256()))
    except (ValueError, RefusedError, InvalidSignature) as error:
        raise RefusedError(
            "E-ID-14", f"the receipt is not validly signed by coordinator://{consortium}: {error or 'wrong signature'}"
        ) from error
