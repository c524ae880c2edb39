"""The connection to the coordinator: one channel, its three services, and its replacement while things go on."""

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
from silo.identity.credentials import channel_credentials, explain

Dial = Callable[[Address], grpc.Channel]


def dial_with(credentials: Callable[[], Credentials]) -> Dial:
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
    """The line that is current, and the ones before it that are still in use.

    Closing a line cancels the calls over it; transfers go on over the current one.
    """

    def __init__(self, addresses: Sequence[Address], dial: Dial) -> None:
        self._addresses = tuple(addresses)
        self._dial = dial
        self._lock = threading.Lock()
        self._turn = 0
        self._line: Connection | None = None
        self._retired: list[Connection] = []

    def current(self) -> Connection:
        """Return the line, opened when there is none."""
        with self._lock:
            if self._line is None:
                address = self._addresses[self._turn % len(self._addresses)]
                self._line = Connection.over(address, self._dial(address))
            return self._line

    def replace(self, elsewhere: bool = False) -> None:
        """Have the next line made with fresh credentials, `elsewhere` at the next known address; see `retire`."""
        with self._lock:
            if self._line is not None:
                self._retired.append(self._line)
            self._line = None
            self._turn += int(elsewhere)

    def close_replaced(self, used: Connection | None = None) -> None:
        """Close every line that was replaced, but not the one that is `used`: it may have been replaced just now."""
        with self._lock:
            old = [line for line in self._retired if line is not used]
            self._retired = [line for line in self._retired if line is used]
        for line in old:
            line.channel.close()

    def close(self) -> None:
        """Close all lines."""
        self.replace()
        self.close_replaced()


def explainer(credentials: Callable[[], Credentials]) -> Callable[[Address], Diagnosis]:
    """Make the function that says why an address cannot be reached."""
    return lambda address: explain(address, credentials())
