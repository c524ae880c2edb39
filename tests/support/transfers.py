"""Objects over the wire by hand, at either end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.storage.records import Run
from fl_core.errors import FederationError
from fl_core.types.enums import TaskKind
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.storage.object_store import ObjectStore
from protos.wire import codec
from protos.wire.chunks import CHUNK_BYTES, append_chunk, read_chunks
from protos.wire.tasks import FROM_WIRE, TaskKey, contribution_id
from silo.connection.retry import CancelledError, CancelToken
from silo.connection.transfer import ReceiptVerifier, Transfer
from silo.storage.tasks import OutboxEntry
from tests.support import until
from tests.support.coordinator import World
from tests.support.fake_coordinator import BYTES, CONSORTIUM, PATIENCE, FakeTransfer, Host, authority
from tests.support.federations import manifest


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
    return pb.OpenRequest(
        contribution_id=contribution_id(offer.run_id, offer.round, FROM_WIRE[offer.kind], silo, offer.base_digest),
        run_id=offer.run_id,
        round=offer.round,
        kind=offer.kind,
        manifest_digest=offer.manifest_digest,
        base_digest=offer.base_digest,
        object_digest=codec.digest(data),
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


DATA = bytes(range(256)) * 40
STEP = 1024
INVALID, LATE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


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
