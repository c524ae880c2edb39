"""An upload by hand, piece by piece, to a round that waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from helpers_core import manifest
from helpers_grpc import World, until

from coordinator.storage.records import Run
from protos.consilium.v1 import federation_pb2 as pb

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
