"""A whole silo against a scripted coordinator: a round, and an end in good order."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace

import grpc
import pytest
import torch

from consilium.research.engines.in_process import SiloShare, local_ports
from fl_core import datasets
from fl_core.methods import build_method
from fl_core.rounds.manifest import NamedOptions, RunMember
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.values import RoundContext
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from silo.connection.transfer import RetryPolicy
from silo.storage.home import Home
from tests.support import until
from tests.support.fake_coordinator import MEMBERS, manifest
from tests.support.hospital import TRAINED, upload

# ---- a round -------------------------------------------------------------------------------------------------------


def test_a_round_from_offer_to_settled(make):
    hospital = make()
    service = hospital.start()
    hospital.train()
    assert [a.accepted for a in hospital.answers()] == [True]
    assert service.store.entry(TRAINED).receipt
    hospital.settle()
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
def test_equals_local_port_bit_for_bit(started, method, options, opt_out):
    from fl_core.methods import METHODS

    assert method in METHODS
    run = manifest(method=NamedOptions(method, options))
    hospital = started(run, prototypes=not opt_out)
    shares = [datasets.load(f"digits/p3c4/{k}") for k in range(3)]
    if opt_out:
        run = replace(run, members=tuple(RunMember(n, n != "center1") for n in MEMBERS))
    port = local_ports(RunSetup.of(run), [SiloShare(s.train, s.test) for s in shares])[1]
    msg = build_method(method, options).broadcast(RunSetup.of(run).initial_state())
    for round, kind in ((0, TaskKind.TRAIN), (1, TaskKind.TRAIN), (2, TaskKind.EVALUATE)):
        hospital.transfer.uploads.clear()
        wire = pb.TRAIN if kind is TaskKind.TRAIN else pb.EVALUATE
        hospital.offer(round, wire, msg)
        hospital.sent(round + 1)
        context = RoundContext(3, 10, 2, round, 3)
        assert upload(hospital) == codec.pack_bundle(port.round(msg, context, kind))
        hospital.close(round, kind=wire)
        hospital.settled(round + 1)
    said = [notice.text.rpartition(": ")[2] for notice in hospital.notices if notice.event == "training"]
    assert said == ["training", "training", "evaluating"]


@pytest.mark.integration
def test_pulses_tell_of_training_while_it_lasts(make, slow):
    hospital = make(run_round=slow)
    hospital.control.pulse_s = 0.5
    hospital.start()
    hospital.offer()
    assert slow.started.wait(20)
    training = lambda: [p for p in hospital.control.last.got("pulse") if p.activity == pb.TRAINING]  # noqa: E731
    until(lambda: len(training()) >= 3)
    assert (training()[-1].run_id, training()[-1].done, training()[-1].total) == ("run-1", 1, 5)
    slow.free.set()
    hospital.sent()
    until(lambda: hospital.control.last.got("pulse")[-1].activity == pb.WAITING)


# ---- the end -------------------------------------------------------------------------------------------------------


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


def test_threads_of_the_machine_are_as_before_a_task(started):
    torch.set_num_threads(2)
    try:
        hospital = started(manifest(threads=1))
        hospital.train()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_an_upload_that_waits_goes_on_when_the_coordinator_is_back(make, monkeypatch):
    """Its own back-off may be a minute long; the welcome of the next session ends it."""
    monkeypatch.setattr(
        "tests.support.fake_coordinator.PATIENCE",
        RetryPolicy(idle_s=5.0, backoff_s=3600.0, backoff_cap_s=3600.0, tries=3),
    )
    monkeypatch.setattr("silo.connection.control_client.RECONNECT_CAP_S", 0.01)
    hospital = make()
    hospital.transfer.refusal = (grpc.StatusCode.UNAVAILABLE, "away")
    hospital.start()
    hospital.offer()
    until(lambda: "Open" in hospital.transfer.calls, what="for the first try")
    until(lambda: any(n.facts.get("code") == "E-NET-01" for n in hospital.notices), what="for the notice of it")
    hospital.transfer.refusal = None
    hospital.control.last.end()
    until(lambda: len(hospital.control.sessions) >= 2)
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


def test_what_is_said_at_the_start_is_honest_about_privacy(started):
    hospital = started()
    (said,) = [n for n in hospital.notices if n.event == "privacy"]
    assert "under masks" in said.text
    assert "without noise" in said.text
