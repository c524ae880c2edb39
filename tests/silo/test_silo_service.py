"""A whole silo against a scripted coordinator: rounds, repetitions, crashes, refusals, and an end in good order."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace

import grpc
import pytest
import torch
from helpers_silo import MEMBERS, FakeSession, Hospital, manifest, until
from PIL import Image

from fl_core import datasets
from fl_core.manifest import Choice, Member
from fl_core.methods import build_method
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.simulate import SiloShare, local_ports
from fl_core.spec import derive_layout
from fl_core.types import Federation, PartSpec, Schema, TaskKind
from fl_core.worker import work
from protos import codec
from protos.consilium.v1 import federation_pb2 as pb
from silo.home import Home
from silo.tasks import TaskKey
from silo.transfer import Patience

TRAINED = TaskKey("run-1", 0, TaskKind.TRAIN)


@pytest.fixture
def make(tmp_path):
    made = []

    def hospital(run=None, do=work, **settings):
        made.append(Hospital(tmp_path / f"home{len(made)}", run, do, **settings))
        return made[-1]

    yield hospital
    for one in made:
        one.stop()
        one.host.stop()


class Slow:
    """A round's arithmetic that takes steps until it is let go, and counts how often it began."""

    def __init__(self):
        self.begun, self.held, self.fail = [], True, None
        self.started, self.free = threading.Event(), threading.Event()

    def __call__(self, bench, msg, state, data, turn, kind):
        self.begun.append(turn.fed.round)
        self.started.set()
        while self.held and not self.free.wait(0.002):
            data._progress(1, 5)
        if self.fail is not None:
            raise self.fail
        return work(bench, msg, state, data, turn, kind)


@pytest.fixture
def slow():
    control = Slow()
    yield control
    control.free.set()


def upload(hospital) -> bytes:
    return bytes(next(iter(hospital.transfer.uploads.values())))


# ---- a round -------------------------------------------------------------------------------------------------------


def test_a_round_from_offer_to_settled(make):
    hospital = make()
    service = hospital.start()
    hospital.offer()
    hospital.sent()
    assert [a.accepted for a in hospital.answers()] == [True]
    assert service.store.entry(TRAINED).receipt
    hospital.close()
    hospital.settled()
    assert service.store.outbox() == []
    assert service.store.committed("run-1")[1] == 0
    (run,) = service.store.history()
    (task,) = run.tasks
    assert sum(task.evaluation.examples) > 0
    assert hospital.control.last.hello.data.classes == list("0123456789")


@pytest.mark.parametrize(
    ("method", "options", "opt_out"),
    [("fedavg", {}, False), ("fedprox", {}, False), ("fedmr", {}, False), ("fedmr", {}, True)],
)
def test_equals_local_port_bit_for_bit(make, method, options, opt_out):
    from fl_core.methods import METHODS, build_method
    from fl_core.simulate import initial_state

    assert method in METHODS
    run = manifest(method=Choice(method, options))
    hospital = make(run, prototypes=not opt_out)
    hospital.start()
    shares = [datasets.load(f"digits/p3c4/{k}") for k in range(3)]
    if opt_out:
        run = replace(run, members=tuple(Member(n, n != "center1") for n in MEMBERS))
    port = local_ports(run, [SiloShare(s.train, s.test) for s in shares])[1]
    msg = build_method(method, options).broadcast(initial_state(run))
    for round, kind in ((0, TaskKind.TRAIN), (1, TaskKind.TRAIN), (2, TaskKind.EVALUATE)):
        hospital.transfer.uploads.clear()
        wire = pb.TRAIN if kind is TaskKind.TRAIN else pb.EVALUATE
        hospital.offer(round, wire, msg)
        hospital.sent(round + 1)
        fed = Federation(3, 10, 2, round, 3)
        assert upload(hospital) == codec.pack_bundle(port.round(msg, fed, kind))
        hospital.close(round, kind=wire)
        hospital.settled(round + 1)


def test_pulses_tell_of_training_while_it_lasts(make, slow):
    hospital = make(do=slow)
    hospital.control.pulse_s = 0.2
    hospital.start()
    hospital.offer()
    assert slow.started.wait(20)
    training = lambda: [p for p in hospital.control.last.got("pulse") if p.activity == pb.TRAINING]  # noqa: E731
    until(lambda: len(training()) >= 3)
    assert (training()[-1].run_id, training()[-1].done, training()[-1].total) == ("run-1", 1, 5)
    slow.free.set()
    hospital.sent()
    until(lambda: hospital.control.last.got("pulse")[-1].activity == pb.WAITING)


# ---- repetition ----------------------------------------------------------------------------------------------------


def test_an_offer_repeated_is_not_trained_twice(make, slow):
    hospital = make(do=slow)
    hospital.start()
    offer = hospital.offer()
    assert slow.started.wait(20)
    hospital.control.last.send(offer=offer)
    until(lambda: len(hospital.answers()) == 2)
    slow.free.set()
    hospital.sent()
    hospital.control.last.send(offer=offer)
    until(lambda: len(hospital.answers()) == 3)
    hospital.sent(2)
    assert slow.begun == [0]
    assert hospital.transfer.calls.count("Put") == 1


def test_a_restart_sends_what_is_in_the_outbox_without_training(make, slow):
    slow.held = False
    hospital = make(do=slow)
    hospital.transfer.refusal = (grpc.StatusCode.UNAVAILABLE, "away")
    hospital.start()
    hospital.offer()
    until(lambda: "staged" in hospital.events())
    hospital.stop()
    hospital.transfer.refusal = None
    hospital.start()
    assert [(s.run_id, s.round) for s in hospital.control.last.hello.staged] == [("run-1", 0)]
    hospital.offer()
    hospital.sent()
    assert slow.begun == [0]


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("included", [True, False])
def test_a_close_for_a_staged_round_after_a_restart(make, included, mirrored, monkeypatch):
    monkeypatch.setattr(FedAvg, "mirrored", mirrored)
    hospital = make()
    hospital.start()
    hospital.offer()
    hospital.sent()
    hospital.stop()
    service = hospital.start()
    assert len(hospital.control.last.hello.staged) == 1
    hospital.close(included=included)
    hospital.settled()
    assert (service.store.committed("run-1") is not None) is (included or not mirrored)
    assert service.store.outbox() == []
    hospital.close(included=included)
    hospital.settled(2)


def test_an_offer_for_a_closed_round_is_refused(make):
    hospital = make()
    hospital.start()
    hospital.close(included=False)
    hospital.settled()
    hospital.offer()
    assert hospital.refused().code == "E-RUN-33"


def test_a_close_while_training_ends_it_and_discards(make, slow):
    hospital = make(do=slow)
    service = hospital.start()
    hospital.offer()
    assert slow.started.wait(20)
    hospital.close(included=False)
    hospital.settled()
    assert "stopped" in hospital.events()
    assert service.store.outbox() == []
    assert hospital.transfer.calls.count("Open") == 0


def test_a_later_round_supersedes_an_earlier_one(make, slow):
    hospital = make(do=slow)
    hospital.start()
    hospital.offer(0)
    assert slow.started.wait(20)
    hospital.offer(1)
    until(lambda: slow.begun == [0, 1])
    slow.free.set()
    hospital.sent()
    assert [o.round for o in hospital.transfer.opened.values()] == [1]


def test_a_round_waits_for_the_close_of_the_one_before(make, slow):
    slow.held = False
    hospital = make(do=slow)
    service = hospital.start()
    hospital.offer(0)
    hospital.sent()
    hospital.offer(1)
    until(lambda: len(hospital.control.sessions) == 2, what="for a session in which closes are named")
    assert slow.begun == [0]
    hospital.close(0)
    hospital.sent(2)
    assert slow.begun == [0, 1]
    assert service.store.committed("run-1")[1] == 0


@pytest.mark.parametrize("state", ["aborted", "finished"])
def test_a_run_that_ends_takes_its_task_with_it(make, slow, state):
    hospital = make(do=slow)
    service = hospital.start()
    hospital.offer()
    assert slow.started.wait(20)
    hospital.control.last.send(run_ended=pb.RunEnded(run_id="run-1", state=state, reason="by the lead"))
    until(lambda: "ended" in hospital.events())
    assert service.store.outbox() == []
    assert service.store.history()[0].state == state
    until(lambda: service.pulse().activity == pb.IDLE)


def test_a_receipt_that_was_lost_is_fetched_after_the_close(make):
    hospital = make()
    hospital.start()
    hospital.transfer.lose_receipt = 1000
    real_open = hospital.transfer.Open
    hospital.transfer.Open = lambda request, context: (
        context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        if hospital.transfer.receipts
        else real_open(request, context)
    )
    hospital.host.stop()
    hospital.host.start()
    until(lambda: len(hospital.control.sessions) == 2)
    hospital.offer()
    until(lambda: hospital.transfer.receipts)
    hospital.close(included=True)
    hospital.settled()
    hospital.stop()
    hospital.transfer.Open = real_open
    hospital.host.stop()
    hospital.host.start()
    service = hospital.start()
    until(lambda: service.store.receipts())
    assert service.store.unproven() == []


# ---- refusals ------------------------------------------------------------------------------------------------------


def unknown_classes():
    return Schema((1, 8, 8), tuple("abcdefghij"))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda: {"privacy": Choice("magic", {})}, "E-PRIV-01"),
        (lambda: {"software": "consilium-fl 99.0.0"}, "E-RUN-34"),
        (lambda: {"members": (Member("center0"), Member("center7"))}, "E-RUN-05"),
        (lambda: {"schema": unknown_classes()}, "E-DATA-05"),
        (lambda: {"layout": {"metrics": PartSpec({"correct": (10,)}, (10,))}}, "E-WIRE-02"),
        (lambda: {"cohort": 2}, "E-RUN-33"),
        (lambda: {"rounds": 0}, "E-RUN-33"),
    ],
    ids=["privacy", "software", "stranger", "label space", "layout", "cohort", "round"],
)
def test_a_manifest_that_does_not_fit_is_refused(make, change, code):
    hospital = make(manifest(**change()))
    hospital.start()
    offer = hospital.offer()
    assert hospital.refused().code == code
    count = len(hospital.answers())
    hospital.control.last.send(offer=offer)
    until(lambda: len(hospital.answers()) == count + 1)
    assert hospital.answers()[-1].code == code
    assert hospital.transfer.calls.count("Open") == 0


def test_a_refusal_over_the_hospitals_images_names_no_file_of_it(make, tmp_path):
    """Names of files and folders may be names of patients; they stay in the hospital's own log."""
    images = tmp_path / "ward7" / "images"
    for name in ("nevus", "melanoma"):
        (images / name).mkdir(parents=True)
        for k in range(10):
            Image.new("RGB", (40, 40), (20 * k, 40, 90)).save(images / name / f"smith-john-{k}.png")
    schema = Schema((3, 32, 32), ("nevus", "melanoma"))
    small = build_model("simple_cnn", {}, schema, 3)
    layout = derive_layout(build_method("fedavg", {}), small, schema)
    facts = {"data": "folder", "schema": schema, "layout": layout, "model": Choice("simple_cnn", {}), "image_size": 32}
    hospital = make(manifest(**facts), data=f"folder:{images}")
    hospital.start()
    for file in images.rglob("*.png"):
        file.write_bytes(file.read_bytes()[:60])  # sound when the service starts, damaged when it trains
    hospital.offer()
    answer = hospital.refused()
    assert answer.code.startswith("E-DATA")
    for word in ("ward7", "smith", str(tmp_path)):
        assert word not in answer.reason
    assert any("smith-john" in notice.text for notice in hospital.notices)


def test_another_shape_is_refused(make):
    run = manifest()
    hospital = make(run)
    hospital.start()
    other = replace(run, schema=Schema((1, 9, 9), run.schema.classes))
    hospital.digest = hospital.transfer.offer(other.to_json().encode())
    hospital.offer()
    assert hospital.refused().code == "E-DATA-30"


def test_an_unknown_privacy_profile_is_refused_before_any_data_is_touched(make, monkeypatch):
    hospital = make(manifest(privacy=Choice("magic", {})))
    hospital.start()
    touched = []
    monkeypatch.setattr(datasets, "load", lambda *a, **k: touched.append(a))
    hospital.offer()
    assert hospital.refused().code == "E-PRIV-01"
    assert touched == []


def test_a_run_that_comes_back_under_another_manifest_is_refused(make):
    hospital = make()
    hospital.start()
    hospital.offer(0)
    hospital.sent()
    hospital.close(0)
    hospital.settled()
    hospital.digest = hospital.transfer.offer(manifest(seed=99).to_json().encode())
    hospital.offer(1)
    assert hospital.refused().code == "E-RUN-35"


def test_a_manifest_in_another_form_is_refused(make):
    hospital = make()
    hospital.start()
    hospital.digest = hospital.transfer.offer(b" " + manifest().to_json().encode())
    hospital.offer()
    assert hospital.refused().code == "E-WIRE-04"


def test_an_update_that_the_coordinator_refuses_waits_for_the_close(make):
    hospital = make()
    service = hospital.start()
    hospital.transfer.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "E-RUN-06: the round is closed")
    hospital.offer()
    assert hospital.refused().code == "E-RUN-06"
    until(lambda: len(hospital.control.sessions) == 2, what="for a session in which closes are named")
    assert [s.round for s in hospital.control.last.hello.staged] == [0]
    assert service.store.committed("run-1") is None
    hospital.close(included=True)
    hospital.settled()
    assert service.store.committed("run-1")[1] == 0


def test_a_task_that_fails_is_reported_and_the_next_one_works(make, slow, caplog):
    slow.held, slow.fail = False, RuntimeError("no room for /data/smith_john.png")
    hospital = make(do=slow)
    hospital.start()
    hospital.offer(0)
    answer = hospital.refused()
    assert (answer.code, "the hospital's own log" in answer.reason) == ("E-RUN-31", True)
    assert "smith" not in answer.reason
    assert "smith_john" in caplog.text
    assert any("smith_john" in notice.text for notice in hospital.notices)
    slow.fail = None
    hospital.offer(1)
    hospital.sent()


def test_a_damaged_outbox_file_is_refused_with_its_reason(make):
    hospital = make()
    hospital.transfer.refusal = (grpc.StatusCode.UNAVAILABLE, "away")
    service = hospital.start()
    hospital.offer()
    until(lambda: "staged" in hospital.events())
    hospital.stop()
    entry = next(p for p in (hospital.folder / "objects").iterdir() if p.name == hospital_object(hospital))
    entry.write_bytes(b"damaged")
    hospital.start()
    hospital.transfer.refusal = None
    hospital.offer()
    assert hospital.refused().code == "E-STATE-63"
    assert service is not None


def hospital_object(hospital) -> str:
    from silo.store import Store

    store = Store(hospital.folder / "silo.db")
    (entry,) = store.outbox()
    store.close_database()
    return entry.object_digest


# ---- the end -------------------------------------------------------------------------------------------------------


def test_a_stop_while_training_hands_the_task_back(make, slow):
    hospital = make(do=slow)
    hospital.start()
    hospital.offer()
    assert slow.started.wait(20)
    session: FakeSession = hospital.control.last
    hospital.stop()
    assert session.over.is_set()
    assert [a.accepted for a in hospital.answers()] == [True]
    slow.free.set()
    hospital.start()
    hospital.offer()
    hospital.sent()


def test_a_stop_while_sending_lets_the_upload_finish(make):
    hospital = make()
    service = hospital.start()
    hospital.transfer.hold, hospital.transfer.held = threading.Event(), {"Put"}
    hospital.offer()
    assert hospital.transfer.holding.wait(20)
    service.leave("shutting down")
    assert not service.settled(0.05)
    hospital.transfer.hold.set()
    assert service.settled(20)
    assert service.store.entry(TRAINED).receipt


def test_threads_of_the_machine_are_as_before_a_task(make):
    torch.set_num_threads(2)
    try:
        hospital = make(manifest(threads=1))
        hospital.start()
        hospital.offer()
        hospital.sent()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_an_upload_that_waits_goes_on_when_the_coordinator_is_back(make, monkeypatch):
    """Its own back-off may be a minute long; the welcome of the next session ends it."""
    monkeypatch.setattr("helpers_silo.PATIENCE", Patience(idle_s=5.0, backoff_s=3600.0, backoff_cap_s=3600.0, tries=3))
    monkeypatch.setattr("silo.client.RECONNECT_CAP_S", 0.01)
    hospital = make()
    hospital.transfer.refusal = (grpc.StatusCode.UNAVAILABLE, "away")
    hospital.start()
    hospital.offer()
    until(lambda: "Open" in hospital.transfer.calls, what="for the first try")
    until(lambda: hospital.notices and hospital.notices[-1].facts.get("code") == "E-NET-01")
    hospital.transfer.refusal = None
    hospital.control.last.end()
    until(lambda: len(hospital.control.sessions) == 2)
    hospital.sent()


def test_a_hello_names_this_process_and_the_one_before_on_this_home_but_not_that_of_a_copy(make, tmp_path):
    hospital = make()
    for _ in range(2):
        hospital.start()
        hospital.stop()
    first, second = (session.hello for session in hospital.control.sessions[:2])
    assert first.instance
    assert (first.previous_instance, second.previous_instance) == ("", first.instance)
    assert second.instance != first.instance
    shutil.copytree(hospital.folder, tmp_path / "copy")
    assert Home(tmp_path / "copy").begin_instance().previous == ""
    assert Home(hospital.folder).begin_instance().previous == second.instance


def test_a_refusal_of_the_session_ends_the_service(make):
    hospital = make()
    service = hospital.start()
    hospital.control.last.send(refusal=pb.Refusal(code="E-ID-12", reason="revoked"))
    hospital.control.last.end()
    assert service.wait(20)
    assert service.error.code == "E-ID-12"


def test_what_is_said_at_the_start_is_honest_about_privacy(make):
    hospital = make()
    hospital.start()
    (said,) = [n for n in hospital.notices if n.event == "privacy"]
    assert "without noise and without mask" in said.text
