"""Transfers that are cut, damaged, stalled and stopped, in both directions."""

from __future__ import annotations

import threading

import grpc
import pytest
from helpers_silo import PATIENCE, Host, until
from helpers_transfer import BYTES, CONSORTIUM, FakeTransfer, authority, receipt_for

from fl_core.errors import FederationError, ProtocolError, RefusedError
from fl_core.types import TaskKind
from protos import codec
from protos.chunks import CHUNK_BYTES
from protos.consilium.v1 import federation_pb2 as pb
from silo.line import TransferStub
from silo.objects import Objects
from silo.tasks import Entry, TaskKey
from silo.transfer import Patience, Transfer, Witness
from silo.waiting import Stop, StoppedError

KEY = TaskKey("run-1", 2, TaskKind.TRAIN)
CUTS = [0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES, 17, CHUNK_BYTES + 5, len(BYTES) - 1]
IDS = ["first byte", "chunk 1", "chunk 2", "chunk 3", "inside 1", "inside 2", "last byte"]


def still(done: int, total: int) -> None:
    """Care about no progress."""


class Rig:
    def __init__(self, folder, patience=PATIENCE):
        self.fake = FakeTransfer()
        self.host = Host(self.fake)
        self.channel = self.host.channel()
        self.told: list[FederationError] = []
        self.objects = Objects(folder / "objects")
        self.stop = Stop()
        self.witness = Witness(authority().ca_pem, CONSORTIUM, "center1")
        self.transfer = Transfer(lambda: TransferStub(self.channel), self.objects, patience, self.told.append)

    def entry(self, data=BYTES):
        name = codec.contribution_id(*KEY[:2], "train", "center1", "b" * 64)
        return Entry(KEY, "a" * 64, "b" * 64, name, self.objects.put(data), len(data))

    def upload(self, entry=None, moved=still):
        entry = entry or self.entry()
        return self.transfer.upload(entry, self.objects.path(entry.object_digest), self.witness, self.stop, moved)

    def close(self):
        self.channel.close()
        self.host.stop()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()


# ---- up ------------------------------------------------------------------------------------------------------------


def test_an_upload_gives_a_verified_receipt(rig):
    seen = []
    receipt = pb.Receipt.FromString(rig.upload(moved=lambda done, total: seen.append((done, total))))
    assert bytes(rig.fake.uploads[receipt.contribution_id]) == BYTES
    assert seen[-1] == (len(BYTES), len(BYTES))
    assert receipt.object_digest == codec.digest(BYTES)


@pytest.mark.parametrize("at", CUTS, ids=IDS)
def test_after_a_cut_only_bytes_that_are_not_there_yet_are_sent(rig, at):
    rig.fake.put_cut.at = [at]
    rig.upload()
    assert rig.fake.received == len(BYTES)
    assert bytes(next(iter(rig.fake.uploads.values()))) == BYTES
    assert [e.code for e in rig.told] == ["E-NET-01"]


def test_an_upload_survives_a_cut_at_every_chunk_of_one_transfer(rig):
    rig.fake.put_cut.at = sorted(CUTS)
    rig.upload()
    assert rig.fake.received == len(BYTES)
    assert len(rig.told) == len(CUTS)


def test_an_update_that_was_taken_before_is_not_sent_at_all(rig):
    entry = rig.entry()
    first = rig.upload(entry)
    rig.fake.received = 0
    assert rig.upload(entry) == first
    assert rig.fake.received == 0


def test_a_lost_receipt_is_fetched_again(rig):
    rig.fake.lose_receipt = 1
    rig.upload()
    assert rig.fake.calls == ["Open", "Put", "Commit", "Open"]


def test_an_upload_survives_the_death_of_the_coordinator(rig):
    rig.fake.hold = threading.Event()
    result = []
    sender = threading.Thread(target=lambda: result.append(rig.upload()))
    sender.start()
    assert rig.fake.holding.wait(20)
    rig.host.stop()
    rig.fake.hold.set()
    rig.fake.hold = None
    until(lambda: rig.told, what="for the cut to be noticed")
    rig.host.start()
    sender.join(20)
    assert result
    assert bytes(next(iter(rig.fake.uploads.values()))) == BYTES


def test_bytes_that_arrive_damaged_are_an_error_after_a_few_tries(rig):
    entry = rig.entry()
    rig.objects.path(entry.object_digest).chmod(0o600)
    rig.objects.path(entry.object_digest).write_bytes(BYTES[::-1])
    with pytest.raises(ProtocolError, match="E-WIRE-04"):
        rig.upload(entry)
    assert rig.fake.calls.count("Commit") == PATIENCE.tries + 1


@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION])
def test_a_final_status_is_not_retried(rig, code):
    rig.fake.refusal = (code, "E-RUN-06: expected an open round, found a closed one")
    with pytest.raises(FederationError, match="E-RUN-06") as caught:
        rig.upload()
    assert caught.value.code == "E-RUN-06"
    assert rig.fake.calls == ["Open"]


@pytest.mark.parametrize(("field", "value"), [("object_digest", "c" * 64), ("silo", "center2"), ("size", 3)])
def test_a_receipt_for_something_else_is_refused(rig, field, value):
    entry = rig.entry()
    rig.fake.receipts[entry.contribution_id] = receipt_for(
        pb.OpenRequest(
            contribution_id=entry.contribution_id, run_id="run-1", round=2, kind=pb.TRAIN, manifest_digest="a" * 64,
            object_digest=entry.object_digest, size=entry.size,
        ),
        "center1",
        **{field: value},
    )  # fmt: skip
    with pytest.raises(ProtocolError, match="E-WIRE-12"):
        rig.upload(entry)


def test_a_receipt_with_a_wrong_signature_is_refused(rig):
    entry = rig.entry()
    forged = receipt_for(pb.OpenRequest(contribution_id=entry.contribution_id), "center1")
    forged.round = 7
    rig.fake.receipts[entry.contribution_id] = forged
    with pytest.raises(RefusedError, match="E-ID-20"):
        rig.upload(entry)


def test_a_stream_in_which_nothing_moves_is_given_up_and_opened_anew(tmp_path):
    rig = Rig(tmp_path, Patience(idle_s=0.2, backoff_s=0.001, backoff_cap_s=0.01))
    rig.fake.hold = threading.Event()

    def release():
        until(lambda: rig.told)
        rig.fake.hold, held = None, rig.fake.hold
        held.set()

    helper = threading.Thread(target=release)
    helper.start()
    rig.upload()
    helper.join(20)
    assert rig.told[0].code == "E-NET-11"
    rig.close()


def test_a_stop_cancels_the_stream_at_once(rig):
    rig.fake.hold = threading.Event()
    caught = []

    def send():
        try:
            rig.upload()
        except StoppedError as error:
            caught.append(error.reason)

    sender = threading.Thread(target=send)
    sender.start()
    assert rig.fake.holding.wait(20)
    rig.stop.set("round closed")
    sender.join(20)
    rig.fake.hold.set()
    assert caught == ["round closed"]


def test_a_gentle_stop_lets_the_upload_under_way_finish(rig):
    rig.fake.hold = threading.Event()
    done = []
    sender = threading.Thread(target=lambda: done.append(rig.upload()))
    sender.start()
    assert rig.fake.holding.wait(20)
    rig.stop.set("shutting down", gently=True)
    rig.fake.hold.set()
    sender.join(20)
    assert done


def test_after_a_gentle_stop_there_is_no_second_try(rig):
    rig.fake.put_cut.at = [5]
    rig.fake.hold = threading.Event()
    caught = []

    def send():
        try:
            rig.upload()
        except StoppedError as error:
            caught.append(error.reason)

    sender = threading.Thread(target=send)
    sender.start()
    assert rig.fake.holding.wait(20)
    rig.stop.set("shutting down", gently=True)
    rig.fake.hold.set()
    sender.join(20)
    assert caught == ["shutting down"]
    assert rig.fake.calls == ["Open", "Put"]


# ---- down ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, len(BYTES)], ids=["size unknown", "size known"])
@pytest.mark.parametrize("at", CUTS, ids=IDS)
def test_after_a_cut_only_the_missing_bytes_are_fetched(rig, at, size):
    digest = rig.fake.offer(BYTES)
    rig.fake.get_cut.at = [at]
    path = rig.transfer.fetch(digest, size, rig.stop, still)
    assert path.read_bytes() == BYTES
    assert rig.fake.sent == len(BYTES)


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
    with pytest.raises(ProtocolError, match="E-WIRE-03"):
        rig.transfer.fetch(digest, len(BYTES), rig.stop, still)
    assert rig.fake.calls.count("Get") == PATIENCE.tries + 1


def test_one_damaged_chunk_is_fetched_again(rig):
    digest = rig.fake.offer(BYTES)

    def spoil(chunks):
        rig.fake.spoil = None
        chunks[1].crc32c ^= 1
        return chunks

    rig.fake.spoil = spoil
    assert rig.transfer.fetch(digest, len(BYTES), rig.stop, still).read_bytes() == BYTES
    assert [e.code for e in rig.told] == ["E-WIRE-08"]


@pytest.mark.parametrize("wrong", [BYTES[:-1] + b"?", BYTES + b"more", b""], ids=["other", "longer", "empty"])
def test_wrong_bytes_are_deleted_and_an_error_after_a_few_tries(rig, wrong):
    digest = codec.digest(BYTES)
    rig.fake.objects[digest] = wrong
    size = len(BYTES) if len(wrong) >= len(BYTES) else 0
    with pytest.raises(ProtocolError, match="E-WIRE-04"):
        rig.transfer.fetch(digest, size, rig.stop, still)
    assert not rig.objects.has(digest)
    assert not rig.objects.partial(digest).exists()


@pytest.mark.parametrize("size", [CHUNK_BYTES + 1, 5 * CHUNK_BYTES], ids=["a large chunk", "beyond the message limit"])
def test_a_message_beyond_the_limit_is_refused(rig, size):
    digest = rig.fake.offer(BYTES)
    rig.fake.spoil = lambda chunks: [pb.Chunk(object=digest, offset=0, data=bytes(size), crc32c=0)]
    with pytest.raises(ProtocolError, match="E-WIRE-09"):
        rig.transfer.fetch(digest, len(BYTES), rig.stop, still)


def test_an_object_that_the_coordinator_does_not_have_is_an_error_at_once(rig):
    with pytest.raises(FederationError, match="E-RUN-99"):
        rig.transfer.fetch("d" * 64, 0, rig.stop, still)
    assert rig.fake.calls == ["Get"]


def test_a_silent_download_is_given_up_and_continued(tmp_path):
    rig = Rig(tmp_path, Patience(idle_s=0.2, backoff_s=0.001, backoff_cap_s=0.01))
    digest = rig.fake.offer(BYTES)
    rig.fake.hold = threading.Event()

    def release():
        until(lambda: rig.told)
        rig.fake.hold, held = None, rig.fake.hold
        held.set()

    helper = threading.Thread(target=release)
    helper.start()
    assert rig.transfer.fetch(digest, len(BYTES), rig.stop, still).read_bytes() == BYTES
    helper.join(20)
    assert rig.told[0].code == "E-NET-11"
    rig.close()
