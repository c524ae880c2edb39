"""A coordinator under a test's command: its control plane, a transfer service that is cut on demand, and a hospital
that it serves."""
# ruff: noqa: N802 - gRPC names the methods

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile, mkdtemp

import grpc

from coordinator.pki.authority import Authority
from fl_core import datasets
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.converter import Option
from fl_core.errors import FederationError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import run_silo_round
from fl_core.types.enums import TaskKind
from fl_core.types.records import TrainConfig
from fl_core.types.values import Layout, State
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import receipts
from protos.wire.chunks import CHUNK_BYTES, append_chunk, read_chunks
from protos.wire.codec import pack_state
from protos.wire.tasks import TaskKey, contribution_id
from service_core.pki.identity import Address
from service_core.pki.invitation import InvitationToken
from service_core.storage import digests
from service_core.storage.object_store import ObjectStore
from service_core.version import PROTOCOL, version
from silo.cancellation import CancelledError, CancelToken
from silo.connection.channel import Connection
from silo.connection.transfer import ReceiptVerifier, RetryPolicy, Transfer
from silo.events import SiloEvent
from silo.identity.identity import SiloIdentity
from silo.service.service import Service
from silo.settings import SiloSettings
from silo.storage.home import Home
from silo.storage.tasks import OutboxEntry
from silo.training.trainer import RunRound
from tests.support import until
from tests.support.services import service

CONSORTIUM = "council"

BYTES = bytes(range(256)) * (CHUNK_BYTES // 256 * 3 + 100)
"""A little more than three chunks."""
PATIENCE = RetryPolicy(idle_s=5.0, backoff_s=0.001, backoff_cap_s=0.01, tries=3)


class Host:
    """A gRPC server on loopback that can die and come back on the same port."""

    def __init__(self, transfer: FakeTransfer, control: rpc.ControlServicer | None = None) -> None:
        self.transfer = transfer
        self.control = control
        self.port = 0
        self._server: grpc.Server | None = None
        self.start()

    def start(self) -> None:
        server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        rpc.add_TransferServicer_to_server(self.transfer, server)
        if self.control is not None:
            rpc.add_ControlServicer_to_server(self.control, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(10)
            self._server = None

    def channel(self) -> grpc.Channel:
        quick = [
            ("grpc.initial_reconnect_backoff_ms", 20),
            ("grpc.min_reconnect_backoff_ms", 20),
            ("grpc.max_reconnect_backoff_ms", 50),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", options=quick)


@cache
def authority() -> Authority:
    """Make one authority for all tests of this process, gone with it."""
    folder = Path(mkdtemp(prefix="consilium-tests-"))
    atexit.register(rmtree, folder)
    return Authority.create(folder, CONSORTIUM, ["localhost:1"])


@dataclass
class Cut:
    """Where a stream breaks: after so many bytes of the object, once per entry."""

    at: list[int] = field(default_factory=list)

    def before(self, have: int, following: int) -> int | None:
        """Return how many of the following bytes still pass when a cut lies within them."""
        if self.at and have <= self.at[0] < have + following:
            return self.at.pop(0) - have
        return None


class FakeTransfer(rpc.TransferServicer):
    """Uploads in memory, downloads from memory, cut where a test says."""

    def __init__(self, silo: str = "center1") -> None:
        self.silo = silo
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, bytearray] = {}
        self.opened: dict[str, pb.OpenRequest] = {}
        self.receipts: dict[str, pb.Receipt] = {}
        self.put_cut, self.get_cut = Cut(), Cut()
        self.received = self.sent = 0
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.lose_receipt = 0
        self.spoil: Callable[[list[pb.Chunk]], list[pb.Chunk]] | None = None
        self.hold: threading.Event | None = None
        self.held = {"Put", "Get"}
        self.holding = threading.Event()
        self.calls: list[str] = []

    def offer(self, data: bytes) -> str:
        digest = digests.digest(data)
        self.objects[digest] = data
        return digest

    def forget(self) -> None:
        """Lose all that was taken, as a coordinator does that is restored from a backup."""
        self.uploads.clear()
        self.receipts.clear()

    def Open(self, request, context):
        self.calls.append("Open")
        if self.refusal:
            context.abort(*self.refusal)
        self.opened[request.contribution_id] = request
        here = self.uploads.setdefault(request.contribution_id, bytearray())
        return pb.OpenReply(have=len(here), receipt=self.receipts.get(request.contribution_id))

    def Put(self, chunks, context):
        self.calls.append("Put")
        here = None
        for chunk in chunks:
            if here is None:
                here = self.uploads[chunk.object]
            if self.hold is not None and "Put" in self.held:
                self.holding.set()
                self.hold.wait(20)
            passes = self.put_cut.before(len(here), max(1, len(chunk.data)))
            if passes is not None:
                here += chunk.data[:passes]
                self.received += passes
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line was cut")
            sink = _Sink()
            append_chunk(chunk, sink, len(here))
            here += sink.data
            self.received += len(chunk.data)
        return pb.PutReply(have=len(here))

    def Commit(self, request, context):
        self.calls.append("Commit")
        opened = self.opened[request.contribution_id]
        data = bytes(self.uploads[request.contribution_id])
        if digests.digest(data) != opened.object_digest:
            self.uploads[request.contribution_id].clear()
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "E-WIRE-04: expected other bytes")
        receipt = receipt_for(opened, self.silo)
        self.receipts[request.contribution_id] = receipt
        if self.lose_receipt:
            self.lose_receipt -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        return receipt

    def Get(self, request, context):
        self.calls.append("Get")
        if request.digest not in self.objects:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "E-RUN-99: no such object")
        chunks = list(chunks_of(self.objects[request.digest], request.digest, request.offset))
        for chunk in self.spoil(chunks) if self.spoil else chunks:
            if self.hold is not None and "Get" in self.held:
                self.holding.set()
                self.hold.wait(20)
            passes = self.get_cut.before(chunk.offset, max(1, len(chunk.data)))
            if passes is not None:
                if passes:
                    yield next(chunks_of(chunk.data[:passes], chunk.object, 0, chunk.offset))
                    self.sent += passes
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line was cut")
            self.sent += len(chunk.data)
            yield chunk


class _Sink:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


def chunks_of(data: bytes, name: str, offset: int, shift: int = 0) -> Iterator[pb.Chunk]:
    """Cut bytes as `read_chunks` cuts a file."""
    with NamedTemporaryFile(prefix="consilium-chunks-") as file:
        file.write(data)
        file.flush()
        chunks = [pb.Chunk.FromString(chunk.message) for chunk in read_chunks(Path(file.name), name, offset)]
    for chunk in chunks:
        chunk.offset += shift
        yield chunk


def receipt_for(opened: pb.OpenRequest, holder: str, **other: object) -> pb.Receipt:
    """Sign what a coordinator would sign."""
    raw = pb.Receipt(
        contribution_id=opened.contribution_id,
        run_id=opened.run_id,
        round=opened.round,
        kind=opened.kind,
        silo=holder,
        manifest_digest=opened.manifest_digest,
        object_digest=opened.object_digest,
        size=opened.size,
        at_unix=1.0,
    )
    if opened.HasField("attestation"):
        raw.attestation.CopyFrom(opened.attestation)
    for name, value in other.items():
        setattr(raw, name, value)
    key_pem, cert_pem, _ = authority().server_credentials()
    return receipts.sign(raw, key_pem, cert_pem)


KEY = TaskKey("run-1", 2, TaskKind.TRAIN)
CUTS = [0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES, 17, CHUNK_BYTES + 5, len(BYTES) - 1]
IDS = ["first byte", "chunk 1", "chunk 2", "chunk 3", "inside 1", "inside 2", "last byte"]


def still(done: int, total: int) -> None:
    """Care about no progress."""


class Rig:
    def __init__(self, folder, retry_policy=PATIENCE):
        self.fake = FakeTransfer()
        self.host = Host(self.fake)
        self.channel = self.host.channel()
        self.told: list[FederationError] = []
        self.objects = ObjectStore(folder / "objects")
        self.stop = CancelToken()
        self.verifier = ReceiptVerifier(authority().ca_pem, CONSORTIUM, "center1")
        self.line = Connection.over(Address("127.0.0.1", 1), self.channel)
        self.transfer = Transfer(lambda: self.line, self.objects, retry_policy, self.told.append)

    def entry(self, data=BYTES):
        name = contribution_id(*KEY, "center1", "b" * 64)
        return OutboxEntry(KEY, "a" * 64, "b" * 64, name, self.objects.put(data), len(data))

    def upload(self, entry=None, moved=still):
        entry = entry or self.entry()
        return self.transfer.upload(entry, self.objects.path(entry.object_digest), self.verifier, self.stop, moved)

    @contextmanager
    def uploading(self):
        """Upload beside the block, held at its first chunk until that ends; gives the receipt, or why there is none."""
        self.fake.hold, found = threading.Event(), []

        def send():
            try:
                found.append(self.upload())
            except CancelledError as error:
                found.append(error.reason)

        sender = threading.Thread(target=send)
        sender.start()
        assert self.fake.holding.wait(20)
        yield found
        self.fake.hold.set()
        sender.join(20)

    @contextmanager
    def silent(self):
        """Let nothing move inside the block until the silo has told of it."""
        self.fake.hold = threading.Event()

        def release():
            until(lambda: self.told)
            self.fake.hold, held = None, self.fake.hold
            held.set()

        helper = threading.Thread(target=release)
        helper.start()
        yield
        helper.join(20)

    def close(self):
        self.channel.close()
        self.host.stop()


# ---- the control plane ---------------------------------------------------------------------------------------------


class FakeSession:
    """One session as the coordinator sees it."""

    def __init__(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.received: list[pb.SiloMessage] = []
        self.over = threading.Event()
        self._out: queue.SimpleQueue[pb.CoordinatorMessage | None] = queue.SimpleQueue()

    def send(self, **body: object) -> None:
        self._out.put(pb.CoordinatorMessage(**body))

    def end(self) -> None:
        self._out.put(None)

    def messages(self) -> Iterator[pb.CoordinatorMessage]:
        while (message := self._out.get()) is not None:
            yield message

    def got(self, kind: str) -> list:
        return [getattr(m, kind) for m in list(self.received) if m.WhichOneof("body") == kind]


class FakeControl(rpc.ControlServicer):
    """Sessions under a test's control. greet: what is sent after the welcome."""

    def __init__(self, pulse_s: float = 0.5, recycle_s: float = 0.0) -> None:
        self.pulse_s, self.recycle_s = pulse_s, recycle_s
        self.sessions: list[FakeSession] = []
        self.welcome: Callable[[pb.Hello], pb.CoordinatorMessage | None] = self._welcome
        self.greet: Callable[[FakeSession], None] = lambda session: None
        self.beats = True

    def _welcome(self, hello: pb.Hello) -> pb.CoordinatorMessage:
        facts = pb.Welcome(
            protocol=PROTOCOL, software="fake 1", pulse_seconds=self.pulse_s, recycle_seconds=self.recycle_s
        )
        return pb.CoordinatorMessage(welcome=facts)

    @property
    def last(self) -> FakeSession:
        return self.sessions[-1]

    def Session(self, messages, context):
        hello = next(messages).hello
        session = FakeSession(hello)

        def listen() -> None:
            try:
                for message in messages:
                    session.received.append(message)
            except grpc.RpcError:
                pass
            finally:
                session.over.set()
                session.end()

        def beat() -> None:
            while not session.over.wait(self.pulse_s):
                if self.beats:
                    session.send(pulse=pb.Pulse())

        first = self.welcome(hello)
        if first is None:
            context.add_callback(session.over.set)
            session.over.wait(20)
            return
        for body in (listen, beat):
            threading.Thread(target=body, daemon=True).start()
        self.greet(session)
        self.sessions.append(session)
        yield first
        yield from session.messages()


# ---- a hospital ----------------------------------------------------------------------------------------------------

MEMBERS = ("center0", "center1", "center2")


def enrolled(folder: Path, name: str = "center1") -> Home:
    """Give a home whose silo has joined the tests' consortium, without a network."""
    home = Home(folder).make()
    identity = SiloIdentity(home.path)
    if not identity.joined:
        material = identity.join_material(InvitationToken.decode(authority().invite(name).token))
        identity.install(authority().sign_silo(material.csr_pem, name), authority().ca_pem)
        home.write_addresses(material.addresses)
    return home


_version = cache(version)


@cache
def _layout(method: str, options: tuple[tuple[str, Option], ...]) -> Layout:
    schema = datasets.schema_of("digits")
    return derive_layout(build_method(method, dict(options)), build_model("digits_cnn", {}, schema, 3), schema)


def manifest(**other) -> RunManifest:
    """Freeze a small run on the digits."""
    schema = datasets.schema_of("digits")
    method = other.pop("method", NamedOptions("fedavg", {}))
    facts = {
        "name": "small",
        "method": method,
        "model": NamedOptions("digits_cnn", {}),
        "data": "digits",
        "schema": schema,
        "train": TrainConfig(epochs=1, batch_size=64),
        "rounds": 2,
        "seed": 3,
        "members": make_members(MEMBERS, 3, 1.0),
        "layout": _layout(method.name, tuple(sorted(method.options.items()))),
        "grid": FixedPointFormat("ring64", len(MEMBERS)),
        "privacy": NamedOptions("none", {}),
        "threads": 1,
        "software": _version(),
    }
    return RunManifest(**{**facts, **other})


class Hospital:
    """A service at work, the coordinator that it talks to, and a run."""

    def __init__(
        self,
        folder: Path,
        run: RunManifest | None = None,
        run_round: RunRound | None = run_silo_round,
        clock: Callable[[], float] = time.monotonic,
        **settings,
    ) -> None:
        self.run_round, self.clock = run_round, clock
        self.folder, self.settings = folder, settings
        self.control, self.transfer = FakeControl(), FakeTransfer()
        self.host = Host(self.transfer, self.control)
        self.run_id = "run-1"
        self.manifest = run or manifest()
        self.digest = self.transfer.offer(self.manifest.to_json().encode())
        self.server = RunSetup.of(self.manifest).initial_state()
        self.notices: list[SiloEvent] = []
        self.service: Service | None = None

    def launch(self) -> Service:
        """Start the service, and wait for no session."""
        place = SiloSettings(enrolled(self.folder), **{"data": "digits/p3c4/1", "device": "cpu", **self.settings})
        self.service = service(place, self.notices, PATIENCE, self.host.channel, self.run_round, self.clock)
        self.service.start()
        return self.service

    def start(self) -> Service:
        before = len(self.control.sessions)
        begun = self.launch()
        until(lambda: len(self.control.sessions) > before)
        return begun

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
            self.service = None

    def offer_of(self, round: int = 0, kind=pb.TRAIN, state: State | None = None, **other) -> pb.Offer:
        base = pack_state(build_method("fedavg", {}).broadcast(self.server) if state is None else state)
        facts = {
            "run_id": self.run_id,
            "round": round,
            "kind": kind,
            "manifest_digest": self.digest,
            "base_digest": self.transfer.offer(base),
            "base_size": len(base),
            "cohort": len(MEMBERS),
        }
        return pb.Offer(**{**facts, **other})

    def offer(self, *args, **other) -> pb.Offer:
        offer = self.offer_of(*args, **other)
        self.control.last.send(offer=offer)
        return offer

    def train(self) -> pb.Offer:
        """Let it do the first round, until its receipt is there."""
        offer = self.offer()
        self.sent()
        return offer

    def settle(self) -> None:
        """Close the first round, and wait until it has kept or dropped what it had staged."""
        self.close()
        self.settled()

    def end(self) -> None:
        self.stop()
        self.host.stop()

    def close(self, round: int = 0, included: bool = True, kind=pb.TRAIN) -> None:
        closed = pb.RoundClosed(run_id=self.run_id, round=round, kind=kind, included=included)
        self.control.last.send(round_closed=closed)

    def events(self) -> list[str]:
        return [n.event for n in self.notices]

    def sent(self, times: int = 1) -> None:
        until(lambda: self.events().count("sent") >= times, what=str([n.text for n in self.notices]))

    def answers(self) -> list[pb.Answer]:
        return [a for s in self.control.sessions for a in s.got("answer")]

    def settled(self, times: int = 1) -> None:
        until(lambda: sum(len(s.got("settled")) for s in self.control.sessions) >= times)

    def refused(self) -> pb.Answer:
        until(lambda: any(not a.accepted for a in self.answers()), what=str([n.text for n in self.notices]))
        return next(a for a in self.answers() if not a.accepted)
