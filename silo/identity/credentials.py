"""The silo's TLS credentials, read fresh for each channel: a renewed certificate counts from the next channel on."""

from __future__ import annotations

import grpc

from protos.pki.identity import Address
from protos.storage.private_files import Credentials
from protos.tls.connect import diagnose
from protos.tls.diagnosis import Diagnosis
from silo.identity.identity import SiloIdentity


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """Build mutual TLS: this key and certificate, and exactly that CA; no other authority counts."""
    return grpc.ssl_channel_credentials(
        root_certificates=credentials.ca_pem,
        private_key=credentials.key_pem,
        certificate_chain=credentials.cert_pem,
    )


def silo_credentials(identity: SiloIdentity) -> grpc.ChannelCredentials:
    """Build the credentials of the certificate in force; raises as `SiloIdentity.current_credentials`."""
    return channel_credentials(identity.current_credentials())


def name_options(server_name: str | None) -> list[tuple[str, str]]:
    """Give the channel options for a coordinator that is dialled by another name than its certificate's."""
    return [] if server_name is None else [("grpc.ssl_target_name_override", server_name)]


def diagnose_channel(address: Address, credentials: Credentials, server_name: str | None = None) -> Diagnosis:
    """Find out why a channel with these credentials does not come up; blocks for seconds at most."""
    key, cert, ca = credentials
    return diagnose(address.host, address.port, ca, cert, key, server_name)
