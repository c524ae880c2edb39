"""Uploads that are cut, damaged, stalled and stopped, and receipts that do not fit."""

from __future__ import annotations

import threading

import grpc
import pytest

from fl_core.errors import FederationError, ProtocolError, RefusedError
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage import digests
from silo.connection.transfer import RetryPolicy
from tests.support import until
from tests.support.fake_coordinator import BYTES, CUTS, IDS, PATIENCE, Rig, receipt_for


def test_an_upload_gives_a_verified_receipt(rig):
    seen = []
    receipt = pb.Receipt.FromString(rig.upload(moved=lambda done, total: seen.append((done, total))))
    assert bytes(rig.fake.uploads[receipt.contribution_id]) == BYTES
    assert seen[-1] == (len(BYTES), len(BYTES))
    assert receipt.object_digest == digests.digest(BYTES)


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
            contribution_id=entry.contribution_id,
            run_id="run-1",
            round=2,
            kind=pb.TRAIN,
            manifest_digest="a" * 64,
            object_digest=entry.object_digest,
            size=entry.size,
        ),
        "center1",
        **{field: value},
    )
    with pytest.raises(ProtocolError, match="E-WIRE-12"):
        rig.upload(entry)


def test_a_receipt_with_a_wrong_signature_is_refused(rig):
    entry = rig.entry()
    forged = receipt_for(pb.OpenRequest(contribution_id=entry.contribution_id), "center1")
    forged.round = 7
    rig.fake.receipts[entry.contribution_id] = forged
    with pytest.raises(RefusedError, match="E-ID-14"):
        rig.upload(entry)


def test_a_stream_in_which_nothing_moves_is_given_up_and_opened_anew(tmp_path):
    rig = Rig(tmp_path, RetryPolicy(idle_s=0.2, backoff_s=0.001, backoff_cap_s=0.01))
    with rig.silent():
        rig.upload()
    assert rig.told[0].code == "E-NET-12"
    rig.close()


def test_a_stop_cancels_the_stream_at_once(rig):
    with rig.uploading() as found:
        rig.stop.cancel("round closed")
        until(lambda: found)  # while the stream is still held
    assert found == ["round closed"]


def test_a_gentle_stop_lets_the_upload_under_way_finish(rig):
    with rig.uploading() as found:
        rig.stop.cancel("shutting down", gently=True)
    (receipt,) = found
    assert isinstance(receipt, bytes)
    assert receipt


def test_after_a_gentle_stop_there_is_no_second_try(rig):
    rig.fake.put_cut.at = [5]
    with rig.uploading() as found:
        rig.stop.cancel("shutting down", gently=True)
    assert found == ["shutting down"]
    assert rig.fake.calls == ["Open", "Put"]
