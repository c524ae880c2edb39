"""A coordinator's transfer service made for the silo's tests: in memory, cut on demand, with receipts that verify."""

# ruff: noqa: N802 - gRPC names the methods

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile, mkdtemp

import grpc

from coordinator.pki.authority import Authority
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import codec, receipts
from protos.wire.chunks import CHUNK_BYTES, append_chunk, read_chunks

CONSORTIUM = "council"

BYTES = bytes(range(256)) * (CHUNK_BYTES // 256 * 3 + 100)
"""A little more than three chunks."""


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
        digest = codec.digest(data)
        self.objects[digest] = data
        return digest

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
        if codec.digest(data) != opened.object_digest:
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
