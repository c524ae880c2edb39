"""The service's TLS credentials, renewed while it runs: gRPC asks for them at each new connection."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from coordinator.pki.authority import FOLDER, Authority
from fl_core.errors import FederationError
from service_core.pki import certificates
from service_core.pki.certificates import Clock, utc_now
from service_core.pki.identity import identity_of
from service_core.storage.private_files import Credentials

log = logging.getLogger(__name__)
_RENEW_AFTER = 2 / 3
_LOOK_S = 1.0


@dataclass(slots=True)
class ServerCertificate:
    """The service's certificate on disk; renewed when due, if the CA's key is on this machine."""

    home: Path
    clock: Clock = utc_now
    _in_use: str = ""
    _last_error: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> Credentials:
        """Read key, certificate and CA; raises StateError (E-STATE-42, E-STATE-43) if they cannot be used."""
        folder = self.home / FOLDER
        return certificates.read_bundle(folder / "server.pem", (folder / "ca.crt").read_bytes())

    def renew_if_due(self) -> bool:
        """Renew the certificate after two thirds of its life, or if it is not valid yet; return whether it was renewed.

        A certificate is not valid yet if a clock was ahead when it was made.
        """
        certificate, now = identity_of(self.current().cert_pem), self.clock()
        if (
            certificate.not_before
            <= now
            < certificate.not_before + _RENEW_AFTER * (certificate.not_after - certificate.not_before)
        ):
            return False
        if not (self.home / FOLDER / "ca.key").exists():
            self._log_once(
                f"E-TLS-06: the service's certificate is valid from {certificate.not_before:%Y-%m-%d %H:%M} to "
                f"{certificate.not_after:%Y-%m-%d %H:%M} UTC and the authority's key is elsewhere: `coordinator ca "
                "service` there issues a new one; put it in place"
            )
            return False
        renewed = identity_of(Authority.open(self.home, self.clock).issue_server().cert_pem)
        log.info("renewed the service's certificate: serial %s, until %s", renewed.serial, renewed.not_after)
        return True

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        with self._lock:
            self.renew_if_due()
            return self._configuration(self.current())

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new credentials for a handshake, or None for the present ones. Never raises: errors are logged."""
        with self._lock:
            try:
                self.renew_if_due()
                now = self.current()
                return None if identity_of(now.cert_pem).serial == self._in_use else self._configuration(now)
            except (FederationError, OSError) as error:
                self._log_once(f"cannot read or renew the service's certificate; keeping the last one: {error}")
                return None

    def _configuration(self, now: Credentials) -> grpc.ServerCertificateConfiguration:
        self._in_use = identity_of(now.cert_pem).serial
        return grpc.ssl_server_certificate_configuration([(now.key_pem, now.cert_pem)], root_certificates=now.ca_pem)

    def _log_once(self, text: str) -> None:
        if text != self._last_error:  # log once, not at every handshake
            self._last_error = text
            log.error("%s", text)


class Looks:
    """Checks once a second whether the certificate changed, and answers None in between.

    gRPC waits for the answer before it reads a connection's first byte. Reading files and parsing certificates for
    every connection, also of strangers, would delay members.
    """

    def __init__(
        self,
        changed: Callable[[], grpc.ServerCertificateConfiguration | None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed, self._monotonic = changed, monotonic
        self._next = monotonic()
        self._looking = threading.Lock()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        if self._monotonic() < self._next or not self._looking.acquire(blocking=False):
            return None
        try:
            return self._changed()
        finally:
            self._next = self._monotonic() + _LOOK_S
            self._looking.release()


def server_credentials(home: Path) -> grpc.ServerCredentials:
    """Return credentials for mutual TLS under the consortium's CA.

    Guarantees: a client without a certificate of this CA is refused; a renewed certificate is used within a second and
    interrupts no connection.
    """
    certificate = ServerCertificate(home)
    return grpc.dynamic_ssl_server_credentials(
        certificate.configuration(),
        Looks(certificate.changed),  # type: ignore[arg-type]  # None means "as before"; grpc's stub omits it
        require_client_authentication=True,
    )
