"""The silo's memory: what is staged, committed, kept and swept; nothing is acknowledged before it is kept."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace

import pytest
import torch

from fl_core.errors import StateError
from fl_core.types.clinical import BinnedRange, ClinicalMetrics, ReliabilityBin
from fl_core.types.enums import TaskKind
from fl_core.types.values import Part
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import receipts
from protos.wire.tasks import TaskKey
from service_core.storage import digests
from service_core.storage.object_store import ObjectStore
from silo.storage.outbox import Outbox
from silo.storage.store import SiloStore
from silo.storage.tasks import Attestation, LocalEvaluation, OutboxEntry, UnprotectedUpdate
from tests.support import hospital
from tests.support.fake_coordinator import CONSORTIUM, authority
from tests.support.hospital import FACTS, B, M, finished, key, opened, signed_update, stage, value

CLINICAL = ClinicalMetrics(((1, 1), (0, 0)), (BinnedRange(0.25, 0.5), None), (ReliabilityBin(2, 1, 1.5),) * 15)


@pytest.mark.parametrize(
    ("included", "mirrored", "left"),
    [
        (True, True, 2.0),
        (False, True, 1.0),
        (True, False, 2.0),
        (False, False, 2.0),
    ],
)
def test_a_state_without_a_mirror_is_kept_even_if_the_update_was_lost(tmp_path, included, mirrored, left):
    outbox = opened(tmp_path)
    stage(outbox, 0, 1.0)
    outbox.store.close(key(0), included=True)
    outbox.begin(key(1), M, B, finished(2.0, mirrored)).finish()
    outbox.store.close_database()  # the method is known at the close, whoever closes it
    again = opened(tmp_path)
    again.store.close(key(1), included)
    again.sweep()
    assert value(again) == left


def test_a_run_that_ends_before_its_close_discards_every_state(tmp_path):
    """The round is played again from its start when the run is resumed."""
    outbox = opened(tmp_path)
    outbox.begin(key(), M, B, finished(2.0, server_tracks_state=False)).finish()
    outbox.store.record_run("run-1", "r", M, B)
    outbox.store.end_run("run-1", "failed", "too few")
    assert value(outbox) is None


def test_a_close_seen_twice_is_harmless(tmp_path):
    outbox = opened(tmp_path)
    stage(outbox)
    assert outbox.store.close(key(), included=True)
    assert not outbox.store.close(key(), included=False)
    assert value(outbox) == 1.0
    assert outbox.store.closed(key())


def test_a_state_never_replaces_that_of_a_later_round(tmp_path):
    outbox = opened(tmp_path)
    stage(outbox, 0, 1.0)
    stage(outbox, 1, 2.0)
    outbox.store.close(key(1), included=True)
    outbox.store.close(key(0), included=True)
    assert value(outbox) == 2.0


def test_a_close_of_a_round_that_was_never_trained_is_remembered(tmp_path):
    outbox = opened(tmp_path)
    outbox.store.record_run("run-1", "first", M)
    assert outbox.store.close(key(), included=False)
    stage(outbox)
    assert outbox.find(key(), B) is None
    assert value(outbox) is None


def test_an_evaluation_stages_no_state(tmp_path):
    outbox = opened(tmp_path)
    entry = stage(outbox, 3, 9.0, kind=TaskKind.EVALUATE)
    assert entry.state_digest is None
    outbox.store.close(entry.key, included=True)
    assert value(outbox) is None


def test_an_update_from_another_base_is_not_sent_for_this_one(tmp_path):
    outbox = opened(tmp_path)
    stage(outbox, base=B)
    assert outbox.find(key(), "c" * 64) is None
    stage(outbox, value=5.0, base="c" * 64)
    assert outbox.find(key(), B) is None
    assert len(outbox.store.outbox()) == 1


def test_a_damaged_bundle_is_noticed_before_it_is_sent(tmp_path):
    outbox = opened(tmp_path)
    entry = stage(outbox)
    path = outbox.objects.path(entry.object_digest)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StateError, match="E-STATE-63"):
        outbox.bundle(entry)
    path.unlink()
    with pytest.raises(StateError, match="missing"):
        outbox.bundle(entry)


def test_the_newest_two_bases_of_a_run_are_kept(tmp_path):
    outbox = opened(tmp_path)
    digests = [outbox.objects.put(bytes([n])) for n in range(4)]
    manifest = outbox.objects.put(b"manifest")
    for digest in [*digests, digests[-1]]:
        outbox.store.record_run("run-1", "first", manifest, digest)
    outbox.objects.partial("e" * 64).write_bytes(b"half")
    assert outbox.sweep() == 2 + 4
    assert [outbox.objects.has(d) for d in digests] == [False, False, True, True]


def test_ended_runs_keep_their_last_state_and_only_the_newest_three(tmp_path):
    ticks = iter(range(1000))
    store = SiloStore(tmp_path / "silo.db", clock=lambda: float(next(ticks)))
    outbox = Outbox(store, ObjectStore(tmp_path / "objects"), "center1")
    for n in range(5):
        run = f"run-{n}"
        manifest, base = (outbox.objects.put(f"{what} {n}".encode()) for what in ("manifest", "base"))
        store.record_run(run, run, manifest, base)
        outbox.begin(TaskKey(run, 0, TaskKind.TRAIN), M, B, finished(float(n))).finish()
        store.close(TaskKey(run, 0, TaskKind.TRAIN), included=True)
        store.end_run(run, "finished", "")
    outbox.sweep()
    kept = [store.committed(f"run-{n}") for n in range(5)]
    assert [outbox.objects.has(found[0]) for found in kept if found] == [False, False, True, True, True]
    assert outbox.objects.has(digests.digest(b"manifest 4"))
    assert not outbox.objects.has(digests.digest(b"base 4"))


@pytest.mark.parametrize(("state", "left"), [("finished", 1), ("aborted", 0), ("failed", 0)])
def test_only_a_finished_run_still_waits_for_its_closes(tmp_path, state, left):
    outbox = opened(tmp_path)
    stage(outbox)
    outbox.store.end_run("run-1", state, "why")
    assert len(outbox.store.outbox()) == left


def test_included_updates_without_a_receipt_are_listed_until_it_is_there(tmp_path):
    outbox = opened(tmp_path)
    stage(outbox)
    outbox.store.close(key(), included=True)
    assert [e.key for e in outbox.store.missing_receipts()] == [key()]
    outbox.store.deliver(key(), b"receipt")
    assert outbox.store.missing_receipts() == []
    assert outbox.store.receipts() == [b"receipt"]


def signed_rounds(store: SiloStore, rounds: range, restored: int = 0, sealed_in_receipt: bool = False) -> list[bytes]:
    """Play the rounds of a run; return their receipts."""
    signed = []
    for round in rounds:
        entry, receipt = signed_update(round, restored, sealed_in_receipt)
        names = tuple(f"diagnosis {k}" for k in range(8))
        store.stage(entry, LocalEvaluation(names, tuple(7.0 * k for k in range(8)), tuple(11.0 * k for k in range(8))))
        came = pb.Receipt.FromString(receipt)
        came.log_head.number = 17
        store.deliver(entry.key, came.SerializeToString(deterministic=True))
        store.close(entry.key, included=True)
        signed.append(receipt)
    return signed


@pytest.mark.parametrize("sealed_in_receipt", [False, True], ids=["0.2.0", "0.1.0"])
def test_a_receipt_is_read_as_it_was_signed_and_verifies(tmp_path, sealed_in_receipt):
    store = SiloStore(tmp_path / "silo.db")
    store.record_run("run-1", "first", M)
    signed = signed_rounds(store, range(3), sealed_in_receipt=sealed_in_receipt)
    assert store.receipts() == signed
    for receipt in store.receipts():
        receipts.verify(pb.Receipt.FromString(receipt), authority().ca_pem, CONSORTIUM)
    with store.database.read() as db:
        assert db.exec_driver_sql("SELECT count(*) FROM signers").scalar_one() == 1


def test_a_round_costs_a_hospital_about_a_kilobyte_for_ever(tmp_path):
    """In the file, with indexes, whatever table: it was 5.5 kB, of which the certificate and what is sealed were 4."""
    store, sizes = SiloStore(tmp_path / "silo.db"), []
    store.record_run("run-1", "first", M, B)
    for rounds in (range(10), range(10, 110)):
        signed_rounds(store, rounds)
        store.database.compact()
        sizes.append((tmp_path / "silo.db").stat().st_size)
    assert (sizes[1] - sizes[0]) / 100 < 1200


def test_what_the_ledger_had_spent_is_kept_of_the_newest_end_of_each_life_of_it(tmp_path):
    store = SiloStore(tmp_path / "silo.db")
    store.record_run("run-1", "first", M)
    signed_rounds(store, range(4))
    signed_rounds(store, range(4, 6), restored=1)
    assert [(a.restored, a.seq, bool(a.sealed)) for a in store.attested()] == [
        *((1, 6, True), (1, 5, False)),
        *((0, 4, True), (0, 3, False), (0, 2, False), (0, 1, False)),
    ]
    assert store.latest_attestation_sent().sealed == bytes([5] * 1052).hex()


def test_an_update_that_is_sent_again_says_what_the_ledger_had_spent(tmp_path):
    store = SiloStore(tmp_path / "silo.db")
    store.record_run("run-1", "first", M)
    for round in range(2):
        attested = Attestation("", round + 1, f"{round:064x}", bytes([round] * 1052).hex())
        store.stage(
            OutboxEntry(key(round), M, B, f"c{round}", "d" * 64, 1, attested=attested), LocalEvaluation((), (), ())
        )
    assert [entry.attested.sealed for entry in store.outbox()] == [bytes([k] * 1052).hex() for k in range(2)]


@pytest.mark.parametrize("mirrored", [True, False])
def test_the_state_of_an_update_that_was_refused_is_not_committed_by_a_close_that_includes_another(tmp_path, mirrored):
    outbox = opened(tmp_path)
    outbox.begin(key(), M, B, finished(1.0, mirrored)).finish()
    outbox.store.close(key(), included=True)
    assert outbox.store.reopen(key(), "another")
    outbox.begin(key(), M, B, finished(2.0, mirrored), coordinator="another").finish()
    outbox.store.refuse(key(), "E-WIRE-07: another object was taken")
    outbox.store.close(key(), included=True)
    assert value(outbox) == 1.0


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("receipt", [True, False])
def test_what_was_made_before_a_round_was_opened_again_counts_only_with_a_receipt(tmp_path, receipt, mirrored):
    outbox = opened(tmp_path)
    outbox.begin(key(0), M, B, finished(1.0, mirrored)).finish()
    outbox.store.close(key(0), included=True)
    stage(outbox, 1, 2.0)
    outbox.store.close(key(1), included=True)
    assert outbox.store.reopen(key(0), "another")
    assert outbox.store.outbox() == []
    assert not outbox.holds(outbox.find(key(0), B))
    if receipt:
        outbox.store.deliver(key(0), b"receipt")
        assert outbox.holds(outbox.find(key(0), B))
    assert len(outbox.store.outbox()) == receipt
    outbox.store.close(key(0), included=True)
    assert value(outbox) == (1.0 if receipt else 2.0)  # a state of the incarnation that is no more stays until replaced


@pytest.mark.parametrize("clinical", [None, CLINICAL])
def test_history_tells_what_was_measured(tmp_path, monkeypatch, clinical):
    measured = replace(FACTS, clinical=clinical)
    monkeypatch.setattr(hospital, "FACTS", measured)
    outbox = opened(tmp_path)
    outbox.store.record_run("run-1", "fedavg-digits", M, B)
    stage(outbox)
    outbox.store.close(key(), included=True)
    (run,) = outbox.store.history()
    (task,) = run.tasks
    assert (run.name, run.state, run.state_round) == ("fedavg-digits", "running", 0)
    assert task.evaluation == measured
    assert task.included is True


def test_threads_that_read_and_write_do_not_lose_each_other(tmp_path):
    outbox = opened(tmp_path)
    for n in range(4):
        outbox.store.record_run(f"run-{n}", "one of four", M)
    failures = []

    def work(n: int) -> None:
        try:
            for round in range(10):
                outbox.store.close(key(round, f"run-{n}"), included=False)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert all(outbox.store.closed(key(r, f"run-{n}")) for r in range(10) for n in range(4))


def test_files_are_for_their_owner_alone(tmp_path):
    outbox = opened(tmp_path)
    entry = stage(outbox)
    assert stat.S_IMODE(outbox.objects.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(outbox.objects.path(entry.object_digest).stat().st_mode) == 0o600


def test_updates_without_privacy_are_remembered_when_their_runs_are_long_over(tmp_path):
    outbox = opened(tmp_path)
    for k in range(6):
        run = f"run-{k}"
        outbox.store.record_run(run, run, M, B)
        for data in (b"first", b"again", b"again"):  # a task that is done again may send something else
            done = replace(finished(float(len(data) + k)), unprotected=("test", "train"), fingerprint="f" * 64)
            done = replace(done, bundle={**done.bundle, "more": Part.of({"w": torch.tensor(list(data))})})
            outbox.begin(key(0, run), M, B, done).finish()
        outbox.store.close(key(0, run), included=True)
        outbox.store.end_run(run, "finished", "")
        outbox.sweep()
    outbox.store.close_database()
    again = opened(tmp_path).store
    assert len(again.unprotected()) == 12
    assert set(again.unprotected()) == {UnprotectedUpdate(f"run-{k}", "f" * 64, ("test", "train")) for k in range(6)}
    again.close_database()


def test_kills_are_counted_by_task_and_void_once_the_lead_resumes_or_the_run_ends(tmp_path):
    def restarted():
        opened(tmp_path).store.close_database()
        return opened(tmp_path).store

    store = opened(tmp_path).store
    assert store.count_kills() == []
    for times in (1, 2):
        store.begin_training(key(), 0)
        store = restarted()
        assert store.count_kills() == [(key(), times)]
        assert store.count_kills() == []  # a start without a task in between is no kill
    assert store.kills("run-1") == 2
    store.begin_training(key(1), 0)
    store.end_trainings()
    assert restarted().count_kills() == []
    assert store.kills("run-1", attempt=1) == 0
    store.begin_training(key(), 1)
    assert restarted().count_kills() == [(key(), 1)]
    assert store.kills("run-1", attempt=1) == 1
    assert store.kills("run-2") == 0
    store.record_run("run-1", "r", M, B)
    store.end_run("run-1", "aborted", "")
    assert store.kills("run-1") == 0
