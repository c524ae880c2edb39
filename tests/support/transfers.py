"""Objects over the wire: by hand at either end, and a transfer service in memory that is cut on demand."""
# ruff: noqa: N802 - gRPC names the methods

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile, TemporaryDirectory, mkdtemp

import grpc
import pytest
import torch

from coordinator.pki.authority import Authority
from coordinator.storage.records import Run
from fl_core.errors import FederationError
from fl_core.rounds.manifest import RunManifest
from fl_core.training.evaluation import METRICS
from fl_core.types.enums import TaskKind
from fl_core.types.values import Part
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import codec, receipts
from protos.wire.chunks import CHUNK_BYTES, append_chunk, read_chunks
from protos.wire.tasks import FROM_WIRE, TaskKey, contribution_id
from service_core.storage import digests
from service_core.storage.object_store import ObjectStore
from silo.connection.retry import CancelledError, CancelToken
from silo.connection.transfer import ReceiptVerifier, RetryPolicy, Transfer
from silo.storage.tasks import OutboxEntry
from tests.support import until
from tests.support.coordinator import World
from tests.support.federations import manifest

CONSORTIUM = "council"

BYTES = bytes(range(256)) * (CHUNK_BYTES // 256 * 3 + 100)
"""A little more than three chunks."""
PATIENCE = RetryPolicy(idle_s=5.0, backoff_s=0.001, backoff_cap_s=0.01, tries=3)


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
    return read_chunks(file, name, offset)


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


def open_round(world: World, rounds: int = 1, request_id: str = "request") -> tuple[Run, pb.Offer]:
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
        chunks = list(read_chunks(Path(file.name), name, offset))
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
        self.transfer = Transfer(lambda: rpc.TransferStub(self.channel), self.objects, retry_policy, self.told.append)

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
