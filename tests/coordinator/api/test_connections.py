"""Connections without a certificate: they end by themselves, and take no member's place."""

from __future__ import annotations

import resource
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.api import server
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.channel_options import SERVER_OPTIONS, server_options
from tests.support import until
from tests.support.coordinator import FAST, HELLO, Line, online, running
from tests.support.federations import NAMES

STRANGERS, FEW = 1100, 1024


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Begin as a process does by default on many systems; gives the most that it may raise this to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * STRANGERS + FEW  # both ends of each connection are in this process
    if hard < needed:
        pytest.skip(f"{needed} descriptors are needed, and this system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.fault("a stranger", "holds 1,100 idle connections", "members and leads are answered as before")
def test_idle_connections_keep_nobody_out(tmp_path: Path, few_descriptors: int) -> None:
    with running(tmp_path / "home", NAMES, FAST) as world, ExitStack() as stack:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_descriptors
        for _ in range(STRANGERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", world.port), 10))
        assert len(world.lead().Silos(pb.SilosRequest(), timeout=10).silos) == len(NAMES)
        line = Line(world, "north", HELLO)
        stack.callback(line.close)
        until(online(world, "north"), "north")


@pytest.mark.fault(
    "a stranger",
    "holds more connections than the service's limit on open files",
    "the service keeps enough descriptors for its own files",
)
def test_connections_leave_descriptors_for_the_services_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, 400))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with running(tmp_path / "home", NAMES, FAST) as world, ExitStack() as stack:
        lead = world.lead()
        assert len(lead.Silos(pb.SilosRequest(), timeout=10).silos) == len(NAMES)
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", world.port), 10)) for _ in range(400)]
        poll = select.poll()
        for connection in held:
            poll.register(connection, select.POLLIN)  # also where the service has closed it
        until(lambda: len(poll.poll(0)) >= 200, "those beyond half of the descriptors to be closed")
        assert len(poll.poll(0)) <= 250
        assert len(lead.Silos(pb.SilosRequest(), timeout=10).silos) == len(NAMES)


@pytest.mark.fault("a stranger", "connects and never starts TLS", "disconnected after 10 s")
def test_a_handshake_that_never_comes_ends_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "grpc.server_handshake_timeout_ms"
    assert dict(SERVER_OPTIONS)[name] == 10_000
    shorter = (*((k, v) for k, v in server_options(1 << 20) if k != name), (name, 200))
    monkeypatch.setattr(server, "server_options", lambda window: shorter)
    with (
        running(tmp_path / "home", (), FAST) as world,
        socket.create_connection(("127.0.0.1", world.port), 10) as raw,
    ):
        assert raw.recv(1) == b""
