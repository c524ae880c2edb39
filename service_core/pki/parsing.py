"""Certificates and requests as the other side sends them: whatever the bytes are, the only error is ValueError.

The library raises half a dozen kinds of error, some when a certificate is read and others when a part of it is.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.AttributeNotFound,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


def parse_certificate(data: bytes) -> x509.Certificate:
    """Read a certificate, the first of a PEM text or DER; raises ValueError.

    Guarantees: key, extensions and dates of what is returned can be read.
    """
    try:
        is_pem = b"-----BEGIN" in data
        cert = x509.load_pem_x509_certificate(data) if is_pem else x509.load_der_x509_certificate(data)
        _ = cert.public_key(), cert.extensions, cert.not_valid_before_utc, cert.not_valid_after_utc
    except _UNREADABLE as error:
        raise ValueError(_said(error)) from None
    return cert


def parse_request(pem: bytes) -> x509.CertificateSigningRequest:
    """Read a certificate request; raises ValueError.

    Guarantees: key, extensions and signature of what is returned can be read; whether the signature fits is not said.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        _ = request.public_key(), request.extensions, request.is_signature_valid
    except _UNREADABLE as error:
        raise ValueError(_said(error)) from None
    return request


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
