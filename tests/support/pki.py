"""A consortium in a folder, a clock that tests turn, a silo that has joined, and calls with its credentials."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from coordinator.pki.authority import Authority
from service_core.pki.invitation import InvitationToken
from service_core.pki.roster import Member, SignedRoster
from silo.connection.channel import channel_credentials
from silo.identity.identity import SiloIdentity


@dataclass
class Clock:
    """The time that a test decides."""

    now: datetime

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **span: float) -> None:
        self.now += timedelta(**span)


def today() -> Clock:
    return Clock(datetime.now(UTC).replace(microsecond=0))


def authority(home: Path, clock: Clock, consortium: str = "demo", **lifetimes) -> Authority:
    from coordinator.pki.authority import Lifetimes

    return Authority.create(home, consortium, ["fl.example.org:8443", "10.1.2.3:8443"], Lifetimes(**lifetimes), clock)


def member(ca: Authority, cert: bytes, links=()) -> Member:
    return Member.of(cert, ca.clock().isoformat(), tuple(links))


def join(ca: Authority, home: Path, name: str, others: tuple[Member, ...] = (), version: int = 1) -> SiloIdentity:
    """Go through the enrolment of `name`, without a network."""
    silo = SiloIdentity(home, ca.clock)
    token = InvitationToken.decode(ca.invite(name).token, ca.clock())
    material = silo.join_material(token)
    cert = ca.sign_silo(material.csr_pem, name)
    silo.install(cert, token.ca_pem, roster(ca, [member(ca, cert), *others], version))
    return silo


def roster(ca: Authority, members, version: int, revoked=()) -> SignedRoster:
    return ca.roster(list(members), list(revoked), version)


def certified(ca: Authority, name: str) -> bytes:
    """Make a silo's certificate whose key nobody keeps."""
    from service_core.pki import certificates

    return ca.sign_silo(certificates.make_request(certificates.new_key()), name)


HOST = "127.0.0.1"


def call(port, credentials, method="/x/silo", name=None):
    named = [] if name is None else [("grpc.ssl_target_name_override", name)]
    options = [*named, ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"{HOST}:{port}", channel_credentials(credentials), options=options) as channel:
        return channel.unary_unary(method)(b"", timeout=10)


def refused_call(port, credentials, method="/x/silo", name=None) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(port, credentials, method, name)
    return caught.value
