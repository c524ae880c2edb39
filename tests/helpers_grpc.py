"""A coordinator in this process, over real gRPC and mutual TLS on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from protos.tls.connect import require_tls13

require_tls13()

import grpc  # noqa: E402

from coordinator.api.server import CoordinatorServer, Settings  # noqa: E402
from coordinator.pki.authority import Authority  # noqa: E402
from coordinator.pki.membership import Membership  # noqa: E402
from coordinator.storage.records import Run, RunState  # noqa: E402
from coordinator.storage.store import Store  # noqa: E402
from fl_core.rounds.manifest import RunManifest  # noqa: E402
from fl_core.types.values import State  # noqa: E402
from protos.consilium.v1 import federation_pb2 as pb  # noqa: E402
from protos.consilium.v1 import federation_pb2_grpc as rpc  # noqa: E402
from protos.pki import certificates  # noqa: E402
from protos.pki.identity import identity_of  # noqa: E402
from protos.pki.invitation import InvitationToken  # noqa: E402
from protos.storage.private_files import Credentials  # noqa: E402
from protos.wire import codec  # noqa: E402

CONSORTIUM = "test"
FAST = Settings(pulse_s=0.2, recycle_s=300)


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> object:
    """Wait for a condition with a deadline, and return its value."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        pause.wait(0.01)
    return value


def credentials(home: Path, name: str) -> Credentials:
    """Enrol a silo as the service does, without a connection."""
    store = Store(home)
    try:
        membership = Membership(home, store)
        token = InvitationToken.decode(membership.invite(name).token)
        key = certificates.new_key()
        made = membership.join(identity_of(token.cert_pem), certificates.make_request(key))
        return Credentials(key, made.certificate_pem, made.authority_pem)
    finally:
        store.close()


def channel(port: int, own: Credentials | None) -> grpc.Channel:
    """Connect as somebody."""
    assert own is not None
    secure = grpc.ssl_channel_credentials(own.ca_pem, own.key_pem, own.cert_pem)
    # Each channel gets connections of its own: gRPC would share one between equal channels of a process.
    return grpc.secure_channel(f"127.0.0.1:{port}", secure, [("grpc.use_local_subchannel_pool", 1)])


@dataclass
class World:
    """A consortium's home, who is enrolled, and the service while it runs."""

    home: Path
    settings: Settings = FAST
    people: dict[str, Credentials] = field(default_factory=dict)
    server: CoordinatorServer | None = None
    port: int = 0
    manifests: dict[str, RunManifest] = field(default_factory=dict)

    @classmethod
    def create(cls, home: Path, names: Sequence[str], settings: Settings = FAST) -> World:
        authority = Authority.create(home, CONSORTIUM, ["127.0.0.1:8443"])
        world = cls(home, settings)
        world.people["lead"] = authority.issue_lead("lead")
        for name in names:
            world.people[name] = credentials(home, name)
        return world

    def compose(self, spec: str, roster: list[pb.SiloInfo]) -> RunManifest:
        """Stand in for the configuration: a spec names a manifest that the test has put here."""
        del roster
        return self.manifests[spec]

    def start(self) -> CoordinatorServer:
        self.server = CoordinatorServer(self.home, "127.0.0.1:0", self.compose, self.settings)
        self.port = self.server.start()
        return self.server

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(0.5)
            self.server = None

    def submit(self, manifest: RunManifest, request_id: str = "request") -> Run:
        assert self.server is not None
        return self.server.runs.submit(manifest, "{}", request_id)

    def run(self, run_id: str) -> Run:
        assert self.server is not None
        return self.server.store.runs.get(run_id)

    def ended(self, run_id: str, seconds: float = 30.0) -> Run:
        """Wait until a run has ended and its thread has cleaned up."""

        def over() -> bool:
            assert self.server is not None
            return run_id not in self.server.runs._active and self.run(run_id).state.ended

        until(over, f"the end of {run_id}", seconds)
        return self.run(run_id)

    def finished(self, run_id: str, seconds: float = 30.0) -> Run:
        run = self.ended(run_id, seconds)
        assert run.state is RunState.FINISHED, run.reason
        return run

    def model(self, run_id: str) -> State:
        """Read the newest server state."""
        assert self.server is not None
        found = self.run(run_id).state_object
        assert found is not None
        return codec.read_state(self.server.blobs.path(found))

    def transfer(self, name: str) -> rpc.TransferStub:
        return rpc.TransferStub(channel(self.port, self.people[name]))

    def lead(self) -> rpc.LeadStub:
        return rpc.LeadStub(channel(self.port, self.people["lead"]))


@contextmanager
def running(home: Path, names: Sequence[str], settings: Settings = FAST) -> Iterator[World]:
    """A started service with enrolled silos."""
    world = World.create(home, names, settings)
    world.start()
    try:
        yield world
    finally:
        world.stop()
