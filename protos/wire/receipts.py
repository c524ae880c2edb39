"""Signed receipts: a hospital's proof that its update was taken, made after the update is on the coordinator's disk."""

from __future__ import annotations

import json

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError, Message

from fl_core.errors import RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import parse_certificate

_SIGNED = ("contribution_id", "run_id", "round", "silo", "manifest_digest", "object_digest", "size", "at_unix")


def canonical_text(receipt: pb.Receipt) -> bytes:
    """Write what is signed: the fields before the signer and the attestation, as JSON with sorted keys."""
    stated = receipt.attestation
    fields: dict[str, object] = {name: getattr(receipt, name) for name in _SIGNED}
    fields["kind"] = pb.TaskKind.Name(receipt.kind)
    if receipt.HasField("attestation"):
        fields["attestation"] = [stated.policy_digest, stated.ledger_seq, stated.ledger_head]
        if stated.ledger_sealed or stated.ledger_restored:  # a receipt from before these fields stays what was signed
            fields["ledger"] = [stated.ledger_sealed.hex(), stated.ledger_restored]
    return b"receipt|" + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def sign(receipt: pb.Receipt, key_pem: bytes, certificate_pem: bytes) -> pb.Receipt:
    """Return the receipt with the coordinator's certificate and signature."""
    key = serialization.load_pem_private_key(key_pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("expected an elliptic-curve key")
    signed = pb.Receipt()
    signed.CopyFrom(receipt)
    signed.signer_pem = certificate_pem
    signed.signature = key.sign(canonical_text(receipt), ec.ECDSA(hashes.SHA256()))
    return signed


def shortened(receipt: bytes, facts: pb.Receipt) -> tuple[bytes, bytes]:
    """Return what `facts` do not say of a receipt, and its signer's certificate, which many receipts share.

    The end of the coordinator's log that came with it is left out: it is signed and kept apart. What is no receipt, or
    not one of these facts, is returned as it is, and no certificate.
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
    return (kept, signer) if signer and whole(kept, facts, signer) == as_it_came else (as_it_came, b"")


def whole(kept: bytes, facts: pb.Receipt, signer_pem: bytes) -> bytes:
    """Return the receipt that was shortened; raises DecodeError on other bytes."""
    message = pb.Receipt(signer_pem=signer_pem)
    message.MergeFrom(facts)
    message.MergeFrom(pb.Receipt.FromString(kept))
    return message.SerializeToString(deterministic=True)


def verify(receipt: pb.Receipt, authority_pem: bytes, consortium: str) -> None:
    """Raise RefusedError (E-ID-14) unless the coordinator of this consortium, under the pinned authority, signed it."""
    try:
        signer = parse_certificate(receipt.signer_pem)
        signer.verify_directly_issued_by(parse_certificate(authority_pem))
        names = signer.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        key = signer.public_key()
        if f"coordinator://{consortium}" not in names.get_values_for_type(x509.UniformResourceIdentifier):
            raise ValueError("the signer is not the coordinator")
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise TypeError("the signer's key is of another kind")
        key.verify(receipt.signature, canonical_text(receipt), ec.ECDSA(hashes.SHA256()))
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise RefusedError(
            "E-ID-14", f"expected a receipt signed by coordinator://{consortium}, found {error or 'a wrong signature'}"
        ) from error
