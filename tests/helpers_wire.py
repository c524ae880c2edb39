"""Objects over the wire by hand: fetched, announced, put and committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import codec
from protos.wire.chunks import append_chunk, read_chunks
from protos.wire.tasks import FROM_WIRE, contribution_id


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
