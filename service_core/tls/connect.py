"""Restricts gRPC to TLS 1.3, and diagnoses failed connections.

gRPC reports "failed to connect to all addresses" for a dozen causes. `diagnose` makes the same connection with
Python's ssl, which distinguishes them.
"""

from __future__ import annotations

import os
import ssl
import sys
import tempfile
from pathlib import Path

from cryptography import x509

from fl_core.errors import StateError
from service_core.pki.certificates import Clock, utc_now
from service_core.pki.identity import parse_certificate
from service_core.storage import private_files
from service_core.tls import causes
from service_core.tls.causes import ConnectionFailedError, Diagnosis
from service_core.tls.proxy import open_connection

SUITES = "GRPC_SSL_CIPHER_SUITES"
RSA_ONLY = "ECDHE-RSA-AES128-GCM-SHA256"


def require_tls13() -> None:
    """Make gRPC refuse TLS 1.2; raises StateError (E-RUN-99) if grpc was imported before.

    gRPC has no option for the minimum version. At import it reads the cipher suites of TLS 1.2 from an environment
    variable. This sets a suite that needs an RSA certificate, and ours are ECDSA.
    Guarantees: a client of TLS 1.2 is refused.
    """
    if os.environ.get(SUITES) == RSA_ONLY:
        return
    if "grpc" in sys.modules:
        raise StateError(
            "E-RUN-99",
            "grpc was imported before service_core.tls.connect.require_tls13() ran, with "
            f"{SUITES}={os.environ.get(SUITES)!r}: TLS 1.2 would be accepted. Call it first in the entry point; "
            "from Python, call consilium.connect before anything else imports grpc",
        )
    os.environ[SUITES] = RSA_ONLY


def silence_grpc_logs() -> None:
    """Stop gRPC, imported later, from printing a client's handshake failures, unless the user chose a log level."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def diagnose(
    host: str,
    port: int,
    ca_pem: bytes,
    cert_pem: bytes | None = None,
    key_pem: bytes | None = None,
    server_name: str | None = None,
    timeout: float = 10.0,
    clock: Clock = utc_now,
) -> Diagnosis:
    """Connect as gRPC does and return the cause of a failure. timeout: seconds per step.

    E-TLS-12 covers several causes: gRPC's server closes without a TLS alert, and only its log has the reason.
    """
    if cert_pem is not None and (finding := causes.own_certificate(cert_pem, key_pem, ca_pem, clock())):
        return finding
    name = server_name or host
    try:
        with open_connection(host, port, timeout) as sock:
            sock.settimeout(timeout)
            context = _context(ca_pem, cert_pem, key_pem)
            with context.wrap_socket(sock, server_hostname=name) as tls:
                return _after_handshake(tls, f"{host}:{port}", cert_pem is not None)
    except ConnectionFailedError as error:
        return error.diagnosis
    except ssl.SSLCertVerificationError as error:
        shown = _presented(host, port, name, timeout, (cert_pem, key_pem))
        return causes.server_certificate(error, shown, name, ca_pem, clock())
    except ssl.SSLError as error:
        return causes.tls_error(error, f"{host}:{port}")
    except TimeoutError:
        return Diagnosis(
            "E-TLS-01",
            f"{host}:{port} accepts the connection and then sends nothing for {timeout:g} s",
            "a firewall or another service answers there: check the address and port",
        )
    except OSError as error:
        return causes.connection_dropped(f"{host}:{port}", error.strerror or type(error).__name__)


def _context(ca_pem: bytes | None, cert_pem: bytes | None, key_pem: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    if ca_pem is None:  # only to read a certificate that was already refused
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=ca_pem.decode())
    if cert_pem is not None and key_pem is not None:
        with tempfile.TemporaryDirectory() as folder:  # Python's ssl reads keys only from files; mode 0700
            bundle = Path(folder) / "bundle.pem"
            private_files.write_private(bundle, key_pem + cert_pem)
            context.load_cert_chain(bundle)
    return context


def _after_handshake(tls: ssl.SSLSocket, place: str, had_certificate: bool) -> Diagnosis:
    """Read the server's first bytes: in TLS 1.3 it checks our certificate after our side has finished."""
    if tls.selected_alpn_protocol() != "h2":
        return Diagnosis(
            "E-TLS-15",
            f"{place} has the right certificate but no HTTP/2",
            "a proxy in front of the coordinator terminates TLS: let it pass TCP through (layer 4)",
        )
    try:
        first = tls.recv(9)
    except ssl.SSLError as error:
        return causes.tls_error(error, place)
    except TimeoutError:
        return Diagnosis(
            "E-TLS-15",
            f"{place} accepts TLS and then sends nothing",
            "this is not a coordinator: check the address and port",
        )
    except ConnectionResetError:
        first = b""
    if first:
        return Diagnosis(
            None, f"TLS 1.3 to {place} works and both sides accept each other's certificate", "all is well"
        )
    if not had_certificate:
        return Diagnosis(
            "E-TLS-09", f"{place} asks for a client certificate, but this side sent none", "run `silo join TOKEN`"
        )
    return Diagnosis(
        "E-TLS-12",
        f"{place} closed the connection when it saw this side's certificate, which is valid by this machine's clock "
        "and issued by the pinned authority; the coordinator's clock may be wrong, or it has another authority",
        "ask the coordinator's operator: its log has the reason and the time of this connection",
    )


def _presented(
    host: str, port: int, name: str, timeout: float, key_pair: tuple[bytes | None, bytes | None]
) -> x509.Certificate | None:
    """Connect without verification to read the refused certificate; nothing is sent."""
    try:
        with open_connection(host, port, timeout) as sock:
            sock.settimeout(timeout)
            with _context(None, *key_pair).wrap_socket(sock, server_hostname=name) as tls:
                der = tls.getpeercert(binary_form=True)
        return None if der is None else parse_certificate(der)
    except (OSError, ConnectionFailedError, ValueError):
        return None
