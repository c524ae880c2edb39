"""A coordinator in this process and silos that follow a script, over real gRPC and mutual TLS on loopback."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from protos.tls import require_tls13

require_tls13()

import grpc  # noqa: E402

from coordinator.membership import Membership  # noqa: E402
from coordinator.pki import Authority  # noqa: E402
from coordinator.records import Run, RunState  # noqa: E402
from coordinator.server import CoordinatorServer, Settings  # noqa: E402
from coordinator.store import Store  # noqa: E402
from fl_core.local import PlainData  # noqa: E402
from fl_core.manifest import RunManifest  # noqa: E402
from fl_core.simulate import SiloShare, bench_of  # noqa: E402
from fl_core.types import Bundle, Federation, State, TaskKind, Turn  # noqa: E402
from fl_core.worker import work  # noqa: E402
from protos import certificates, codec  # noqa: E402
from protos.chunks import append_chunk, read_chunks  # noqa: E402
from protos.consilium.v1 import federation_pb2 as pb  # noqa: E402
from protos.consilium.v1 import federation_pb2_grpc as rpc  # noqa: E402
from protos.identity import identity_of  # noqa: E402
from protos.invitation import InvitationToken  # noqa: E402
from protos.keyfiles import Credentials  # noqa: E402

CONSORTIUM = "test"
KINDS = {pb.TRAIN: TaskKind.TRAIN, pb.EVALUATE: TaskKind.EVALUATE}
WIRE = {kind: number for number, kind in KINDS.items()}
FAST = Settings(pulse_s=0.2, recycle_s=300)
Stub = TypeVar("Stub", rpc.ControlStub, rpc.TransferStub)
_ONE_MODEL_AT_A_TIME = threading.Lock()  # training seeds torch's global generator


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
            return self.run(run_id).state.ended and run_id not in self.server.runs._active

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


class Key(NamedTuple):
    run_id: str
    round: int
    kind: TaskKind


@dataclass
class Entry:
    """A finished update of a scripted silo."""

    offer: pb.Offer
    data: bytes
    staged: State
    receipt: pb.Receipt | None = None
    refused: str = ""


@dataclass
class Memory:
    """What a hospital's disk would hold; outlives the silo object."""

    states: dict[str, State] = field(default_factory=dict)
    outbox: dict[Key, Entry] = field(default_factory=dict)
    trained: list[Key] = field(default_factory=list)
    closed: dict[Key, bool] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)


Alter = Callable[[Key, Bundle], Bundle]


class ScriptedSilo:
    """A silo that follows docs/protocol.md with the least code: session, outbox, uploads, and a script for exceptions.

    alter: changes a bundle before it is packed. refuse: says why an offer is refused, or "".
    """

    def __init__(
        self, world: World, name: str, share: SiloShare, memory: Memory | None = None, *,
        alter: Alter | None = None, refuse: Callable[[pb.Offer], str] = lambda offer: "",
    ) -> None:  # fmt: skip
        self.world, self.name, self.share = world, name, share
        self.memory = memory or Memory()
        self._alter, self._refuse = alter, refuse
        self._stop = threading.Event()
        self._offers: queue.Queue[pb.Offer | None] = queue.Queue()
        self.received: list[pb.CoordinatorMessage] = []
        self.errors: list[Exception] = []
        self._lock = threading.Lock()
        self._channels: set[grpc.Channel] = set()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._sessions, self._work)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._offers.put(None)
        with self._lock:
            for ch in self._channels:
                ch.close()  # ends every call over it, also one that nobody will ever answer
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    @contextmanager
    def _connected(self, make: Callable[[grpc.Channel], Stub]) -> Iterator[Stub]:
        ch = channel(self.world.port, self.world.people[self.name])
        with self._lock:  # a stub that is made over a channel while another thread closes it ends the process
            self._channels.add(ch)
            stub = make(ch)
            if self._stop.is_set():
                ch.close()
        try:
            yield stub
        except ValueError as error:  # a call over a channel that `stop` has closed
            if not self._stop.is_set():
                raise
            self.errors.append(error)
        finally:
            with self._lock:
                self._channels.discard(ch)
            ch.close()

    # ---- control ----

    def _sessions(self) -> None:
        while not self._stop.is_set():
            with self._connected(rpc.ControlStub) as stub:
                try:
                    self._session(stub)
                except grpc.RpcError as error:
                    self.errors.append(error)
                    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                        return
            self._stop.wait(0.05)

    def _session(self, stub: rpc.ControlStub) -> None:
        out: queue.Queue[pb.SiloMessage | None] = queue.Queue()
        staged = [pb.RoundRef(run_id=k.run_id, round=k.round, kind=WIRE[k.kind]) for k in self.memory.outbox]
        out.put(pb.SiloMessage(hello=pb.Hello(protocol_min=1, protocol_max=1, software="scripted", staged=staged)))
        call = stub.Session(iter(out.get, None))
        try:
            for message in call:
                self.received.append(message)
                self._take(message, out)
                if self._stop.is_set():
                    return
        finally:
            out.put(None)
            call.cancel()

    def _take(self, message: pb.CoordinatorMessage, out: queue.Queue[pb.SiloMessage | None]) -> None:
        kind = message.WhichOneof("body")
        if kind == "pulse":
            out.put(pb.SiloMessage(pulse=pb.Pulse(activity=pb.IDLE)))
        elif kind == "offer":
            offer = message.offer
            why = self._refuse(offer)
            ref = {"run_id": offer.run_id, "round": offer.round, "kind": offer.kind}
            out.put(
                pb.SiloMessage(answer=pb.Answer(**ref, accepted=not why, code="E-RUN-14" if why else "", reason=why))
            )
            if not why:
                self._offers.put(offer)
        elif kind == "round_closed":
            closed = message.round_closed
            key = Key(closed.run_id, closed.round, KINDS[closed.kind])
            entry = self.memory.outbox.pop(key, None)
            self.memory.closed[key] = closed.included
            if entry is not None and closed.included and key.kind is TaskKind.TRAIN:
                self.memory.states[key.run_id] = entry.staged
        elif kind == "run_ended":
            self.memory.ended[message.run_ended.run_id] = message.run_ended.state

    # ---- data ----

    def _work(self) -> None:
        while (offer := self._offers.get()) is not None and not self._stop.is_set():
            try:
                self._task(offer)
            except grpc.RpcError as error:
                self.errors.append(error)

    def _task(self, offer: pb.Offer) -> None:
        key = Key(offer.run_id, offer.round, KINDS[offer.kind])
        if key in self.memory.closed:
            return
        with self._connected(rpc.TransferStub) as stub:
            if key not in self.memory.outbox:
                self.memory.outbox[key] = self._train(stub, key, offer)
            entry = self.memory.outbox.get(key)
            if entry is not None:
                entry.receipt = send(stub, self.name, entry.offer, entry.data)

    def _train(self, stub: rpc.TransferStub, key: Key, offer: pb.Offer) -> Entry:
        folder = self.world.home.parent / "silos" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        manifest = RunManifest.from_json(fetch(stub, offer.manifest_digest, folder).read_text())
        assert manifest.digest() == offer.manifest_digest
        msg = codec.read_state(fetch(stub, offer.base_digest, folder))
        me = manifest.index(self.name)
        fed = Federation(len(manifest.members), len(manifest.schema.classes), manifest.rounds, key.round, offer.cohort)
        turn = Turn(fed, me, manifest.seed, manifest.members[me].prototypes)
        data = PlainData(self.share.train, self.share.test, manifest.train, turn)
        with _ONE_MODEL_AT_A_TIME:
            outcome = work(bench_of(manifest), msg, self.memory.states.get(key.run_id), data, turn, key.kind)
        self.memory.trained.append(key)
        bundle = outcome.bundle if self._alter is None else self._alter(key, outcome.bundle)
        return Entry(offer, codec.pack_bundle(bundle), outcome.state)


def fetch(stub: rpc.TransferStub, digest: str, folder: Path, offset: int = 0) -> Path:
    """Read an object into a file."""
    file, have = folder / digest, 0
    with file.open("wb") as f:
        for chunk in stub.Get(pb.GetRequest(digest=digest, offset=offset)):
            have = append_chunk(chunk, f, have)
    assert codec.file_digest(file) == digest
    return file


def open_request(silo: str, offer: pb.Offer, data: bytes) -> pb.OpenRequest:
    """Announce some bytes as the update that an offer asked for."""
    kind = KINDS[offer.kind].value
    return pb.OpenRequest(
        contribution_id=codec.contribution_id(offer.run_id, offer.round, kind, silo, offer.base_digest),
        run_id=offer.run_id, round=offer.round, kind=offer.kind, manifest_digest=offer.manifest_digest,
        base_digest=offer.base_digest, object_digest=codec.digest(data), size=len(data),
    )  # fmt: skip


def chunks(data: bytes, name: str, offset: int, folder: Path) -> Iterator[pb.Chunk]:
    """Cut bytes into chunks."""
    file = folder / f"{name}.out"
    file.write_bytes(data)
    return (pb.Chunk.FromString(chunk.pack()) for chunk in read_chunks(file, name, offset))


def send(
    stub: rpc.TransferStub, silo: str, offer: pb.Offer, data: bytes, stated: pb.Attestation | None = None
) -> pb.Receipt:
    """Open, put the rest, commit."""
    import tempfile

    request = open_request(silo, offer, data)
    if stated is not None:
        request.attestation.CopyFrom(stated)
    reply = stub.Open(request, timeout=20)
    if reply.HasField("receipt"):
        return reply.receipt
    with tempfile.TemporaryDirectory() as folder:
        if reply.have < len(data):
            stub.Put(chunks(data, request.contribution_id, reply.have, Path(folder)), timeout=60)
    return stub.Commit(pb.CommitRequest(contribution_id=request.contribution_id), timeout=20)
