"""Downloads that are cut, damaged, stalled and continued."""

from __future__ import annotations

import pytest

from fl_core.errors import FederationError, ProtocolError, RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.chunks import CHUNK_BYTES
from service_core.storage import digests, disk
from silo.connection.channel import Connection
from silo.connection.transfer import RetryPolicy, Transfer
from tests.support.fake_coordinator import BYTES, CUTS, IDS, PATIENCE, Rig, still


@pytest.mark.parametrize("size", [0, len(BYTES)], ids=["size unknown", "size known"])
@pytest.mark.parametrize("at", CUTS, ids=IDS)
def test_after_a_cut_only_the_missing_bytes_are_fetched(rig, at, size):
    digest = rig.fake.offer(BYTES)
    rig.fake.get_cut.at = [at]
    path = rig.transfer.fetch(digest, size, rig.stop, still)
    assert path.read_bytes() == BYTES
    assert rig.fake.sent == len(BYTES)


@pytest.mark.parametrize("call", ["Get", "Open", "Put"])
def test_a_channel_that_is_closed_for_a_newer_one_before_a_call_begins_is_no_failure_of_the_task(rig, call):
    closed = rig.host.channel()
    old, new = Connection.over(rig.line.address, closed), rig.line
    closed.close()
    lines = iter([new, old] if call == "Put" else [old])
    transfer = Transfer(lambda: next(lines, new), rig.objects, PATIENCE, rig.told.append)
    if call == "Get":
        digest = rig.fake.offer(BYTES)
        assert transfer.fetch(digest, 0, rig.stop, still).read_bytes() == BYTES
    else:
        entry = rig.entry()
        assert transfer.upload(entry, rig.objects.path(entry.object_digest), rig.verifier, rig.stop, still)
    assert [error.code for error in rig.told] == ["E-NET-01"]


def test_a_partial_file_of_an_earlier_process_is_continued(rig):
    digest = rig.fake.offer(BYTES)
    rig.objects.partial(digest).write_bytes(BYTES[: CHUNK_BYTES + 9])
    assert rig.transfer.fetch(digest, len(BYTES), rig.stop, still).read_bytes() == BYTES
    assert rig.fake.sent == len(BYTES) - CHUNK_BYTES - 9


def test_a_partial_file_with_wrong_bytes_is_thrown_away(rig):
    digest = rig.fake.offer(BYTES)
    rig.objects.partial(digest).write_bytes(b"torn by a crash")
    assert rig.transfer.fetch(digest, len(BYTES), rig.stop, still).read_bytes() == BYTES


def test_a_whole_partial_file_is_taken_over(rig):
    digest = rig.fake.offer(BYTES)
    rig.objects.partial(digest).write_bytes(BYTES)
    assert rig.transfer.fetch(digest, len(BYTES), rig.stop, still).read_bytes() == BYTES
    assert rig.fake.sent == 0


def test_an_object_that_is_here_is_not_fetched(rig):
    digest = rig.objects.put(b"here")
    assert rig.transfer.fetch(digest, 4, rig.stop, still).read_bytes() == b"here"
    assert rig.fake.calls == []


def test_duplicated_chunks_are_ignored(rig):
    digest = rig.fake.offer(BYTES)
    rig.fake.spoil = lambda chunks: [c for c in chunks for _ in range(2)]
    assert rig.transfer.fetch(digest, len(BYTES), rig.stop, still).read_bytes() == BYTES


def test_chunks_out_of_order_are_an_error_after_a_few_tries(rig):
    digest = rig.fake.offer(BYTES)
    rig.fake.spoil = lambda chunks: chunks[::-1] if len(chunks) > 1 else chunks
    with pytest.raises(ProtocolError, match="E-WIRE-04"):
        rig.transfer.fetch(digest, len(BYTES), rig.stop, still)
    assert rig.fake.calls.count("Get") == PATIENCE.tries + 1


def test_an_object_with_a_damaged_chunk_is_fetched_again(rig):
    digest = rig.fake.offer(BYTES)

    def spoil(chunks):
        rig.fake.spoil = None
        chunks[1].data = bytes(b ^ 1 for b in chunks[1].data)
        return chunks

    rig.fake.spoil = spoil
    assert rig.transfer.fetch(digest, len(BYTES), rig.stop, still).read_bytes() == BYTES
    assert [e.code for e in rig.told] == ["E-WIRE-04"]


@pytest.mark.parametrize("wrong", [BYTES[:-1] + b"?", BYTES + b"more", b""], ids=["other", "longer", "empty"])
@pytest.mark.fault("a coordinator", "sends bytes that do not match the digest", "deleted; an error after a few tries")
def test_wrong_bytes_are_deleted_and_an_error_after_a_few_tries(rig, wrong):
    digest = digests.digest(BYTES)
    rig.fake.objects[digest] = wrong
    size = len(BYTES) if len(wrong) >= len(BYTES) else 0
    with pytest.raises(ProtocolError, match="E-WIRE-04"):
        rig.transfer.fetch(digest, size, rig.stop, still)
    assert not rig.objects.has(digest)
    assert not rig.objects.partial(digest).exists()


@pytest.mark.parametrize("size", [CHUNK_BYTES + 1, 5 * CHUNK_BYTES], ids=["a large chunk", "beyond the message limit"])
def test_a_message_beyond_the_limit_is_refused(rig, size):
    digest = rig.fake.offer(BYTES)
    rig.fake.spoil = lambda chunks: [pb.Chunk(object=digest, offset=0, data=bytes(size))]
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        rig.transfer.fetch(digest, len(BYTES), rig.stop, still)


def test_an_object_that_the_coordinator_does_not_have_is_an_error_at_once(rig):
    with pytest.raises(FederationError, match="E-RUN-99"):
        rig.transfer.fetch("d" * 64, 0, rig.stop, still)
    assert rig.fake.calls == ["Get"]


def test_a_silent_download_is_given_up_and_continued(tmp_path):
    rig = Rig(tmp_path, RetryPolicy(idle_s=0.2, backoff_s=0.001, backoff_cap_s=0.01))
    digest = rig.fake.offer(BYTES)
    with rig.silent():
        assert rig.transfer.fetch(digest, len(BYTES), rig.stop, still).read_bytes() == BYTES
    assert rig.told[0].code == "E-NET-12"
    rig.close()


@pytest.mark.parametrize("size", [0, len(BYTES)], ids=["size unknown", "size known"])
@pytest.mark.fault("a coordinator", "sends an object larger than the manifest allows", "refused; nothing is stored")
def test_an_object_above_its_bound_is_refused(rig, size):
    digest = rig.fake.offer(BYTES)
    with pytest.raises(ProtocolError, match="E-WIRE-06"):
        rig.transfer.fetch(digest, size, rig.stop, still, most=CHUNK_BYTES + 1)
    assert not rig.objects.partial(digest).exists()


@pytest.mark.fault("a coordinator", "fills a hospital's disk", "refused with E-RUN-38; the reserve stays free")
def test_the_reserve_of_the_disk_stays_free(rig, monkeypatch):
    digest, room = rig.fake.offer(BYTES), [len(BYTES) - 1]
    monkeypatch.setattr(disk, "available", lambda folder: room[0])
    with pytest.raises(RefusedError, match="E-RUN-38"):
        rig.transfer.fetch(digest, len(BYTES), rig.stop, still)
    assert rig.fake.calls == []
    room[0] = CHUNK_BYTES - 1
    with pytest.raises(RefusedError, match="E-RUN-38"):
        rig.transfer.fetch(digest, 0, rig.stop, still)
    room[0] = CHUNK_BYTES
    assert rig.transfer.fetch(digest, 0, rig.stop, still).read_bytes() == BYTES
