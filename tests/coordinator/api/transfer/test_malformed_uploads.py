"""Uploads that cannot be: announcements and streams out of shape, too large, for another silo, in any order."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.chunks import CHUNK_BYTES
from tests.support.coordinator import (
    AWAY,
    DATA,
    INVALID,
    LATE,
    STEP,
    World,
    chunk,
    code,
    commit,
    cut,
    open_request,
    open_round,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": 0}, "E-WIRE-06"),
        ({"size": 1 << 40}, "E-WIRE-06"),
        ({"contribution_id": "f" * 64}, "E-WIRE-12"),
        ({"kind": pb.TASK_KIND_UNSPECIFIED}, "E-WIRE-12"),
        ({"kind": 77}, "E-WIRE-12"),
        ({"round": 1}, "E-WIRE-12"),
        ({"manifest_digest": "0" * 64}, "E-WIRE-12"),
        ({"object_digest": "../../../etc/passwd"}, "E-WIRE-12"),
        ({"object_digest": ""}, "E-WIRE-12"),
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
        ([], "E-WIRE-06"),
        ([chunk(b"abc", 0)], "E-WIRE-06"),
        (["first", chunk(b"x", 3, "other")], "E-WIRE-06"),
        (["first", chunk(b"x", STEP + 1)], "E-WIRE-04"),
        (["first", chunk(b"x" * (len(DATA) + 1), STEP)], "E-WIRE-06"),
        (["first", chunk(bytes(CHUNK_BYTES + 1), 0)], "E-WIRE-06"),
        (["first", chunk(b"x", 1 << 63)], "E-WIRE-06"),
    ],
)
@pytest.mark.fault(
    "a hospital", "sends chunks of other objects, chunks with gaps, or too many bytes", "refused; nothing is stored"
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


@pytest.mark.fault("a hospital", "sends a message above 4 MiB", "refused before it is read")
def test_a_message_above_four_mebibytes_is_refused(world: World, offer: pb.Offer) -> None:
    stub, request = world.transfer("north"), open_request("north", offer, DATA)
    stub.Open(request)
    with pytest.raises(grpc.RpcError) as error:
        stub.Put(iter([chunk(bytes(5 << 20), 0, request.contribution_id)]))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.fault("a hospital", "writes or commits another hospital's update", "refused")
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
        assert code(error) in ((INVALID, "E-WIRE-12"), (LATE, "E-WIRE-06"), (AWAY, "E-NET-12"))


class TestAnyStream:
    """Whatever a stream holds, the object that is taken in the end is the one that was announced."""

    @given(data=st.data())
    def test_any_order_of_pieces(self, world: World, data: st.DataObject) -> None:
        if not hasattr(world, "fuzzed"):
            world.fuzzed = open_round(world, request_id="fuzz")[1]  # type: ignore[attr-defined]
        body = data.draw(st.binary(min_size=1, max_size=200), label="object")
        stub, request = world.transfer("east"), open_request("east", world.fuzzed, body)  # type: ignore[attr-defined]
        pieces = data.draw(
            st.lists(st.tuples(st.integers(0, len(body) + 3), st.integers(0, 60), st.booleans()), max_size=8),
            label="pieces",
        )
        stub.Open(open_request("east", world.fuzzed, b"another object" + body))  # type: ignore[attr-defined]
        assert stub.Open(request).have == 0  # what was sent of another object is forgotten
        expected = 0
        stream = [chunk(b"", 0, request.contribution_id)]
        for start, length, wrong in pieces:
            part = body[start : start + length]
            stream.append(chunk(bytes(b ^ 1 for b in part) if wrong else part, start))
        refused, answer = False, ""
        try:
            expected = stub.Put(iter(stream)).have
        except grpc.RpcError as error:
            refused = True
            answer = error.details().split(":")[0]
        have = stub.Open(request).have
        assert answer in ("", "E-WIRE-04", "E-WIRE-06")
        assert have <= len(body)
        assert refused or have == expected
        if have == len(body):
            partial = world.server.uploads.path("east", request.contribution_id).read_bytes()
            if partial != body:
                with pytest.raises(grpc.RpcError, match="E-WIRE-04"):
                    commit(stub, request)
