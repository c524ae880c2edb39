"""The service's TLS credentials: mutual, and renewed while it runs.

gRPC asks for them at each handshake. So a certificate renewed on disk counts from the next connection on, connections
that exist go on undisturbed, and the certificate renews itself once two thirds of its life are over.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from coordinator.pki.authority import FOLDER, Authority
from fl_core.errors import FederationError
from protos.pki import certificates
from protos.pki.certificates import Clock, utc_now
from protos.pki.identity import identity_of
from protos.storage.private_files import Credentials

log = logging.getLogger(__name__)
_RENEW_AFTER = 2 / 3


@dataclass(slots=True)
class ServerCertificate:
    """The service's certificate on disk, watched: reads it anew when it has changed, renews it when it is due.

    Where the CA's key is kept on another machine, it is not renewed here: put a new `server.pem` in place.
    """

    home: Path
    clock: Clock = utc_now
    _served: str = ""
    _complained: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> Credentials:
        """Read key, certificate and CA; raises StateError (E-STATE-42, E-STATE-43) when they cannot be used."""
        folder = self.home / FOLDER
        return certificates.read_bundle(folder / "server.pem", (folder / "ca.crt").read_bytes())

    def renew_if_due(self) -> bool:
        """Issue a new certificate once two thirds of the life of the present one are over; tell whether it did."""
        own = identity_of(self.current().cert_pem)
        if self.clock() < own.not_before + _RENEW_AFTER * (own.not_after - own.not_before):
            return False
        if not (self.home / FOLDER / "ca.key").exists():
            self._complain(
                f"E-TLS-06: the service's certificate expires on {own.not_after:%Y-%m-%d %H:%M} UTC and the "
                "authority's key is elsewhere: `coordinator ca service` there issues a new one; put it in place"
            )
            return False
        renewed = identity_of(Authority.open(self.home, self.clock).issue_server().cert_pem)
        log.info("renewed the service's certificate: serial %s, until %s", renewed.serial, renewed.not_after)
        return True

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Make what a handshake needs, now."""
        with self._lock:
            self.renew_if_due()
            return self._configuration(self.current())

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Make what a handshake needs if it is not what the last one had; the fetcher that gRPC calls.

        It must not raise: on an error the last good certificate stays in use, and the log says why.
        """
        with self._lock:
            try:
                self.renew_if_due()
                now = self.current()
                return None if identity_of(now.cert_pem).serial == self._served else self._configuration(now)
            except (FederationError, OSError) as error:
                self._complain(f"the service's certificate cannot be read or renewed, the last one stays: {error}")
                return None

    def _configuration(self, now: Credentials) -> grpc.ServerCertificateConfiguration:
        self._served = identity_of(now.cert_pem).serial
        return grpc.ssl_server_certificate_configuration([(now.key_pem, now.cert_pem)], root_certificates=now.ca_pem)

    def _complain(self, text: str) -> None:
        if text != self._complained:  # once, not at every handshake
            self._complained = text
            log.error("%s", text)


def server_credentials(home: Path, clock: Clock = utc_now) -> grpc.ServerCredentials:
    """Build the service's credentials: mutual TLS against the consortium's CA, with rotation while it runs.

    Guarantees: a client without a certificate of this CA is refused; a renewed certificate counts from the next
    handshake on and breaks no connection.
    """
    certificate = ServerCertificate(home, clock)
    return grpc.dynamic_ssl_server_credentials(
        certificate.configuration(),
        certificate.changed,  # type: ignore[arg-type]  # None means "as before" (grpc's documentation); the stub omits it
        require_client_authentication=True,
    )
