"""The connection to the coordinator: one channel, its three services, and its replacement during transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.pki.identity import Address
from protos.storage.private_files import Credentials
from protos.tls.diagnosis import Diagnosis
from protos.wire.channel_options import CLIENT_OPTIONS
from silo.identity.credentials import channel_credentials, diagnose_channel

Connect = Callable[[Address], grpc.Channel]


def connect_with(credentials: Callable[[], Credentials]) -> Connect:
    """Make the function that opens a channel with the credentials of the moment."""
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
        """Make the stubs."""
        stubs = rpc.ControlStub(channel), rpc.TransferStub(channel), rpc.EnrolmentStub(channel)
        return cls(address, channel, *stubs)


class ConnectionManager:
    """The connection that is current, and the ones before it that are still in use.

    Closing a connection cancels the calls over it; transfers go on over the current one.
    """

    def __init__(self, addresses: Sequence[Address], connect: Connect) -> None:
        self._addresses = tuple(addresses)
        self._connect = connect
        self._lock = threading.Lock()
        self._address_index = 0
        self._current: Connection | None = None
        self._retired: list[Connection] = []

    def current(self) -> Connection:
        """Return the current connection; opens one when there is none."""
        with self._lock:
            if self._current is None:
                address = self._addresses[self._address_index % len(self._addresses)]
                self._current = Connection.over(address, self._connect(address))
            return self._current

    def replace(self, next_address: bool = False) -> None:
        """Make the next connection with fresh credentials, with `next_address` at the next known address."""
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
        """Close all connections."""
        self.replace()
        self.close_replaced()


def diagnose_with(credentials: Callable[[], Credentials]) -> Callable[[Address], Diagnosis]:
    """Make the function that says why an address cannot be reached."""
    return lambda address: diagnose_channel(address, credentials())
