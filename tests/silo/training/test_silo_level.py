"""Silo-level privacy at a hospital: reserved, charged and committed, within the policy, equal to the simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from consilium.research.engines.in_process import SiloShare, local_ports
from fl_core import datasets
from fl_core.errors import RefusedError
from fl_core.methods import build_method
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.rounds.manifest import NamedOptions
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import run_silo_round
from fl_core.types.interfaces import RoundData
from fl_core.types.values import RoundContext
from privacy.accounting.accountant import aggregated, epsilon_of
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from privacy.mechanisms.silo import adaptive_clipping
from privacy.mechanisms.silo.guard import silo_level
from privacy.profiles.silo import silo_releases
from privacy.release_log import InMemoryReleaseLog
from protos.wire.codec import BundleFile
from silo.admission.run_request import describe_request
from silo.reports.disclosure import disclosures_of
from silo.storage.home import Home
from tests.support import some, until
from tests.support.hospital import Watched, rounds_equal
from tests.support.privacy import HOSPITAL, SEEDED_POLICY, TEST, TRAIN, budgeted, examples, hospital_level, private

ROOM = 40.0
"""Of training records: a run of epsilon 8 for the hospital costs each of them more."""


@pytest.fixture
def make(make, tmp_path):
    def hospital(run=None, run_round=run_silo_round, **settings):
        return make(run or hospital_level(), run_round, tmp_path / "home", **settings)

    return hospital


def ledger_of(tmp_path, hospital=8.0, train=ROOM, test=ROOM, policy=SEEDED_POLICY) -> Ledger:
    ledger = budgeted(tmp_path / "home", train, test, policy)
    if hospital:
        ledger.set_budget(HOSPITAL, hospital, 1e-5, "dpo", "test")
    return ledger


def message(run, clip=None):
    """Make what the coordinator broadcasts in round 0."""
    msg = build_method(run.method.name, run.method.options).broadcast(RunSetup.of(run).initial_state())
    return msg if clip is None else {**msg, adaptive_clipping.PART: {"clip": torch.tensor(clip)}}


ADAPTIVE = {"clipping": "adaptive", "bit_noise": 20.0}


@pytest.mark.parametrize("terms", [{}, ADAPTIVE, {"placement": "central"}], ids=["fixed", "adaptive", "central"])
def test_rounds_are_charged_as_planned_and_equal_the_simulation_bit_for_bit(make, tmp_path, terms):
    ledger = ledger_of(tmp_path, policy=SEEDED_POLICY + "central = true\n")
    run = hospital_level(**terms)
    hospital = make(run)
    hospital.start()
    shares = [SiloShare(d.train, d.test) for d in (datasets.load(f"digits/p3c4/{k}") for k in range(3))]
    book = InMemoryReleaseLog()
    doors = [CompiledRun.of(run).profile.data_factory(0, book if k == 1 else InMemoryReleaseLog()) for k in range(3)]
    port = local_ports(CompiledRun.of(run), shares, doors)[1]
    rounds_equal(hospital, port, [message(run, clip if terms is ADAPTIVE else None) for clip in (1.0, 0.7, 0.5)])
    guard = silo_level(RunSetup.of(run))
    planned = [r for t in range(3) for r in silo_releases(guard, t < 2)]
    assert planned == book.releases
    for collection, of in ((HOSPITAL, "hospital"), (TRAIN, "train"), (TEST, "test")):
        wanted = aggregated([r.mechanism for r in planned if r.collection == of])
        assert aggregated(ledger.history(collection)) == wanted
        assert {state for _, state, _ in ledger.entries(collection)} == {"SPENT"}
    assert 0.65 < ledger.status(HOSPITAL).used <= 0.67  # solved for these two rounds and the repetition of one
    assert 6 < epsilon_of(ledger.history(HOSPITAL), 1e-5) <= 8
    assert ledger.status(HOSPITAL).unit == "hospital"
    assert 8 < epsilon_of(ledger.history(TRAIN), 1e-5) < ROOM
    assert len({detail for _, _, state, detail, _ in ledger.events() if state == "SPENT"}) == 3
    (opened,) = list(hospital.transfer.opened.values())[-1:]
    assert disclosures_of(hospital.service.store).verdict == "No image has left this hospital"
    assert opened.attestation.ledger_seq > 10
    assert opened.attestation.policy_digest


def test_a_hospital_without_a_training_step_says_so_in_its_log_alone(caplog):
    """An error would tell that it has a single record."""
    run = hospital_level()
    run = replace(run, model=NamedOptions(run.model.name, {"norm": "batch"}))
    profile = CompiledRun.of(run).profile
    lone = examples(1)
    context = RoundContext(3, 10, 2, 0, 3).for_silo(0, 3)
    data = profile.data_factory(0, InMemoryReleaseLog())(RoundData(lone, lone, run.train, context))
    model = build_model(run.model.name, {"norm": "batch"}, run.schema, 0)
    assert data.sgd(model, FedAvg.loss) == 0
    assert "E-RUN-52" in caplog.text


@pytest.mark.parametrize(
    ("room", "code"),
    [
        ({"hospital": 0.5}, "E-BUDGET-01"),
        ({"hospital": 0}, "E-BUDGET-02"),
        ({"train": 2.0}, "E-BUDGET-01"),
        ({"test": 0.01}, "E-BUDGET-01"),
    ],
    ids=["hospital", "no budget", "training records", "test records"],
)
def test_what_does_not_fit_one_of_the_budgets_is_refused_before_an_example_is_read(
    make, tmp_path, monkeypatch, room, code
):
    ledger = ledger_of(tmp_path, **room)
    hospital = make()
    hospital.start()
    watched = Watched(monkeypatch)
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == code
    assert watched.read == 0
    assert "center1" not in refused.reason
    assert not any(character.isdigit() for character in refused.reason)
    for collection in (HOSPITAL, TRAIN, TEST):
        assert ledger.history(collection) == []


def test_a_task_that_failed_stays_charged_and_its_repetition_is_charged_again(make, tmp_path):
    ledger = ledger_of(tmp_path, hospital=30.0, train=200.0)
    failing = [True]

    def do(*args):
        found = run_silo_round(*args)
        if failing.pop() if failing else False:
            raise OSError("the disk is full")
        return found

    hospital = make(run_round=do)
    hospital.start()
    hospital.offer()
    assert hospital.refused().code == "E-RUN-31"
    assert {state for _, state, _ in ledger.entries(HOSPITAL)} == {"RUNNING"}
    hospital.stop()
    hospital.start()
    assert {state for _, state, _ in ledger.entries(HOSPITAL)} == {"SPENT_ON_RECOVERY"}
    hospital.train()
    assert [e.split("/")[3] for e, _, _ in ledger.entries(HOSPITAL)] == ["0", "1"]
    assert aggregated(ledger.history(HOSPITAL))[0].steps == 2


@pytest.mark.integration
def test_runs_of_records_and_of_hospitals_share_the_records_budget(make, tmp_path):
    """A round of each: the training records pay for both, the hospital for the one that protects it."""
    ledger = ledger_of(tmp_path)
    for k, run in enumerate((private(), hospital_level())):
        hospital = make(run)
        hospital.run_id = f"run-{k}"
        hospital.start()
        hospital.train()
        hospital.stop()
    assert [m.rate < 1 for m in ledger.history(TRAIN)] == [False, True]
    assert len(ledger.entries(HOSPITAL)) == 1
    assert ledger.status(TRAIN).spent_rdp > epsilon_of([m for m in ledger.history(TRAIN) if m.rate == 1], 1e-5)


def test_the_hospital_has_one_budget_whatever_it_serves_under_whatever_names(tmp_path):
    ledger = ledger_of(tmp_path)
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        ledger.register("elsewhere", "hospital", "another version", 1, ["hospital"])
    assert register(ledger, datasets.load("digits/p3c4/0"), "center0")[HOSPITAL]
    assert [c for c in ledger.collections() if "/" not in c] == [HOSPITAL]


@pytest.mark.parametrize(
    ("policy", "terms", "code"),
    [
        ("", {}, "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\nepsilon = 4\n", {}, "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\nmin_noise = 50.0\n", {}, "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\n", {"placement": "central"}, "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\n", {"test_data": "public"}, "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\nrequire = 'dp_record'\n", {}, "E-POLICY-05"),
        ("[privacy]\nrng = 'test'\n[runs]\nhide_size = true\n", {}, "E-POLICY-06"),
        ("[budget.hospital]\nepsilon = 0.1\ndelta = 1e-5\n[privacy]\nrng = 'test'\n", {}, "E-BUDGET-01"),
    ],
)
def test_the_policy_wins_over_the_run(make, tmp_path, monkeypatch, policy, terms, code):
    ledger = ledger_of(tmp_path, policy=policy)
    hospital = make(hospital_level(**terms))
    hospital.start()
    watched = Watched(monkeypatch)
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == code
    assert watched.read == 0
    assert ledger.history(HOSPITAL) == []
    assert [state for _, _, state, _, _ in ledger.events() if state == "REFUSED"]


def test_a_hospital_may_require_the_profile_that_hides_it(make, tmp_path):
    ledger_of(tmp_path, policy="[privacy]\nrng = 'test'\nrequire = 'dp_silo_small'\n")
    hospital = make()
    hospital.start()
    hospital.train()


def test_an_approval_says_whom_epsilon_is_for():
    for run, whom in ((hospital_level(), "the whole hospital"), (private(), "each record")):
        assert f", epsilon 8 at delta 1e-05 for {whom};" in describe_request(CompiledRun.of(run))


HIDING = f"{SEEDED_POLICY}[runs]\nhide_size = true\n"


@pytest.mark.integration
@pytest.mark.parametrize("run", [private, hospital_level], ids=["records", "hospital"])
@pytest.mark.parametrize("method", some(["fedmr", "fedavg", "scaffold", "fedgela"], 4))
def test_a_hospital_that_hides_its_size_counts_once_in_every_run_that_it_accepts(make, tmp_path, run, method):
    options = {"inter_weighting": "example"} if method == "fedmr" else {}
    ledger_of(tmp_path, policy=HIDING)
    made = run(method, options, weights="uniform")
    hospital = make(made, nominal_size=100.0)
    hospital.start()
    assert hospital.control.last.hello.data.nominal_size == 100
    hospital.offer(state=message(made))
    hospital.sent()
    (raw,) = hospital.transfer.uploads.values()
    (tmp_path / "bundle").write_bytes(bytes(raw))
    bundle = BundleFile(tmp_path / "bundle")
    assert {float(part.weight) for part in bundle.values() if not part.weight.dim()} == {1.0}


@pytest.mark.parametrize("terms", [{}, {"weights": "size"}, {"epsilon": float("inf"), "weights": "uniform"}])
@pytest.mark.parametrize("run", [private, hospital_level], ids=["records", "hospital"])
def test_a_hospital_that_hides_its_size_refuses_runs_that_show_it_and_says_what_would_do(make, tmp_path, run, terms):
    ledger_of(tmp_path, policy=HIDING)
    hospital = make(run(**terms))
    hospital.start()
    assert hospital.control.last.hello.data.nominal_size == 0
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == "E-POLICY-06"
    until(lambda: any("privacy.weights=uniform" in n.text for n in hospital.notices))


def test_a_policy_that_cannot_be_read_hides_the_size(make, tmp_path):
    Home(tmp_path / "home").make().policy.write_text("[runs\n")
    hospital = make()
    hospital.start()
    assert hospital.control.last.hello.data.nominal_size == 0


def test_members_without_a_size_count_once_in_a_run_with_uniform_weights():
    run = hospital_level(weights="uniform")
    unknown = replace(run, members=tuple(replace(m, units=0) for m in run.members))
    assert silo_level(RunSetup.of(unknown)).shares == (1.0, 1.0, 1.0)
