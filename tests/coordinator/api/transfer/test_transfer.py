"""Uploads and downloads: cut, repeated, changed, late; over real gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import receipts
from service_core.storage import disk
from tests.support import until
from tests.support.coordinator import (
    DATA,
    FAST,
    INVALID,
    LATE,
    OTHER,
    STEP,
    World,
    chunk,
    code,
    commit,
    cut,
    fetch,
    open_request,
    open_round,
    running,
)
from tests.support.federations import NAMES


def test_open_and_commit_are_idempotent_and_the_receipt_is_signed(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    assert stub.Open(request) == stub.Open(request) == pb.OpenReply(have=0)
    assert stub.Put(cut(DATA, request.contribution_id)).have == len(DATA)
    assert stub.Open(request).have == len(DATA)
    receipt, again, opened = commit(stub, request), commit(stub, request), stub.Open(request)
    assert opened.have == len(DATA)
    for found in (again, opened.receipt):  # each is signed when it is asked for
        assert found.HasField("log_head")
        assert receipts.canonical_text(found) == receipts.canonical_text(receipt)
        receipts.verify(found, world.people["north"].ca_pem, "test")
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
            lambda end=end: world.server.uploads.size("south", request.contribution_id) >= min(end, len(DATA)) - STEP,
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
    until(lambda: world.server.uploads.path("north", request.contribution_id).exists(), "the first stream")
    assert stub.Put(cut(DATA, request.contribution_id)).have == len(DATA)
    release.set()
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        stuck.result(10)
    assert commit(stub, request).size == len(DATA)


@pytest.mark.fault(
    "a connection or a disk", "changes bytes of an update", "detected by the digest; the update is sent again"
)
def test_a_wrong_digest_is_refused_and_the_upload_begins_anew(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    stub.Put(cut(DATA[::-1], request.contribution_id))
    with pytest.raises(grpc.RpcError) as error:
        commit(stub, request)
    assert code(error) == (INVALID, "E-WIRE-04")
    assert stub.Open(request).have == 0
    stub.Put(cut(DATA, request.contribution_id, 0, STEP))
    with pytest.raises(grpc.RpcError) as error:
        commit(stub, request)  # before all bytes are there
    assert code(error) == (INVALID, "E-WIRE-04")
    stub.Put(cut(DATA, request.contribution_id, stub.Open(request).have))
    assert commit(stub, request).size == len(DATA)


def test_another_object_under_the_same_id_is_refused_once_one_was_taken(world: World, offer: pb.Offer) -> None:
    stub, first, second = (
        world.transfer("north"),
        open_request("north", offer, DATA),
        open_request("north", offer, OTHER),
    )
    stub.Open(first)
    stub.Put(cut(DATA[: 3 * STEP], first.contribution_id))
    assert stub.Open(second).have == 0  # nothing was taken yet: the hospital lost its disk and trained anew
    stub.Put(cut(OTHER, second.contribution_id))
    commit(stub, second)
    with pytest.raises(grpc.RpcError) as error:
        stub.Open(first)
    assert code(error) == (INVALID, "E-WIRE-07")


def test_a_contribution_to_an_aborted_run_is_refused_and_forgotten(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    stub.Put(cut(DATA, request.contribution_id))
    world.server.runs.abort(offer.run_id)
    for attempt in (lambda: stub.Open(request), lambda: commit(stub, request)):
        with pytest.raises(grpc.RpcError) as error:
            attempt()
        answer = code(error)
        assert answer in ((LATE, "E-RUN-06"), (INVALID, "E-WIRE-04"))  # the second: forgotten between two looks
    until(lambda: not world.server.uploads.size("north", request.contribution_id), "the upload to be forgotten")
    with pytest.raises(grpc.RpcError) as error:
        stub.Open(request)
    assert code(error) == (LATE, "E-RUN-06")


def test_an_object_can_be_read_from_any_offset_by_those_who_may(world: World, offer: pb.Offer, tmp_path: Path) -> None:
    stub = world.transfer("north")
    whole = fetch(stub, offer.base_digest, tmp_path).read_bytes()
    for offset in (0, 1, len(whole) - 1, len(whole)):
        parts = list(stub.Get(pb.GetRequest(digest=offer.base_digest, offset=offset)))
        assert b"".join(p.data for p in parts) == whole[offset:]
        assert parts[0].object == offer.base_digest
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Get(pb.GetRequest(digest=offer.base_digest, offset=len(whole) + 1)))
    assert code(error) == (INVALID, "E-WIRE-06")
    for name, digest in (("north", "0" * 64), ("north", "../x"), ("lead", "0" * 64)):
        with pytest.raises(grpc.RpcError) as error:
            list(world.transfer(name).Get(pb.GetRequest(digest=digest)))
        assert code(error) == (INVALID, "E-WIRE-12")
    assert fetch(world.transfer("lead"), offer.base_digest, tmp_path).read_bytes() == whole
    until(lambda: world.run(offer.run_id).bytes_down >= 2 * len(whole), "the count of traffic")


@pytest.mark.fault("a hospital", "begins uploads and never completes them", "refused above its quota")
def test_unfinished_uploads_have_a_quota(tmp_path: Path) -> None:
    with running(tmp_path / "home", NAMES, replace(FAST, quota=100)) as world:
        _, offer = open_round(world)
        with pytest.raises(grpc.RpcError) as error:
            world.transfer("north").Open(open_request("north", offer, DATA))
        assert code(error) == (grpc.StatusCode.UNAVAILABLE, "E-NET-12")
        assert world.transfer("north").Open(open_request("north", offer, DATA[:100])).have == 0


@pytest.mark.fault("a hospital", "uploads when the coordinator's disk has only its reserve left", "waits with E-RUN-38")
def test_the_reserve_of_the_disk_stays_free(world: World, offer: pb.Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "available", lambda folder: len(DATA) - 1)
        with pytest.raises(grpc.RpcError) as error:
            stub.Open(request)
    assert code(error) == (grpc.StatusCode.UNAVAILABLE, "E-RUN-38")
    assert stub.Open(request).have == 0


def test_a_run_takes_an_update_whose_silo_has_left_while_it_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path / "home", NAMES) as world:
        run, offer = open_round(world)
        request, stub = open_request("north", offer, DATA), world.transfer("north")
        stub.Open(request)
        stub.Put(cut(DATA, request.contribution_id))
        begun, gone, keep = threading.Event(), threading.Event(), world.server.store.contributions.commit

        def slow(*arguments: object) -> None:
            begun.set()
            assert gone.wait(60)
            keep(*arguments)

        monkeypatch.setattr(world.server.store.contributions, "commit", slow)
        call = stub.Commit.future(pb.CommitRequest(contribution_id=request.contribution_id))
        assert begun.wait(60)
        call.cancel()
        loop = world.server._loop._loop
        until(lambda: any(task.cancelling() for task in asyncio.all_tasks(loop)), "the service to notice")
        gone.set()
        tasks = world.server.dispatcher.tasks_of(run.id)
        until(lambda: "north" not in tasks.open_silos(), "the run to have it")
