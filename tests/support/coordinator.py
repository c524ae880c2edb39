"""The coordinator in this process over real gRPC and mutual TLS, with sessions and transfers by hand."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
import torch

from coordinator.api.server import CoordinatorServer, Settings
from coordinator.lead.client import credentials_of
from coordinator.pki.authority import Authority
from coordinator.pki.membership import Membership
from coordinator.runs.dispatcher import SiloSession
from coordinator.runs.workers import in_this_process
from coordinator.storage.records import RunState, StoredRun
from coordinator.storage.store import CoordinatorStore
from fl_core.rounds.manifest import RunManifest
from fl_core.types.metric_parts import METRICS
from fl_core.types.values import Part, State
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import codec
from protos.wire.chunks import append_chunk, read_chunks
from protos.wire.tasks import FROM_WIRE, contribution_id
from service_core.pki import certificates
from service_core.pki.identity import CertificateRole, Identity, PeerCertificate, identity_of
from service_core.pki.invitation import InvitationToken
from service_core.storage import digests
from service_core.storage.private_files import Credentials
from service_core.version import PROTOCOL
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home
from tests.support import until
from tests.support.federations import manifest

CONSORTIUM = "test"
FAST = Settings(pulse_s=0.5, recycle_s=300, start_worker=in_this_process)


def credentials(home: Path, name: str) -> Credentials:
    """Enrol a silo as the service does, without a connection."""
    store = CoordinatorStore(home)
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
    """A consortium's home, who is enrolled, and the service while it runs.

    homes: of the hospitals, as they are after they have joined; to be copied.
    """

    home: Path
    settings: Settings = FAST
    people: dict[str, Credentials] = field(default_factory=dict)
    homes: dict[str, Path] = field(default_factory=dict)
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

    def start(self, port: int = 0) -> CoordinatorServer:
        self.server = CoordinatorServer(self.home, f"127.0.0.1:{port}", self.compose, self.settings)
        self.port = self.server.start()
        return self.server

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(0.5)
            self.server = None

    def submit(self, manifest: RunManifest, request_id: str = "request") -> StoredRun:
        assert self.server is not None
        return self.server.runs.submit(manifest, "{}", request_id)

    def run(self, run_id: str) -> StoredRun:
        assert self.server is not None
        return self.server.store.runs.get(run_id)

    def ended(self, run_id: str, seconds: float = 30.0) -> StoredRun:
        """Wait until a run has ended and its thread has cleaned up."""

        def over() -> bool:
            assert self.server is not None
            return run_id not in self.server.runs._active and self.run(run_id).state.ended

        until(over, f"the end of {run_id}", seconds)
        return self.run(run_id)

    def finished(self, run_id: str, seconds: float = 30.0) -> StoredRun:
        run = self.ended(run_id, seconds)
        assert run.state is RunState.FINISHED, run.reason
        return run

    def model(self, run_id: str) -> State:
        """Read the newest server state."""
        assert self.server is not None
        found = self.run(run_id).state_object
        assert found is not None
        return codec.read_state(self.server.objects.path(found))

    def transfer(self, name: str) -> rpc.TransferStub:
        return rpc.TransferStub(channel(self.port, self.people[name]))

    def lead(self, name: str | None = None) -> rpc.LeadStub:
        """Call as the lead of the world, or as another one whose certificate is in its home."""
        return rpc.LeadStub(channel(self.port, credentials_of(self.home, name) if name else self.people["lead"]))


_KEPT = TemporaryDirectory(prefix="consilium-tests-")


@cache
def _enrolled(names: tuple[str, ...]) -> World:
    folder = Path(_KEPT.name) / "-".join(map(str, (len(names), *names)))
    world = World.create(folder / "coordinator", ())
    for name in names:
        world.homes[name] = enrolled(world, name, folder / name).path
        world.people[name] = SiloIdentity(world.homes[name]).current_credentials()
    return world


def copied(home: Path, names: Sequence[str], settings: Settings = FAST) -> World:
    """A consortium with enrolled silos: equal names have one authority and equal keys.

    Whoever needs two consortia makes the other with `World.create`.
    """
    made = _enrolled(tuple(names))
    return World(Path(shutil.copytree(made.home, home)), settings, dict(made.people), made.homes)


@contextmanager
def running(home: Path, names: Sequence[str], settings: Settings = FAST) -> Iterator[World]:
    """A copy of a consortium whose service is started."""
    world = copied(home, names, settings)
    world.start()
    try:
        yield world
    finally:
        world.stop()


class Clock:
    """The clock by which open rounds wait: that of the machine, until a test skips some time."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        self._ahead += seconds


DENIED = grpc.StatusCode.PERMISSION_DENIED


def session(name: str = "north") -> SiloSession:
    """A silo's session without a connection."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return SiloSession(
        PeerCertificate(Identity(CertificateRole.SILO, "test", name), "1", "f", start, start + timedelta(days=90))
    )


def ready(asked: pb.Preflight) -> pb.SiloMessage:
    about = {"run_id": asked.run_id, "manifest_digest": asked.manifest_digest}
    return pb.SiloMessage(preflight=pb.PreflightAnswer(**about, ready=True))


class Line:
    """A session by hand, which is ready for every run."""

    def __init__(self, world: World, name: str, hello: pb.Hello | None = None, own=None, silent: bool = False) -> None:
        self._out: queue.Queue[pb.SiloMessage | None] = queue.Queue()
        self.got: list[pb.CoordinatorMessage] = []
        self.error: grpc.RpcError | None = None
        self.over = threading.Event()
        self._silent = silent
        self._channel = channel(world.port, own or world.people[name])
        if hello is not None:
            self.say(hello=hello)
        self._call = rpc.ControlStub(self._channel).Session(iter(self._out.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, **body: object) -> None:
        self._out.put(pb.SiloMessage(**body))

    def _read(self) -> None:
        try:
            for message in self._call:
                if message.HasField("preflight"):
                    self._out.put(ready(message.preflight))
                    continue
                self.got.append(message)
                if message.HasField("pulse") and not self._silent:
                    self.say(pulse=pb.Pulse(activity=pb.TRAINING, done=len(self.got)))
        except grpc.RpcError as error:
            self.error = error
        self.over.set()

    def kinds(self) -> list[str]:
        return [str(m.WhichOneof("body")) for m in self.got]

    def of(self, kind: str) -> list[pb.CoordinatorMessage]:
        return [m for m in self.got if m.WhichOneof("body") == kind]

    def close(self) -> None:
        self._out.put(None)
        self._call.cancel()
        self._channel.close()
        assert self.over.wait(60)

    def failure(self) -> tuple[grpc.StatusCode, str]:
        assert self.over.wait(60)
        assert self.error is not None
        return self.error.code(), self.error.details().split(":")[0]


HELLO = pb.Hello(
    protocol_min=PROTOCOL,
    protocol_max=PROTOCOL,
    software="by hand 1.0",
    data=pb.DataOffer(name="digits", shape=[1, 8, 8]),
)


def instance(id: str, previous: str = "") -> pb.Hello:
    return pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, instance=id, previous_instance=previous)


def online(world: World, name: str) -> Callable[[], bool]:
    return lambda: world.server.dispatcher.activity_of(name) is not None


def enrolled(
    world: World,
    name: str,
    folder: Path,
    validation_only: bool = False,
    clock: certificates.Clock = certificates.utc_now,
) -> Home:
    """Enrol a hospital without a connection, its home ready to serve. clock: by which its certificate is made."""
    home = Home(folder).make()
    identity = SiloIdentity(home.path, clock)
    store = CoordinatorStore(world.home, lambda: clock().timestamp())
    try:
        membership = Membership(world.home, store, clock)
        token = InvitationToken.decode(membership.invite(name, validation_only=validation_only).token, clock())
        material = identity.join_material(token)
        made = membership.join(identity_of(token.cert_pem), material.csr_pem)
    finally:
        store.close()
    home.join_for(made.validation_only)
    identity.install(made.certificate_pem, made.authority_pem)
    home.write_addresses(material.addresses)
    return home


def when_due() -> datetime:
    """Tell the time when a certificate was made that is to be renewed now."""
    return certificates.utc_now() - timedelta(days=61)


def events(world: World, run_id: str, kind: str) -> list[tuple[str, str]]:
    """List (silo, text) of a run's events of one kind."""
    assert world.server is not None
    return [(e.silo, e.text) for e in world.server.store.runs.events(run_id, 0) if e.kind == kind]


def heard(world: World, run_id: str, kind: str, times: int = 1) -> list[tuple[str, str]]:
    """Wait for so many events of a kind."""
    until(lambda: len(events(world, run_id, kind)) >= times, f"{times} events {kind!r}", 60)
    return events(world, run_id, kind)


def fetch(stub: rpc.TransferStub, digest: str, folder: Path, offset: int = 0) -> Path:
    """Read an object into a file."""
    file, have = folder / digest, 0
    with file.open("wb") as f:
        for chunk in stub.Get(pb.GetRequest(digest=digest, offset=offset)):
            have = append_chunk(chunk, f, have)
    assert digests.file_digest(file) == digest
    return file


def open_request(silo: str, offer: pb.Offer, data: bytes) -> pb.OpenRequest:
    """Announce some bytes as the update that an offer asked for."""
    return pb.OpenRequest(
        contribution_id=contribution_id(offer.run_id, offer.round, FROM_WIRE[offer.kind], silo, offer.base_digest),
        run_id=offer.run_id,
        round=offer.round,
        kind=offer.kind,
        manifest_digest=offer.manifest_digest,
        base_digest=offer.base_digest,
        object_digest=digests.digest(data),
        size=len(data),
    )


def chunks(data: bytes, name: str, offset: int, folder: Path) -> Iterator[pb.Chunk]:
    """Cut bytes into chunks."""
    file = folder / f"{name}.out"
    file.write_bytes(data)
    return (pb.Chunk.FromString(chunk.message) for chunk in read_chunks(file, name, offset))


def send(
    stub: rpc.TransferStub, silo: str, offer: pb.Offer, data: bytes, stated: pb.Attestation | None = None
) -> pb.Receipt:
    """Open, put the rest, commit."""
    request = open_request(silo, offer, data)
    if stated is not None:
        request.attestation.CopyFrom(stated)
    reply = stub.Open(request, timeout=20)
    if reply.HasField("receipt"):
        return reply.receipt
    with TemporaryDirectory() as folder:
        if reply.have < len(data):
            stub.Put(chunks(data, request.contribution_id, reply.have, Path(folder)), timeout=60)
    return stub.Commit(pb.CommitRequest(contribution_id=request.contribution_id), timeout=20)


def update_bytes(
    change: float = 0.0, run: RunManifest | None = None, weight: float = 1.0, dtype: torch.dtype = torch.float32
) -> bytes:
    """Write an update that a run takes, by default: every value is `change`, the weight 1, without test examples."""
    layout = (run or manifest()).layout
    bundle = {}
    for name, spec in layout.items():
        counted = name == METRICS
        total = {key: torch.full(shape, 0.0 if counted else change).to(dtype) for key, shape in spec.shapes.items()}
        bundle[name] = Part(total, torch.full(spec.weight_shape, 0.0 if counted else weight))
    return codec.pack_bundle(bundle)


DATA = update_bytes(0.5)
OTHER = update_bytes(0.25)
STEP = 16 * 1024
INVALID, LATE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
AWAY = grpc.StatusCode.UNAVAILABLE


def chunk(data: bytes, offset: int, name: str = "") -> pb.Chunk:
    return pb.Chunk(object=name, offset=offset, data=data)


def cut(data: bytes, name: str, start: int = 0, end: int | None = None, step: int = STEP) -> Iterator[pb.Chunk]:
    for offset in range(start, len(data) if end is None else end, step):
        yield chunk(data[offset : offset + step], offset, name if offset == start else "")


def open_round(world: World, rounds: int = 1, request_id: str = "request") -> tuple[StoredRun, pb.Offer]:
    """Submit a run and wait for its first round; no silo is there to answer."""
    run = world.submit(manifest(rounds=rounds), request_id)

    def ready() -> object:
        row = world.server.store.runs.round(run.id, 0)
        return row if row is not None and row.base_digest else None

    row = until(ready, "the first round")
    return run, pb.Offer(
        run_id=run.id, round=0, kind=pb.TRAIN, manifest_digest=run.manifest_digest, base_digest=row.base_digest
    )


def code(error: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[grpc.StatusCode, str]:
    return error.value.code(), error.value.details().split(":")[0]


def commit(stub, request: pb.OpenRequest) -> pb.Receipt:
    return stub.Commit(pb.CommitRequest(contribution_id=request.contribution_id))
