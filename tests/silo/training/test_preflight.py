"""A hospital's answer before round 0: what it looks at, that it charges nothing, and what its reasons tell."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from fl_core import datasets
from fl_core.models import build_model
from fl_core.rounds.manifest import NamedOptions
from fl_core.rounds.run_setup import RunSetup
from fl_core.training import memory
from fl_core.types.records import TrainConfig
from fl_core.types.secagg import Secagg
from privacy.accounting.accountant import aggregated
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.silo.guard import silo_level
from privacy.profiles.record import release_plan
from privacy.profiles.silo import silo_releases
from protos.consilium.v1 import federation_pb2 as pb
from silo.admission.run_request import describe_request
from silo.training import trainer
from tests.support import until
from tests.support.fake_coordinator import manifest
from tests.support.hospital import Watched, first
from tests.support.masked import masked_manifest
from tests.support.privacy import DATA, HOSPITAL, TEST, TRAIN, budgeted, hospital_level, private

Usage = namedtuple("Usage", "total used free")


def ask(hospital, **other) -> None:
    asked = pb.Preflight(**{"run_id": hospital.run_id, "manifest_digest": hospital.digest, **other})
    hospital.control.last.send(preflight=asked)


def answers(hospital) -> list[pb.PreflightAnswer]:
    return [a for s in hospital.control.sessions for a in s.got("preflight")]


def answered(hospital, times: int = 1) -> pb.PreflightAnswer:
    until(lambda: len(answers(hospital)) >= times, str([n.text for n in hospital.notices]), seconds=60)
    return answers(hospital)[-1]


def test_it_is_ready_without_a_charge_or_an_example_read_and_the_answer_names_the_manifest(
    started, tmp_path, monkeypatch
):
    ledger = budgeted(tmp_path / "home0")
    hospital = started(private())
    watched, before = Watched(monkeypatch), len(ledger.events())
    ask(hospital)
    found = answered(hospital)
    assert (found.ready, found.code, found.reason) == (True, "", "")
    assert (found.run_id, found.manifest_digest) == (hospital.run_id, hospital.digest)
    assert watched.read == 0
    assert len(ledger.events()) == before
    ask(hospital)
    assert answered(hospital, 2) == found  # asked again, it is looked at again
    first(hospital)  # and the run goes on from there
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["SPENT"]


@pytest.mark.parametrize("least", ["", "min_count = 100", "min_examples = 100"])
def test_a_plain_runs_answer_names_the_classes_trained_except_what_the_question_excepts(started, tmp_path, least):
    """min_examples is of exact sums alone, which this method has none of."""
    run = manifest()
    counts = torch.bincount(datasets.load(DATA).train.labels, minlength=len(run.schema.classes))
    hidden = int(counts.argmax())
    (tmp_path / "home0").mkdir(mode=0o700)
    policy = f"[prototypes]\nhidden = ['{run.schema.classes[hidden]}']\n{least}\n"
    (tmp_path / "home0/policy.toml").write_text(policy)
    hospital = started(run)
    ask(hospital)
    enough = 100 if "min_count" in least else 1
    assert list(answered(hospital).trains) == [c for c, n in enumerate(counts.tolist()) if n >= enough and c != hidden]
    question = describe_request(CompiledRun.of(run))
    assert question.endswith(
        "; before round 1 the coordinator learns which classes this hospital trains, except those that its policy "
        "hides "
        "and those below its smallest counts"
    )


def test_the_question_of_a_masked_run_says_that_classes_are_counted_and_that_of_a_private_one_says_nothing():
    alone = "for a class that only this hospital has, the sums are its own contribution, without its name"
    question = describe_request(CompiledRun.of(masked_manifest(secagg=Secagg(1, census=True))))
    assert "; before round 1 the number of hospitals per class is counted under masks; " + alone in question
    for run in (private(), masked_manifest(secagg=Secagg(1)), manifest(rounds=0)):
        assert "before round 1" not in describe_request(CompiledRun.of(run))


def test_a_task_of_another_manifest_is_refused_after_the_preflight(started, tmp_path):
    ledger = budgeted(tmp_path / "home0")
    hospital = started(private())
    ask(hospital)
    assert answered(hospital).ready
    other = replace(hospital.manifest, rounds=9)
    hospital.digest = hospital.transfer.offer(other.to_json().encode())
    hospital.offer()
    assert hospital.refused().code == "E-RUN-33"
    ask(hospital)
    assert answered(hospital, 2).code == "E-RUN-33"
    assert ledger.entries(TRAIN) == []


def test_a_manifest_that_was_refused_binds_the_run_to_nothing(started, tmp_path):
    budgeted(tmp_path / "home0", epsilon=0.5)
    hospital = started(private())
    ask(hospital)
    assert answered(hospital).code == "E-BUDGET-01"
    smaller = private(epsilon=0.4)
    hospital.digest = hospital.transfer.offer(smaller.to_json().encode())
    ask(hospital)
    assert answered(hospital, 2).ready


@pytest.mark.parametrize("level", ["records", "hospital"])
def test_the_whole_run_must_fit_the_budget_that_a_round_fits(started, tmp_path, level):
    """Of the hospital, of training records, of test records: whichever is short, at either level."""
    run = private() if level == "records" else hospital_level()
    ledger = budgeted(tmp_path / "home0", 200.0, 200.0)
    hospital = started(run)
    collections = [TRAIN, TEST] + ([HOSPITAL] if level == "hospital" else [])
    times = 0
    for collection in collections:
        for each in collections:
            ledger.set_budget(each, 200.0, 1e-5, "dpo", "test")
        ledger.set_budget(collection, 0.01, 1e-5, "dpo", "withdrawn")
        ask(hospital)
        times += 1
        found = answered(hospital, times)
        assert (found.ready, found.code) == (False, "E-BUDGET-01")
        assert not any(c.isdigit() for c in found.reason)
        assert ledger.entries(collection) == []
    ledger.set_budget(collection, 200.0, 1e-5, "dpo", "test")
    ask(hospital)
    assert answered(hospital, times + 1).ready


def test_the_whole_of_a_silo_level_run_is_every_round_and_the_last_evaluation():
    run = hospital_level(clipping="adaptive", bit_noise=20.0)
    guard = silo_level(RunSetup.of(run))
    releases = [r for t in range(run.rounds + 1) for r in silo_releases(guard, t < run.rounds)]
    found = CompiledRun.of(run).profile.charges(1)
    assert set(found) == {"hospital", "train", "test"}
    for split, mechanisms in found.items():
        assert aggregated(mechanisms) == aggregated([r.mechanism for r in releases if r.collection == split])
    assert CompiledRun.of(replace(run, privacy=NamedOptions("none", {}))).profile.charges(1) == {}


def test_class_counts_that_were_released_before_are_not_asked_for_again():
    run = private("fedgela")
    fewer, more = (
        CompiledRun.of(run).profile.charges(1, counts=False)["train"],
        CompiledRun.of(run).profile.charges(1)["train"],
    )
    assert len(more) == len(fewer) + 1
    assert CompiledRun.of(run).profile.charges(1, prototypes=False)["train"] == more  # this method sends none


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"software": "consilium-fl 0.0.1"}, "E-WIRE-01"),
        ({"privacy": NamedOptions("dp_record", {"rng": "secure", "epsilon": 9.0})}, "E-POLICY-05"),
        ({"layout": {}}, "E-WIRE-06"),
        ({"name": "of nobody", "members": ()}, "E-PRIV-20"),
    ],
)
def test_software_policy_layout_and_roster_are_looked_at(started, tmp_path, changed, code):
    ledger = budgeted(tmp_path / "home0")
    hospital = started(replace(private(), **changed))
    ask(hospital)
    found = answered(hospital)
    assert (found.ready, found.code) == (False, code)
    assert ledger.entries(TRAIN) == ledger.entries(TEST) == []


def test_a_manifest_that_names_a_file_of_this_machine_is_refused_unread(started, tmp_path, monkeypatch):
    ledger = budgeted(tmp_path / "home0")
    hospital = started(private())
    monkeypatch.setattr("fl_core.models.efficientnet.image_shape", lambda *_, **__: None)  # digits are too small for it
    secret = tmp_path / "doe.pth"
    torch.save({"features.0.0.weight": torch.zeros(3)}, secret)
    pretrained = NamedOptions("efficientnet_b0", {"weights": str(secret), "norm": "frozen"})
    hospital.digest = hospital.transfer.offer(replace(hospital.manifest, model=pretrained).to_json().encode())
    ask(hospital)
    found = answered(hospital)
    assert (found.ready, found.code) == (False, "E-CFG-02")
    assert "tensors" not in found.reason
    assert ledger.entries(TRAIN) == []


def test_too_little_memory_names_the_physical_batch_and_too_little_disk_the_need(started, tmp_path, monkeypatch):
    budgeted(tmp_path / "home0")
    hospital = started(private())
    built = build_model("digits_cnn", {}, hospital.manifest.schema, 3)
    for free in (5 << 20, 6 << 20):  # the model alone fits
        monkeypatch.setattr(memory, "free_memory", lambda _, free=free: free)
        ask(hospital)
        found = answered(hospital, len(answers(hospital)) + 1)
        assert found.code == "E-RUN-38"
        assert "privacy.physical_batch=1" in found.reason
        assert f"with {release_plan(RunSetup.of(hospital.manifest), 1).rows} examples at once" in found.reason
    reasons = {a.reason for a in answers(hospital)}
    assert len(reasons) == 1  # what is free at the hospital is not told
    monkeypatch.setattr(memory, "free_memory", lambda _: 1 << 30)
    need = trainer.OBJECTS * trainer.state_bytes(built)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10 * need, 0, need - 1))
    ask(hospital)
    assert answered(hospital, 3).code == "E-RUN-38"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10 * need, 0, need))
    ask(hospital)
    assert answered(hospital, 4).ready


@pytest.mark.fault(
    "a hospital",
    "has too little memory for a run without privacy",
    "refused before round 1 (E-RUN-38), with the batch size that fits",
)
def test_a_run_without_privacy_is_refused_with_its_need_and_the_part_of_a_batch_that_fits(
    started, tmp_path, monkeypatch
):
    hospital = started(manifest(train=TrainConfig(epochs=1, batch_size=8192)))
    monkeypatch.setattr(memory, "free_memory", lambda _: 32 << 20)
    ask(hospital)
    found = answered(hospital)
    assert (found.ready, found.code) == (False, "E-RUN-38")
    need, part = re.fullmatch(
        r"digits_cnn with 8192 examples at once needs about (\d+) MiB of free memory on cpu, and there is less: "
        r"train\.micro_batch=(\d+) fits here and adds up to the same steps",
        found.reason,
    ).groups()
    assert int(need) > 100
    smaller = replace(hospital.manifest, train=replace(hospital.manifest.train, micro_batch=int(part)))
    hospital.run_id, hospital.digest = "run-2", hospital.transfer.offer(smaller.to_json().encode())
    ask(hospital)
    assert answered(hospital, 2).ready
    larger = replace(smaller, train=replace(smaller.train, micro_batch=2 * int(part)))
    hospital.run_id, hospital.digest = "run-3", hospital.transfer.offer(larger.to_json().encode())
    ask(hospital)
    assert answered(hospital, 3).code == "E-RUN-38"


def test_a_task_that_no_preflight_came_before_is_refused_before_it_trains(started, tmp_path, monkeypatch):
    hospital = started(manifest(train=TrainConfig(epochs=1, batch_size=8192)))
    monkeypatch.setattr(memory, "free_memory", lambda _: 32 << 20)
    hospital.offer()
    assert hospital.refused().code == "E-RUN-38"
    assert "training" not in hospital.events()


def test_a_question_that_names_no_run_is_left_out_and_the_service_goes_on(started, tmp_path):
    budgeted(tmp_path / "home0")
    hospital = started(private())
    ask(hospital, run_id="../../etc")
    until(lambda: "trouble" in hospital.events(), seconds=20)
    ask(hospital, manifest_digest="no digest")
    assert answered(hospital).code == "E-WIRE-06"
    ask(hospital)
    assert answered(hospital, 2).ready


def test_the_end_of_a_run_ends_the_wait_for_its_approval(make, tmp_path):
    budgeted(tmp_path / "home0", policy='[privacy]\nrng = "test"\n[runs]\napprove = "by hand"\n')
    hospital = make(private())
    service = hospital.start()
    ask(hospital)
    until(lambda: "approval" in hospital.events(), seconds=60)
    assert service.pulse().activity == pb.AWAITING_APPROVAL
    hospital.control.last.send(run_ended=pb.RunEnded(run_id=hospital.run_id, state="aborted"))
    until(lambda: "ended" in hospital.events(), seconds=20)
    assert service.store.approvals.all() == []  # nobody has to decide about it any more
    hospital.run_id = "run-2"
    ask(hospital)
    until(lambda: hospital.events().count("approval") >= 2, 60)
    service.store.approvals.decide("run-2", True)
    assert answered(hospital).run_id == "run-2"
    assert len(answers(hospital)) == 1
