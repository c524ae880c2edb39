"""A hospital's policy in its service: it wins over the run, and what leaves says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_core import datasets
from fl_core.errors import RefusedError
from fl_core.methods import build_method
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import EvaluationTerms, NamedOptions
from fl_core.types.secagg import Secagg
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger
from privacy.policy import Policy
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import BundleFile
from silo.admission.policy_in_force import in_force
from silo.admission.run_request import privacy_of, warn_of_few
from silo.reports.disclosure import disclosures_of
from silo.reports.spending import unprotected
from silo.storage.home import Home
from silo.training import evaluation_summary
from tests.support import until
from tests.support.fake_coordinator import manifest
from tests.support.hospital import Watched, first, upload
from tests.support.masked import masked_manifest
from tests.support.privacy import DATA, SEEDED_POLICY, TEST, TRAIN, budgeted, private


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ("", "E-POLICY-05"),
        ("[runs]\nmethods = ['fedmr']\n", "E-POLICY-02"),
        ("[runs]\nleads = ['alice']\n", "E-POLICY-03"),
        ("[runs]\nhide_size = true\n", "E-POLICY-06"),
        ("[privacy]\nrng = 'test'\nepsilon = 4\n", "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\ndelta = 1e-7\n", "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\nmin_noise = 50.0\n", "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\nmax_rate = 0.01\n", "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\nunit = 'group'\n", "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\ncoupled = ['off']\n", "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\nepsilom = 4\n", "E-POLICY-01"),
        ("[privasy]\n", "E-POLICY-01"),
        ("runs = = 1", "E-POLICY-01"),
        ("[budget.'center1/train']\nepsilon = 0.1\ndelta = 1e-5\n[privacy]\nrng = 'test'\n", "E-BUDGET-01"),
    ],
)
def test_the_policy_wins_over_the_run_and_fails_closed(started, tmp_path, monkeypatch, policy, code):
    ledger = budgeted(tmp_path / "home0", policy=policy)
    hospital = started(private())
    watched = Watched(monkeypatch)
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == code
    assert not any(character.isdigit() for character in refused.reason.replace("0.001", ""))
    assert watched.read == 0
    assert ledger.history(TRAIN) == []
    if code != "E-POLICY-01":
        assert [state for _, _, state, _, _ in ledger.events() if state == "REFUSED"]


@pytest.mark.parametrize(
    "policy",
    ["", "min_noise_alone = 0\n[prototypes]\nsubmit = false\n", "min_noise_alone = 0\n[prototypes]\nmin_count = 3\n"],
)
def test_a_hospital_refuses_to_share_noise_that_it_would_not_bear_or_not_add(started, tmp_path, monkeypatch, policy):
    ledger = budgeted(tmp_path / "home0", policy=f"{SEEDED_POLICY}{policy}")
    run = private("analytic", {"release": "noisy"}, placement="distributed")
    hospital = started(replace(run, secagg=Secagg(1)))
    watched = Watched(monkeypatch)
    hospital.offer()
    assert hospital.refused().code == "E-POLICY-05"
    assert watched.read == 0
    assert ledger.history(TRAIN) == []
    assert [state for _, _, state, _, _ in ledger.events() if state == "REFUSED"]


def test_a_plain_run_is_refused_where_privacy_is_required(started, tmp_path):
    budgeted(tmp_path / "home0", policy="[privacy]\nrequire = 'dp_record'\n")
    hospital = started(manifest())
    hospital.offer()
    assert hospital.refused().code == "E-POLICY-05"


def test_the_digest_of_the_policy_goes_with_the_session_and_with_every_update(make, tmp_path):
    import hashlib

    budgeted(tmp_path / "home0")
    hospital = make(private())
    service = hospital.start()
    wanted = hashlib.sha256(SEEDED_POLICY.encode()).hexdigest()
    assert hospital.control.last.hello.policy_digest == wanted
    first(hospital)
    (opened,) = hospital.transfer.opened.values()
    assert opened.attestation.policy_digest == wanted
    (kept,) = service.store.receipts()
    assert pb.Receipt.FromString(kept).attestation == opened.attestation


@pytest.mark.parametrize("approved", [True, False])
def test_a_run_waits_for_the_hospitals_decision(make, tmp_path, monkeypatch, approved):
    (tmp_path / "home0").mkdir(mode=0o700)
    (tmp_path / "home0/policy.toml").write_text("[runs]\napprove = 'by hand'\n")
    hospital = make(manifest())
    service = hospital.start()
    watched = Watched(monkeypatch)
    hospital.offer()
    until(lambda: "approval" in hospital.events())
    assert service.pulse().activity == pb.AWAITING_APPROVAL
    assert watched.read == 0
    assert hospital.answers() == []
    (asked,) = service.store.approvals.all()
    assert asked.about == (
        "fedavg on digits, 2 rounds, without differential privacy; "
        "the coordinator reads this hospital's update by itself; "
        "3 models evaluated on test images here, counted exactly; before round 1 the coordinator learns which classes "
        "this hospital trains, except those that its policy hides and those below its smallest counts"
    )
    service.store.approvals.decide("run-1", approved)
    if approved:
        hospital.sent()
    else:
        assert hospital.refused().code == "E-POLICY-07"
        assert watched.read == 0


def test_withheld_classes_are_zeros_and_the_others_are_as_before(make, tmp_path):
    (tmp_path / "home0").mkdir(mode=0o700)
    labels = datasets.load(DATA).train.labels
    counts = torch.bincount(labels, minlength=10)
    present = torch.nonzero(counts).flatten().tolist()
    hidden, rare = present[0], int(counts[present].min())
    bundles = []
    for policy in ("", f"[prototypes]\nhidden = ['{hidden}']\nmin_count = {rare + 1}\n"):
        (tmp_path / "home0/policy.toml").write_text(policy)
        hospital = make(private("fedmr", epsilon=float("inf")), folder=tmp_path / "home0")
        hospital.run_id = f"run-{len(bundles)}"
        hospital.start()
        first(hospital)
        (raw,) = hospital.transfer.uploads.values()
        (tmp_path / hospital.run_id).write_bytes(bytes(raw))
        bundles.append(BundleFile(tmp_path / hospital.run_id)["prototypes"])
        hospital.stop()
    free, held = bundles
    withheld = counts <= rare
    withheld[hidden] = True
    assert torch.equal(free.weight > 0, counts > 0)
    assert torch.equal(held.weight > 0, ~withheld)
    assert torch.equal(held.weight[~withheld], free.weight[~withheld])
    for name, rows in held.total.items():
        assert (rows[withheld] == 0).all()
        assert torch.equal(rows[~withheld], free.total[name][~withheld])


@pytest.mark.parametrize(
    ("policy", "left_out"),
    [("", False), ("[prototypes]\nmin_examples = 10000\n", True), ("[prototypes]\nsubmit = false\n", True)],
)
def test_the_policy_keeps_small_classes_out_of_exact_sums(started, tmp_path, caplog, policy, left_out):
    (tmp_path / "home0").mkdir(mode=0o700)
    (tmp_path / "home0/policy.toml").write_text(policy)
    hospital = started(manifest(method=NamedOptions("analytic", {"head": "ridge"})), folder=tmp_path / "home0")
    first(hospital)
    (raw,) = hospital.transfer.uploads.values()
    (tmp_path / "bundle").write_bytes(bytes(raw))
    bundle = BundleFile(tmp_path / "bundle")
    assert disclosures_of(hospital.service.store).verdict == "No image has left this hospital"
    assert bool(bundle["moments"].total["a"].any()) is not left_out
    assert bool(bundle["classes"].total["b"].any()) is not left_out
    assert "second moments" not in caplog.text  # 507 records, 64 features


def test_a_hospital_is_warned_where_exact_sums_show_what_its_records_span(started, caplog):
    choice = NamedOptions("random_features", {"width": 600})
    run = manifest(method=NamedOptions("analytic", {}), model=choice)
    network = build_model(choice.name, choice.options, run.schema, 0)
    run = replace(run, layout=derive_layout(build_method("analytic", {}), network, run.schema))
    hospital = started(run)
    first(hospital)
    assert caplog.text.count("second moments of 600 numbers leave without noise") == 1
    assert "507" not in "".join(caplog.messages)


def test_a_warning_of_exact_sums_says_who_reads_them(caplog):
    choice = {"method": NamedOptions("analytic", {}), "model": NamedOptions("random_features", {"width": 600})}
    for run in (manifest(**choice), masked_manifest(**choice)):
        caplog.clear()
        warn_of_few(CompiledRun(run), 507)
        assert ("updates leave under masks" in caplog.text) is (run.secagg is not None)
        assert "507" not in "".join(caplog.messages)


def test_the_declared_size_is_rounded_and_never_the_true_one(started, tmp_path):
    hospital = started()
    assert len(datasets.load(DATA).train) == 507
    assert hospital.control.last.hello.data.nominal_size == 510
    assert not Ledger(tmp_path / "unused.db").collections()


@pytest.mark.integration
@pytest.mark.parametrize(("policy", "sent"), [("submit = true", 1), ("submit = false", 0)])
def test_a_hospitals_own_opt_out_is_neither_released_nor_charged(started, tmp_path, policy, sent):
    ledger = budgeted(tmp_path / "home0", policy=f"{SEEDED_POLICY}[prototypes]\n{policy}\nmin_count = 10000\n")
    hospital = started(private("fedproc"))
    first(hospital)
    purposes = [p.purpose for _, _, planned in ledger.entries(TRAIN) for p in planned]
    assert purposes.count("prototypes") == sent
    (raw,) = hospital.transfer.uploads.values()
    (tmp_path / "bundle").write_bytes(bytes(raw))
    bundle = BundleFile(tmp_path / "bundle")
    weight = next(p.weight for name, p in bundle.items() if name != "metrics" and p.weight.shape == (10,))
    assert (weight == 0).all()  # submitted or not: no class has so many records


def test_a_hidden_class_that_the_run_does_not_know_closes_the_hospital(started, tmp_path):
    budgeted(tmp_path / "home0", policy=f"{SEEDED_POLICY}[prototypes]\nhidden = ['sevn']\n")
    hospital = started(private())
    hospital.offer()
    assert hospital.refused().code == "E-POLICY-09"


@pytest.mark.parametrize(
    ("send", "there"),
    [("clinical", {"metrics", "clinical"}), ("accuracy", {"metrics"}), ("nothing", set())],
)
def test_the_policy_says_what_of_an_evaluation_leaves_and_the_hospital_sees_all(make, started, tmp_path, send, there):
    """What is withheld has weight 0: the update keeps its layout, and the model trains on."""
    Home(tmp_path / "home0").make().policy.write_text(f"[evaluation]\nsend = '{send}'\n")
    run = manifest(evaluation=EvaluationTerms("clinical"))
    layout = derive_layout(FedAvg(), build_model("digits_cnn", {}, run.schema, 3), run.schema, metrics="clinical")
    hospital = started(replace(run, layout=layout))
    first(hospital)
    (tmp_path / "update").write_bytes(upload(hospital))
    sent = BundleFile(tmp_path / "update")
    assert {name for name in ("metrics", "clinical") if sent[name].weight.any()} == there
    assert all(not v.any() for name in {"metrics", "clinical"} - there for v in sent[name].total.values())
    (task,) = hospital.service.store.history()[0].tasks
    shown = evaluation_summary.class_facts(task.evaluation)
    assert sum(shown["examples"]) == shown["clinical"]["examples"] > 0


def test_a_policy_sends_no_more_than_correct_answers_of_an_evaluation_where_it_does_not_say_so() -> None:
    assert Policy.parse(b"[runs]\nleads = ['anna']\n").evaluation.send == "accuracy"
    assert Policy.parse(b"[evaluation]\nsend = 'clinical'\n").evaluation.send == "clinical"


def test_an_empty_policy_file_means_what_no_file_means(tmp_path) -> None:
    """What to do after E-POLICY-13, whose advice is an empty file "to use the defaults"."""
    home = Home(tmp_path / "home").make()
    absent = in_force(home)
    home.policy.touch(mode=0o600)
    empty = in_force(home)
    assert empty.digest
    assert replace(empty, digest="") == absent
    home.policy.unlink()
    with pytest.raises(RefusedError, match=r"touch .*policy\.toml") as caught:
        in_force(home)
    assert caught.value.code == "E-POLICY-13"


def test_a_policy_with_another_word_for_evaluations_closes_the_hospital(make, started, tmp_path):
    Home(tmp_path / "home0").make().policy.write_text("[evaluation]\nsend = 'some'\n")
    hospital = started(manifest())
    hospital.offer()
    assert hospital.refused().code == "E-POLICY-01"


@pytest.mark.parametrize(
    ("run", "policy", "told"),
    [
        (manifest(), "", [("test", "train")]),
        (manifest(), "[evaluation]\nsend = 'nothing'\n", [("train",)]),
        (private(rng="secure"), "[privacy]\nepsilon = 8\n", []),
        (private(rng="secure", test_data="public"), "[privacy]\npublic_test = true\n", [("test",)]),
        (private(), SEEDED_POLICY, [("test", "train")]),
    ],
)
def test_a_hospital_lists_whose_records_an_update_tells_of_without_privacy(make, tmp_path, run, policy, told):
    ledger = budgeted(tmp_path / "home0", policy=policy)
    hospital = make(run)
    service = hospital.start()
    first(hospital)
    assert [update.splits for update in service.store.unprotected()] == told
    splits = {split for update in told for split in update}
    assert unprotected(ledger, TRAIN, service.store.unprotected()).updates == ("train" in splits)
    assert unprotected(ledger, TEST, service.store.unprotected()).updates == ("test" in splits)
    (record,) = disclosures_of(service.store).runs
    assert record.privacy == privacy_of(CompiledRun.of(run))
    assert record.protected is ("train" not in splits)


def test_a_policy_with_a_byte_order_mark_holds_and_one_in_utf_16_is_named(tmp_path):
    text = "[runs]\nmethods = ['fedmr']\n"
    (tmp_path / "policy.toml").write_text(text, encoding="utf-8-sig")
    assert Policy.read(tmp_path / "policy.toml").runs == Policy.parse(text.encode()).runs
    (tmp_path / "policy.toml").write_text(text, encoding="utf-16")
    with pytest.raises(RefusedError, match=r"E-POLICY-01.*UTF-16 \(Excel's Unicode text\): save it as UTF-8"):
        Policy.read(tmp_path / "policy.toml")
