"""Loopback addresses, on which pages and metrics are served. Imports no web server."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from fl_core.errors import ConfigError, StateError

BACKLOG = 64
"""Connections that wait to be accepted."""


@dataclass(frozen=True, slots=True)
class LoopbackAddress:
    """A host of this machine's loopback, and a port; 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> LoopbackAddress:
        """Read --metrics: `PORT`, `HOST:PORT` or `[V6]:PORT`; raises ConfigError (E-CFG-02), also beyond loopback."""
        match = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+)):)?([0-9]{1,5})", text)
        if match is None or int(match[3]) > 65535:
            raise ConfigError(
                "E-CFG-02",
                f"--metrics: expected a port or an address such as 127.0.0.1:9464, found {text[:80]!r}: correct it",
            )
        host = match[1] or match[2] or "127.0.0.1"
        if not is_loopback(host):
            raise ConfigError(
                "E-CFG-02",
                f"--metrics: expected an address of this machine's loopback, found {host[:80]!r}: metrics need no "
                "certificate, so everybody who reaches the port can read them. Use 127.0.0.1, with a proxy that "
                "authenticates or a monitoring agent in front",
            )
        return cls("127.0.0.1" if host.lower() == "localhost" else host, int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def listen(self, what: str, option: str) -> socket.socket:
        """Listen; raises StateError (E-NET-20) when this address cannot be used.

        what, option: what is served and the option that sets the address, for the error
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise StateError(
                "E-NET-20",
                f"cannot serve {what} on {self} ({error.strerror}): choose another address or port with {option}, "
                "or stop the other program",
            ) from error


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or "localhost"; no name is resolved."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
