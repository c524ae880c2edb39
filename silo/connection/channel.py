"""The connection to the coordinator: one channel, its three services, and its replacement during transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.channel_options import CLIENT_OPTIONS
from service_core.pki.identity import Address
from service_core.storage.private_files import Credentials
from service_core.tls.causes import Diagnosis
from service_core.tls.connect import diagnose

Connect = Callable[[Address], grpc.Channel]


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """Build mutual TLS: this key and certificate, and exactly that CA; no other authority counts."""
    return grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.cert_pem)


def connect_with(credentials: Callable[[], Credentials]) -> Connect:
    return lambda address: grpc.secure_channel(str(address), channel_credentials(credentials()), options=CLIENT_OPTIONS)


@dataclass(frozen=True, slots=True)
class Connection:
    """An open channel and what can be called over it."""

    address: Address
    channel: grpc.Channel = field(repr=False)
    control: rpc.ControlStub = field(repr=False)
    transfer: rpc.TransferStub = field(repr=False)
    enrolment: rpc.EnrolmentStub = field(repr=False)

    @classmethod
    def over(cls, address: Address, channel: grpc.Channel) -> Connection:
        stubs = rpc.ControlStub(channel), rpc.TransferStub(channel), rpc.EnrolmentStub(channel)
        return cls(address, channel, *stubs)


class ConnectionManager:
    """The current connection, and replaced ones still in use; closing a connection cancels the calls over it."""

    def __init__(self, addresses: Sequence[Address], connect: Connect) -> None:
        self._addresses = tuple(addresses)
        self._connect = connect
        self._lock = threading.Lock()
        self._address_index = 0
        self._current: Connection | None = None
        self._retired: list[Connection] = []

    def current(self) -> Connection:
        with self._lock:
            if self._current is None:
                address = self._addresses[self._address_index % len(self._addresses)]
                self._current = Connection.over(address, self._connect(address))
            return self._current

    def replace(self, next_address: bool = False) -> None:
        with self._lock:
            if self._current is not None:
                self._retired.append(self._current)
            self._current = None
            self._address_index += int(next_address)

    def close_replaced(self, used: Connection | None = None) -> None:
        """Close every replaced connection but the one in use, which may have been replaced just now."""
        with self._lock:
            old = [connection for connection in self._retired if connection is not used]
            self._retired = [connection for connection in self._retired if connection is used]
        for connection in old:
            connection.channel.close()

    def close(self) -> None:
        self.replace()
        self.close_replaced()


def diagnose_channel(address: Address, credentials: Credentials, server_name: str | None = None) -> Diagnosis:
    """Find out why a channel with these credentials does not come up; blocks for seconds at most."""
    key, cert, ca = credentials
    return diagnose(address.host, address.port, ca, cert, key, server_name)


def diagnose_with(credentials: Callable[[], Credentials]) -> Callable[[Address], Diagnosis]:
    return lambda address: diagnose_channel(address, credentials())
