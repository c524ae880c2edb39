"""The signed end of an audit log as a message."""

from __future__ import annotations

from dataclasses import replace

from fl_core.errors import ProtocolError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.audit_log.heads import SignedHead
from service_core.pki import certificates
from service_core.pki.identity import parse_certificate

_CERTIFICATE_BYTES, _SIGNATURE_BYTES = 8192, 256


def to_message(head: SignedHead) -> pb.LogHead:
    return pb.LogHead(
        number=head.number,
        hash=bytes.fromhex(head.hash),
        signature=head.signature,
        certificate_pem=head.certificate,
        restored=head.restored,
        restored_hash=bytes.fromhex(head.restored_hash),
    )


def of_message(message: pb.LogHead, of: str, authority_pem: bytes) -> SignedHead:
    """Read the head of `of`; raises ProtocolError (E-WIRE-06) on another form, RefusedError as `require_signed`."""
    if (
        len(message.hash) != 32
        or len(message.certificate_pem) > _CERTIFICATE_BYTES
        or len(message.signature) > _SIGNATURE_BYTES
        or not 0 < message.number < 2**63
        or message.restored > message.number
        or len(message.restored_hash) != (32 if message.restored else 0)
    ):
        raise ProtocolError(
            "E-WIRE-06", "the message does not have the form of an audit log's end: upgrade the side that sent it"
        )
    head = SignedHead(
        of,
        message.number,
        message.hash.hex(),
        message.signature,
        message.certificate_pem,
        message.restored,
        message.restored_hash.hex(),
    )
    head.require_signed(authority_pem)
    plain = certificates.to_pem(parse_certificate(head.certificate))  # without what stands around it
    return replace(head, certificate=plain)
