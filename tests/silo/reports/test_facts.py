"""What the page and the commands say: held against real updates, the ledger's own refusals, and another accountant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_core import datasets
from fl_core.errors import RefusedError
from fl_core.methods import METHODS, build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import EvaluationTerms, NamedOptions
from fl_core.types.values import Part
from privacy.accounting.accountant import ORDERS, RENYI
from privacy.compiled_run import CompiledRun
from privacy.ledger.run_ledger import RunLedger
from privacy.policy import Policy
from privacy.policy_terms import PRIVATE_PROFILES
from privacy.profiles import PROFILES
from protos.wire.codec import pack_bundle
from silo.admission.run_request import privacy_of, request_of, update_contents
from silo.reports.disclosure import UpdateContents
from silo.reports.questions import PendingDecision, PolicyAndLedger
from silo.reports.run_request import RunRequest
from silo.reports.spending import preview, spending, unprotected, version_of
from silo.storage.approvals import Approval
from silo.storage.home import Home
from silo.storage.tasks import UnprotectedUpdate
from tests.support.fake_coordinator import manifest
from tests.support.hospital import RUN, spent
from tests.support.privacy import DATA, TEST, TRAIN, budgeted, hospital_level, private

SECURE = "[privacy]\nepsilon = 8\n"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_update_is_larger_than_what_is_said_to_leave_nor_much_smaller(method) -> None:
    run = CompiledRun(manifest(method=NamedOptions(method, {})))
    precision = torch.float64 if run.method.exact else torch.float32
    found, layout = update_contents(run), run.manifest.layout
    bundle = {
        name: Part(
            {k: torch.zeros(s, dtype=precision) for k, s in spec.shapes.items()},
            torch.zeros(spec.weight_shape, dtype=precision),
        )
        for name, spec in layout.items()
    }
    size = len(pack_bundle(bundle))
    assert size <= found.most_bytes
    assert precision.itemsize * found.numbers <= size
    assert all(word for word in found.descriptions())
    assert UpdateContents.from_json(found.to_json()) == found


@pytest.mark.parametrize("mode", ["plain", "secagg"])
def test_a_method_that_sends_class_counts_is_said_to_send_them(mode) -> None:
    schema = datasets.schema_of("digits")
    layout = derive_layout(build_method("fedgen", {"mode": mode}), build_model("digits_cnn", {}, schema, 3), schema)
    words = update_contents(CompiledRun(replace(manifest(), layout=layout))).descriptions()
    assert sum("training images of each class" in word for word in words) == 1
    assert not [word for word in words if "the part" in word]


def test_a_request_is_read_as_it_was_written_down() -> None:
    for run in (manifest(), private(rng="secure"), hospital_level()):
        compiled = CompiledRun.of(run)
        for silo in ("center1", "stranger"):
            request = request_of(compiled, silo, submits=True)
            assert RunRequest.from_json(request.to_json()) == request
            assert (request.charges is None) is (silo == "stranger")


def test_what_of_an_evaluation_leaves_is_said_beside_the_word_of_the_policy() -> None:
    run = manifest(evaluation=EvaluationTerms("clinical"))
    layout = derive_layout(build_method("fedavg", {}), build_model("digits_cnn", {}, run.schema, 3), run.schema)
    every = derive_layout(
        build_method("fedavg", {}), build_model("digits_cnn", {}, run.schema, 3), run.schema, metrics="clinical"
    )
    said = {
        (metrics, send): next(
            (row.requested, row.policy)
            for row in request_of(
                CompiledRun.of(replace(run, evaluation=EvaluationTerms(metrics), layout=found)), "center1", submits=True
            ).compare(Policy.parse(f"[evaluation]\nsend = '{send}'\n".encode()))
            if row.what == "Results on test images"
        )
        for metrics, found in (("basic", layout), ("clinical", every))
        for send in ("clinical", "accuracy", "nothing")
    }
    assert said["basic", "clinical"] == (
        "correct answers per class; 3 models, counted exactly: of a class with one test image here, the counts "
        "reveal the model's answer for that image",
        "all of it leaves; 0 of at most 100 runs a day evaluated models here",
    )
    assert "confusion matrix" in said["clinical", "accuracy"][0]
    assert said["clinical", "accuracy"][1].startswith("only correct answers per class leave; ")
    assert said["clinical", "nothing"][1] == "nothing leaves"
    described = update_contents(CompiledRun(replace(run, layout=every))).descriptions()
    assert sum("score histograms" in text for text in described) == 1


@pytest.mark.parametrize(("budget", "before"), [(8.0, 0), (8.0, 40), (3.0, 40), (0.5, 0), (2.0, 0)])
def test_a_run_fits_on_the_page_just_when_the_preflight_would_let_it_begin(tmp_path, budget, before) -> None:
    ledger = budgeted(tmp_path / "home", epsilon=max(budget, 8.0 if before else budget), policy=SECURE)
    if before:
        spent(ledger, before)
        ledger.set_budget(TRAIN, budget, 1e-5, "dpo", "less")
    run = CompiledRun.of(private(epsilon=2.0, rng="secure"))
    request = request_of(run, "center1", submits=True)
    found = preview(ledger, None, request)
    assert found is not None
    dataset = datasets.load(DATA)
    code = ""
    try:
        RunLedger(ledger, run, dataset).require(run.profile.charges(1, True, True))
    except RefusedError as error:
        code = error.code
    assert code == ("" if all(p.fits for p in found) else "E-BUDGET-01")
    assert {p.before.collection for p in found} == {TRAIN, TEST}
    assert preview(ledger, None, request, dataset.fingerprint) == found


@pytest.mark.slow  # Opacus takes seconds to load; the test above holds the same numbers against the preflight
def test_what_would_be_spent_is_what_another_accountant_computes(tmp_path) -> None:
    from opacus.accountants import RDPAccountant

    ledger = budgeted(tmp_path / "home", policy=SECURE)
    spent(ledger)
    run = CompiledRun.of(private(epsilon=3.0, rng="secure"))
    (found,) = [
        p for p in preview(ledger, None, request_of(run, "center1", True)) or () if p.before.collection == TRAIN
    ]
    accountant = RDPAccountant()
    accountant.history = [
        (m.noise, m.rate, m.steps) for m in [*ledger.history(TRAIN), *run.profile.charges(1)["train"]]
    ]
    wanted = accountant.get_epsilon(1e-5, alphas=list(ORDERS))
    assert found.after.spent == pytest.approx(wanted, rel=1e-6)
    assert found.before.spent == ledger.status(TRAIN).spent_rdp
    assert ledger.status(TRAIN).spent_rdp == pytest.approx(found.before.spent)  # nothing was charged by looking


def test_a_budget_of_the_policy_counts_as_well_and_the_tighter_one_is_shown(tmp_path) -> None:
    ledger = budgeted(tmp_path / "home", policy=SECURE)
    spent(ledger)
    policy = Policy(budgets={TRAIN: (5.0, 1e-5)})
    loose, tight = spending(ledger, None, TRAIN), spending(ledger, policy, TRAIN)
    assert (loose.limit, tight.limit) == (8.0, 5.0)
    assert tight.used is not None
    assert loose.used is not None
    assert tight.used > loose.used
    run = CompiledRun.of(private(epsilon=3.0, rng="secure"))
    request = request_of(run, "center1", submits=True)
    assert all(p.fits for p in preview(ledger, None, request) or ())
    assert not all(p.fits for p in preview(ledger, policy, request) or ())


def test_a_collection_without_a_budget_is_said_to_be_refused(tmp_path) -> None:
    ledger = budgeted(tmp_path / "home", policy=SECURE)
    request = request_of(CompiledRun.of(hospital_level()), "center1", submits=True)
    found = {p.before.collection: p for p in preview(ledger, None, request) or ()}
    assert not found["hospital"].fits
    assert "hospital has no budget" in found["hospital"].sentence()


def test_several_data_sets_need_the_fingerprint_of_the_one_that_is_served(tmp_path) -> None:
    from privacy.ledger.registration import register, version

    ledger = budgeted(tmp_path / "home", policy=SECURE)
    other = datasets.load("digits/p3c4/2")
    register(ledger, other, "center2")
    request = request_of(CompiledRun.of(private(rng="secure")), "center1", submits=True)
    assert preview(ledger, None, request) is None
    found = preview(ledger, None, request, other.fingerprint)
    assert {p.before.collection for p in found or ()} == {"center2/train", "center2/test"}
    assert version_of(other.fingerprint, "train") == version(other, "train")


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '{"charges": null}', '{"method": 1}', "[" * 9999])
def test_a_request_that_cannot_be_read_is_shown_by_its_sentence_alone(tmp_path, text) -> None:
    asked = Approval("run", "m" * 64, "name", "what it asks", 1.0, None, text)
    found = PendingDecision.of(asked, PolicyAndLedger.of(Home(tmp_path / "home")))
    assert (found.request, found.previews, found.comparisons) == (None, None, ())
    assert "unknown" in found.spends


def test_the_names_that_a_policy_knows_are_those_of_the_private_profiles() -> None:
    assert sorted(PRIVATE_PROFILES) == sorted(name for name in PROFILES if name != "none")


def test_reading_a_home_without_a_ledger_makes_none(tmp_path) -> None:
    home = Home(tmp_path / "home")
    assert PolicyAndLedger.of(home) == PolicyAndLedger(Policy(), "", None, "")
    assert not home.path.exists()


def test_a_known_error_is_kept_as_words(tmp_path) -> None:
    budgeted(tmp_path / "home", policy=SECURE)
    home = Home(tmp_path / "home")
    home.ledger_key.write_bytes(b"x" * 32)
    found = PolicyAndLedger.of(home)
    assert found.ledger is None
    assert found.ledger_error.startswith("E-BUDGET-")


@pytest.mark.parametrize("epsilon", [1e-40, 1e-3])
def test_a_budget_too_small_for_anything_is_said_to_be_and_fits_nothing(tmp_path, epsilon) -> None:
    ledger = budgeted(tmp_path / "home", policy=SECURE)
    ledger.set_budget(TRAIN, epsilon, 1e-5, "dpo", "nothing", RENYI)
    found = spending(ledger, None, TRAIN)
    assert (found.closed, found.used) == (True, None)
    assert "too small for any run" in found.sentence()
    request = request_of(CompiledRun.of(private(rng="secure")), "center1", submits=True)
    (train,) = [p for p in preview(ledger, None, request) or () if p.before.collection == TRAIN]
    assert (train.fits, train.more) == (False, 0.0)


def test_a_budget_used_up_many_times_over_is_still_a_share(tmp_path) -> None:
    ledger = budgeted(tmp_path / "home", policy=SECURE)
    spent(ledger)
    ledger.set_budget(TRAIN, 0.1, 1e-5, "dpo", "less")
    found = spending(ledger, None, TRAIN)
    assert found.used is not None
    assert found.used > 1
    assert "of 0.1 is spent" in found.sentence()


def test_a_request_stands_beside_what_the_policy_says_of_it() -> None:
    policy = Policy.parse(
        b"[runs]\nleads = ['anna']\nmethods = ['fedmr']\nextensions = ['their-methods']\n"
        b"[privacy]\nrequire = 'dp_record'\nepsilon = 4\n[prototypes]\nhidden = ['3']\nmin_count = 5\n"
    )
    run = private(epsilon=2.0, rng="secure")
    request = replace(request_of(CompiledRun.of(run), "center1", True), lead="bob", extensions=("a:B of d 1",))
    found = {c.what: (c.requested, c.policy) for c in request.compare(policy)}
    assert request.spends is not None
    assert 1 < request.spends < 2
    assert found["Asked for by"] == ("bob", "anna")
    assert found["Method"] == ("fedavg", "fedmr")
    assert found["Code of others"] == ("a:B of d 1", "their-methods")
    assert found["Privacy"] == (
        f"epsilon 2 at delta 1e-05 for each record (dp_record); {request.spends:.2f} is actually spent if no round is "
        "repeated",
        "at most epsilon 4 at delta 1e-05, only dp_record",
    )
    assert found["Noise"] == ("from a secret source", "only secret noise")
    assert found["Class prototypes"] == (
        "not asked for",
        "may leave, but not of 3, but only of classes with at least 5",
    )
    plain = {
        c.what: (c.requested, c.policy) for c in request_of(CompiledRun.of(manifest()), "center1", True).compare(policy)
    }
    assert plain["Privacy"] == ("no differential privacy", "only dp_record")
    assert "Code of others" not in plain


BOTH = ("test", "train")


def test_a_guarantee_speaks_of_private_runs_and_counts_the_updates_that_left_without_privacy_beside_it(
    tmp_path,
) -> None:
    ledger = budgeted(tmp_path / "home", policy=SECURE)
    spent(ledger)
    mine = datasets.load(DATA).fingerprint
    found = spending(ledger, None, TRAIN)
    assert "in private runs. From these runs alone" in found.sentence()
    assert found.warning == ""
    updates = [UnprotectedUpdate(run, mine, splits) for run, splits in (("a", BOTH), ("a", BOTH), ("b", ("test",)))]
    of = {name: spending(ledger, None, name, updates=updates) for name in (TRAIN, TEST, "hospital")}
    assert (
        of[TRAIN].warning == "2 updates of these records left without noise, in 1 run: no privacy bound holds for them."
    )
    assert (of[TEST].unprotected.updates, of[TEST].unprotected.runs) == (3, 2)
    assert of["hospital"].warning.startswith("3 updates of this hospital's records left without noise, in 2 runs")
    assert of[TRAIN].sentence() == found.sentence()


def test_updates_of_the_same_records_under_another_version_count_and_those_of_other_records_do_not(tmp_path) -> None:
    from privacy.ledger.registration import register

    ledger = budgeted(tmp_path / "home", policy=SECURE)
    other = datasets.load("digits/p3c4/2")
    register(ledger, other, "center2")
    again = "f" * 64  # as it is where a record was added
    ledger.register(TRAIN, "record", version_of(again, "train"), 508, ["content new"])
    ledger.register(TEST, "record", version_of(again, "test"), 90, ["content of a test"])
    updates = [UnprotectedUpdate("a", again, BOTH), UnprotectedUpdate("b", other.fingerprint, BOTH)]
    assert (unprotected(ledger, TRAIN, updates).updates, unprotected(ledger, "center2/train", updates).updates) == (
        1,
        1,
    )
    assert unprotected(ledger, "hospital", updates).updates == 2


def test_updates_of_data_that_the_ledger_does_not_know_count_for_every_collection_and_are_said_to(tmp_path) -> None:
    """Copied files, another label, a part of a collection: they may be the same records, so none is left out."""
    ledger = budgeted(tmp_path / "home", policy=SECURE)
    updates = [UnprotectedUpdate("a", "e" * 64, BOTH), UnprotectedUpdate("b", "", ("train",))]
    for name in (TRAIN, TEST):
        found = unprotected(ledger, name, updates)
        assert (found.updates, found.unregistered) == (2, 2)
        assert (
            "2 of them used data that is not registered in the ledger and may contain the same records"
            in found.sentence()
        )
    ledger.register(TRAIN, "record", version_of("e" * 64, "train"), 9, ["content new"])
    half = [UnprotectedUpdate("a", "e" * 64, ("test",))]  # whose registration was refused after its training records
    assert unprotected(ledger, TEST, half).updates == 1


def test_what_an_earlier_version_sent_counts_unless_its_run_was_charged_for_such_records(tmp_path) -> None:
    ledger = budgeted(tmp_path / "home", policy=SECURE)
    spent(ledger)
    mine = datasets.load(DATA).fingerprint
    updates = [UnprotectedUpdate(RUN, mine, None), UnprotectedUpdate("plain", mine, None)]
    assert unprotected(ledger, TRAIN, updates).updates == 1  # of the run that the ledger knows training was charged
    assert unprotected(ledger, TEST, updates).updates == 2  # and its evaluations were not
    assert unprotected(ledger, "hospital", updates).updates == 2


def test_noise_that_can_be_repeated_and_results_that_are_counted_exactly_are_no_privacy() -> None:
    def of(run):
        compiled = CompiledRun.of(run)
        return sorted(compiled.profile.protected), privacy_of(compiled)

    assert of(manifest()) == ([], "no privacy: the coordinator reads this hospital's update by itself")
    read = "the coordinator reads this hospital's update by itself"
    assert of(private(rng="secure")) == (["test", "train"], f"epsilon 8 at delta 1e-05 for each record: {read}")
    assert of(private(rng="secure", test_data="public"))[0] == ["train"]
    for run in (private(), hospital_level(), hospital_level(rng="secure", placement="central")):
        protected, said = of(run)
        assert protected == []
        assert said.startswith("no privacy: epsilon 8")
    assert of(hospital_level(rng="secure"))[0] == ["test", "train"]
