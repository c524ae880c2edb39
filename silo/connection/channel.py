"""The connection to the coordinator: one channel, its three services, and its replacement during transfers.

A connection uses one certificate for its whole life. After a renewal, the next session opens a new connection, and all
other calls use it as soon as the session is open: the coordinator rejects the old certificate half a minute after it
first saw the new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message

from fl_core.errors import FederationError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.channel_options import CLIENT_OPTIONS
from protos.wire.chunks import Chunk, encode
from service_core.pki.identity import Address
from service_core.storage.private_files import Credentials
from service_core.tls.causes import Diagnosis
from service_core.tls.connect import diagnose

Connect = Callable[[Address], grpc.Channel]
_ENDED = frozenset({"E-ID-12", "E-ID-13", "E-ID-28"})
"""Error codes of a refused certificate. They are expected if this home has replaced that certificate."""


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """Build mutual TLS with this key and certificate; only the given CA is trusted."""
    return grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.cert_pem)


def connect_with(credentials: Callable[[], Credentials]) -> Connect:
    return lambda address: grpc.secure_channel(str(address), channel_credentials(credentials()), options=CLIENT_OPTIONS)


@dataclass(frozen=True, slots=True)
class Connection:
    """An open channel and its services. outdated: tells whether the home's certificate was replaced since.

    put, get: calls of the Transfer service that send or receive `Chunk` messages.
    """

    address: Address
    channel: grpc.Channel = field(repr=False)
    control: rpc.ControlStub = field(repr=False)
    transfer: rpc.TransferStub = field(repr=False)
    enrolment: rpc.EnrolmentStub = field(repr=False)
    put: grpc.StreamUnaryMultiCallable[Chunk, pb.PutReply] = field(repr=False)
    get: grpc.UnaryStreamMultiCallable[Message, Chunk] = field(repr=False)
    outdated: Callable[[], bool] = field(repr=False, default=lambda: False)

    @classmethod
    def over(cls, address: Address, channel: grpc.Channel, outdated: Callable[[], bool] = lambda: False) -> Connection:
        stubs = rpc.ControlStub(channel), rpc.TransferStub(channel), rpc.EnrolmentStub(channel)
        put = channel.stream_unary("/consilium.v1.Transfer/Put", encode, pb.PutReply.FromString)
        get = channel.unary_stream("/consilium.v1.Transfer/Get", pb.GetRequest.SerializeToString, Chunk.decode)
        return cls(address, channel, *stubs, put, get, outdated)

    def explained(self, error: FederationError) -> FederationError:
        """Return UnavailableError if the refused certificate was replaced by this home; other errors unchanged.

        If the certificate is still in force, the refusal is final: another party may be using this identity.
        """
        if error.code in _ENDED and self.outdated():
            return UnavailableError(error.code, "this hospital has a newer certificate: connecting again with that one")
        return error


class ConnectionManager:
    """The current connection, and replaced ones that are still open; closing a connection cancels its calls."""

    def __init__(
        self, addresses: Sequence[Address], connect: Connect, certificate: Callable[[], str] = lambda: ""
    ) -> None:
        """Connect at the first call. certificate: returns an id of the home's certificate, which `connect` uses."""
        self._addresses = tuple(addresses)
        self._connect = connect
        self._certificate = certificate
        self._lock = threading.Lock()
        self._address_index = 0
        self._current: Connection | None = None
        self._retired: list[Connection] = []

    def current(self) -> Connection:
        with self._lock:
            if self._current is None:
                self._current = self._made()
            return self._current

    def for_session(self) -> Connection:
        """Return the connection for the next session: a new one if the certificate was renewed."""
        current = self.current()
        return self._made() if current.outdated() else current

    def use(self, connection: Connection) -> None:
        """Make a connection with an open session the current one, and close all others."""
        with self._lock:
            if self._current is not None and self._current is not connection:
                self._retired.append(self._current)
            self._current = connection
        self.close_replaced(used=connection)

    def _made(self) -> Connection:
        address, made_with = self._addresses[self._address_index % len(self._addresses)], self._certificate()
        # Read before the channel reads it: if it is renewed in between, the connection is outdated and made again.
        return Connection.over(address, self._connect(address), lambda: self._certificate() != made_with)

    def replace(self, next_address: bool = False) -> None:
        with self._lock:
            if self._current is not None:
                self._retired.append(self._current)
            self._current = None
            self._address_index += int(next_address)

    def close_replaced(self, used: Connection | None = None) -> None:
        """Close every replaced connection except `used`."""
        with self._lock:
            old = [connection for connection in self._retired if connection is not used]
            self._retired = [connection for connection in self._retired if connection is used]
        for connection in old:
            connection.channel.close()

    def close(self) -> None:
        self.replace()
        self.close_replaced()


def diagnose_channel(address: Address, credentials: Credentials, server_name: str | None = None) -> Diagnosis:
    """Find out why a channel with these credentials cannot connect; blocks for a few seconds at most."""
    key, cert, ca = credentials
    return diagnose(address.host, address.port, ca, cert, key, server_name)


def diagnose_with(credentials: Callable[[], Credentials]) -> Callable[[Address], Diagnosis]:
    return lambda address: diagnose_channel(address, credentials())
