"""Uploads and downloads: cut, repeated, malformed, changed, late; over real gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import grpc
import pytest
from helpers_core import NAMES, manifest
from helpers_grpc import FAST, World, running, until
from helpers_wire import fetch, open_request
from hypothesis import given
from hypothesis import strategies as st

from coordinator.records import Run
from coordinator.server import Settings
from protos import receipts
from protos.chunks import CHUNK_BYTES
from protos.consilium.v1 import federation_pb2 as pb

DATA = bytes(range(256)) * 40
STEP = 1024


def chunk(data: bytes, offset: int, name: str = "", damage: int = 0) -> pb.Chunk:
    return pb.Chunk(object=name, offset=offset, data=data, crc32c=google_crc32c.value(data) ^ damage)


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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("transfer") / "home", NAMES, Settings(pulse_s=0.2, parallel_runs=100)) as w:
        yield w


@pytest.fixture
def offer(world: World, request: pytest.FixtureRequest) -> Iterator[pb.Offer]:
    run, found = open_round(world, request_id=request.node.name)
    yield found
    if not world.run(run.id).state.ended:
        world.server.runs.abort(run.id)


def code(error: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[grpc.StatusCode, str]:
    return error.value.code(), error.value.details().split(":")[0]


INVALID, DENIED, LATE = (
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION
)  # fmt: skip


def commit(stub, request: pb.OpenRequest) -> pb.Receipt:
    return stub.Commit(pb.CommitRequest(contribution_id=request.contribution_id))


def test_open_and_commit_are_idempotent_and_the_receipt_is_signed(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    assert stub.Open(request) == stub.Open(request) == pb.OpenReply(have=0)
    assert stub.Put(cut(DATA, request.contribution_id)).have == len(DATA)
    assert stub.Open(request).have == len(DATA)
    receipt = commit(stub, request)
    assert commit(stub, request) == receipt
    assert stub.Open(request) == pb.OpenReply(have=len(DATA), receipt=receipt)
    assert stub.Put(cut(DATA, request.contribution_id)).have == len(DATA)
    receipts.verify(receipt, world.people["north"].ca_pem, "test")
    assert (receipt.silo, receipt.object_digest, receipt.size) == ("north", request.object_digest, len(DATA))
    events = [e for e in world.server.store.runs.events(offer.run_id, 0) if e.kind == "arrived"]
    assert [e.silo for e in events] == ["north"]
    assert world.run(offer.run_id).bytes_up == len(DATA)


def test_an_upload_that_is_cut_at_every_chunk_goes_on_where_it_was(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("south"), open_request("south", offer, DATA)
    for end in range(STEP, len(DATA) + STEP, STEP):
        have = stub.Open(request).have
        sent, released = threading.Event(), threading.Event()

        def until_cut(start: int, end: int, sent: threading.Event, released: threading.Event) -> Iterator[pb.Chunk]:
            yield from cut(DATA, request.contribution_id, start, end)
            sent.set()
            released.wait(20)  # the stream stays open until the cut

        call = stub.Put.future(until_cut(have, end, sent, released))
        assert sent.wait(20)
        until(
            lambda end=end: world.server.blobs.have("south", request.contribution_id) >= min(end, len(DATA)) - STEP,
            "bytes",
        )
        call.cancel()
        released.set()
    have = stub.Open(request).have
    assert 0 < have <= len(DATA)
    stub.Put(
        cut(DATA, request.contribution_id, have)
        if have < len(DATA)
        else iter([chunk(b"", have, request.contribution_id)])
    )
    assert commit(stub, request).object_digest == request.object_digest


def test_a_second_stream_takes_over_from_one_that_hangs(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    release, first = threading.Event(), threading.Event()

    def hanging() -> Iterator[pb.Chunk]:
        yield from cut(DATA, request.contribution_id, 0, 2 * STEP)
        first.set()
        release.wait(30)

    stuck = stub.Put.future(hanging())
    assert first.wait(10)
    until(lambda: world.server.blobs.partial("north", request.contribution_id).exists(), "the first stream")
    assert stub.Put(cut(DATA, request.contribution_id)).have == len(DATA)
    release.set()
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        stuck.result(10)
    assert commit(stub, request).size == len(DATA)


def test_a_wrong_digest_is_refused_and_the_upload_begins_anew(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    stub.Put(cut(DATA[::-1], request.contribution_id))
    with pytest.raises(grpc.RpcError) as error:
        commit(stub, request)
    assert code(error) == (INVALID, "E-WIRE-04")
    assert stub.Open(request).have == 0
    stub.Put(cut(DATA, request.contribution_id))
    assert commit(stub, request).size == len(DATA)


def test_another_object_under_the_same_id_is_refused_once_one_was_taken(world: World, offer: pb.Offer) -> None:
    stub, first, second = (
        world.transfer("north"),
        open_request("north", offer, DATA),
        open_request("north", offer, DATA[1:]),
    )
    stub.Open(first)
    stub.Put(cut(DATA[: 3 * STEP], first.contribution_id))
    assert stub.Open(second).have == 0  # nothing was taken yet: the hospital lost its disk and trained anew
    stub.Put(cut(DATA[1:], second.contribution_id))
    commit(stub, second)
    with pytest.raises(grpc.RpcError) as error:
        stub.Open(first)
    assert code(error) == (INVALID, "E-WIRE-07")


def test_a_commit_before_all_bytes_are_there_is_refused(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    stub.Put(cut(DATA, request.contribution_id, 0, STEP))
    with pytest.raises(grpc.RpcError) as error:
        commit(stub, request)
    assert code(error) == (INVALID, "E-WIRE-03")


def test_a_contribution_to_an_aborted_run_is_refused_and_forgotten(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    stub.Put(cut(DATA, request.contribution_id))
    world.server.runs.abort(offer.run_id)
    for attempt in (lambda: stub.Open(request), lambda: commit(stub, request)):
        with pytest.raises(grpc.RpcError) as error:
            attempt()
        answer = code(error)
        assert answer in ((LATE, "E-RUN-06"), (INVALID, "E-WIRE-03"))  # the second: forgotten between two looks
    until(lambda: not world.server.blobs.have("north", request.contribution_id), "the upload to be forgotten")
    with pytest.raises(grpc.RpcError) as error:
        stub.Open(request)
    assert code(error) == (LATE, "E-RUN-06")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": 0}, "E-WIRE-11"),
        ({"size": 1 << 40}, "E-WIRE-11"),
        ({"contribution_id": "f" * 64}, "E-WIRE-12"),
        ({"kind": pb.TASK_KIND_UNSPECIFIED}, "E-WIRE-12"),
        ({"kind": 77}, "E-WIRE-12"),
        ({"round": 1}, "E-WIRE-12"),
        ({"manifest_digest": "0" * 64}, "E-WIRE-12"),
        ({"object_digest": "../../../etc/passwd"}, "E-WIRE-15"),
        ({"object_digest": ""}, "E-WIRE-15"),
        ({"run_id": "no-such-run"}, "E-WIRE-12"),
    ],
)
def test_a_malformed_announcement_is_refused(
    world: World, offer: pb.Offer, change: dict[str, object], expected: str
) -> None:
    request = open_request("north", offer, DATA)
    for name, value in change.items():
        setattr(request, name, value)
    with pytest.raises(grpc.RpcError) as error:
        world.transfer("north").Open(request)
    assert code(error) == (INVALID, expected)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ([], "E-WIRE-13"),
        ([chunk(b"abc", 0)], "E-WIRE-13"),
        (["first", chunk(b"x", 3, "other")], "E-WIRE-13"),
        (["first", chunk(b"x", STEP + 1)], "E-WIRE-03"),
        (["first", chunk(b"x", STEP, damage=1)], "E-WIRE-08"),
        (["first", chunk(b"x" * (len(DATA) + 1), STEP)], "E-WIRE-11"),
        (["first", chunk(bytes(CHUNK_BYTES + 1), 0)], "E-WIRE-11"),
        (["first", chunk(b"x", 1 << 63)], "E-WIRE-11"),
    ],
)
def test_a_malformed_stream_is_refused_and_costs_nothing(
    world: World, offer: pb.Offer, stream: list[object], expected: str
) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    first = chunk(DATA[:STEP], 0, request.contribution_id)
    with pytest.raises(grpc.RpcError) as error:
        stub.Put(iter([first if c == "first" else c for c in stream]))
    assert code(error) == (INVALID, expected)
    have = stub.Open(request).have
    assert have in (0, STEP)
    stub.Put(cut(DATA, request.contribution_id, have))
    assert commit(stub, request).size == len(DATA)


def test_a_message_above_four_mebibytes_is_refused(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    with pytest.raises(grpc.RpcError) as error:
        stub.Put(iter([chunk(bytes(5 << 20), 0, request.contribution_id)]))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_nobody_writes_or_commits_for_another_silo(world: World, offer: pb.Offer) -> None:
    request = open_request("north", offer, DATA)
    world.transfer("north").Open(request)
    thief = world.transfer("south")
    attempts = [
        lambda: thief.Open(request),
        lambda: thief.Put(cut(DATA, request.contribution_id)),
        lambda: commit(thief, request),
    ]
    for attempt in attempts:
        with pytest.raises(grpc.RpcError) as error:
            attempt()
        assert code(error) in ((INVALID, "E-WIRE-12"), (LATE, "E-RUN-16"))


class TestAnyStream:
    """Whatever a stream holds, the object that is taken in the end is the one that was announced."""

    @given(data=st.data())
    def test_any_order_of_pieces(self, world: World, data: st.DataObject) -> None:
        if not hasattr(world, "fuzzed"):
            world.fuzzed = open_round(world, request_id="fuzz")[1]  # type: ignore[attr-defined]
        body = data.draw(st.binary(min_size=1, max_size=200), label="object")
        stub, request = world.transfer("east"), open_request("east", world.fuzzed, body)  # type: ignore[attr-defined]
        pieces = data.draw(
            st.lists(
                st.tuples(st.integers(0, len(body) + 3), st.integers(0, 60), st.booleans(), st.booleans()), max_size=8
            ),
            label="pieces",
        )
        stub.Open(open_request("east", world.fuzzed, b"another object" + body))  # type: ignore[attr-defined]
        assert stub.Open(request).have == 0  # what was sent of another object is forgotten
        expected = 0
        stream = [chunk(b"", 0, request.contribution_id)]
        for start, length, wrong, damaged in pieces:
            part = body[start : start + length]
            stream.append(chunk(bytes(b ^ 1 for b in part) if wrong else part, start, damage=int(damaged)))
        refused, answer = False, ""
        try:
            expected = stub.Put(iter(stream)).have
        except grpc.RpcError as error:
            refused = True
            answer = error.details().split(":")[0]
        have = stub.Open(request).have
        assert answer in ("", "E-WIRE-03", "E-WIRE-08", "E-WIRE-11")
        assert have <= len(body)
        assert refused or have == expected
        if have == len(body):
            partial = world.server.blobs.partial("east", request.contribution_id).read_bytes()
            if partial != body:
                with pytest.raises(grpc.RpcError, match="E-WIRE-04"):
                    commit(stub, request)


def test_an_object_can_be_read_from_any_offset_by_those_who_may(world: World, offer: pb.Offer, tmp_path: Path) -> None:
    stub = world.transfer("north")
    whole = fetch(stub, offer.base_digest, tmp_path).read_bytes()
    for offset in (0, 1, len(whole) - 1, len(whole)):
        parts = list(stub.Get(pb.GetRequest(digest=offer.base_digest, offset=offset)))
        assert b"".join(p.data for p in parts) == whole[offset:]
        assert parts[0].object == offer.base_digest
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Get(pb.GetRequest(digest=offer.base_digest, offset=len(whole) + 1)))
    assert code(error) == (INVALID, "E-WIRE-11")
    for name, digest in (("north", "0" * 64), ("north", "../x"), ("lead", "0" * 64)):
        with pytest.raises(grpc.RpcError) as error:
            list(world.transfer(name).Get(pb.GetRequest(digest=digest)))
        assert code(error) == (INVALID, "E-WIRE-15")
    assert fetch(world.transfer("lead"), offer.base_digest, tmp_path).read_bytes() == whole
    until(lambda: world.run(offer.run_id).bytes_down >= 2 * len(whole), "the count of traffic")


def test_unfinished_uploads_have_a_quota(tmp_path: Path) -> None:
    with running(tmp_path / "home", NAMES, Settings(pulse_s=FAST.pulse_s, quota=100)) as world:
        _, offer = open_round(world)
        with pytest.raises(grpc.RpcError) as error:
            world.transfer("north").Open(open_request("north", offer, DATA))
        assert code(error) == (grpc.StatusCode.UNAVAILABLE, "E-NET-23")
        assert world.transfer("north").Open(open_request("north", offer, DATA[:100])).have == 0
