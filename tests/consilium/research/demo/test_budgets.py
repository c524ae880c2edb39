"""What the demo's hospitals do about privacy: their files are a silo's own, and what they say is what was projected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consilium.research.demo import RUNS, budgets
from consilium.research.demo.report import CLOSED, LABELS, PLAIN, PRIVATE, REPAIRED, report
from consilium.research.simulate.runner import build_simulation
from coordinator.config.hydra_config import compose_spec
from fl_core import datasets
from fl_core.errors import RefusedError
from fl_core.rounds.manifest import RunManifest
from privacy.accounting.accountant import Mechanism
from privacy.accounting.release_plan import TRAIN
from privacy.compiled_run import CompiledRun
from privacy.ledger import registration
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.registration import unit_of
from privacy.policy import Policy
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import show_reply
from silo.storage.home import Home


@pytest.fixture(scope="module")
def manifest() -> RunManifest:
    """The demo's private run, cut short."""
    return build_simulation(compose_spec([*RUNS[PRIVATE], "rounds=2"]))[0]


@pytest.fixture
def hospitals(manifest: RunManifest, tmp_path: Path) -> dict[str, Ledger]:
    """The hospitals with their budgets, as the demo opens them."""
    made = {}
    for member in manifest.members:
        home = Home(tmp_path / member.name).make()
        budgets.open_budget(home.path, f"digits/{member.name}")
        made[member.name] = Ledger(home.ledger)
    return made


def charge(ledger: Ledger, name: str, mechanism: Mechanism) -> None:
    """Reserve, start and commit one release, as a round does."""
    version = registration.version(datasets.load(f"digits/{name}"), TRAIN)
    entry = ledger.reserve(
        "digits/train", LedgerTask("run", "digest", 0, "train", version), [PlannedRelease("test", mechanism)]
    )
    ledger.start(entry)
    ledger.commit(entry, "sha")


def test_every_run_has_a_label_and_a_colour() -> None:
    assert set(RUNS) == set(LABELS)


def test_all_rows_train_on_the_same_images_and_what_takes_rounds_on_one_network() -> None:
    specs = {name: compose_spec(words) for name, words in RUNS.items()}
    first = specs[PLAIN]
    assert all((spec.data, spec.federation) == (first.data, first.federation) for spec in specs.values())
    assert {name for name, spec in specs.items() if (spec.model, spec.rounds) != (first.model, 20)} == {CLOSED, PRIVATE}


def test_files_lie_where_a_silo_looks_for_them(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert (home.ledger.name, home.policy.name) == (budgets.LEDGER_FILE, budgets.POLICY_FILE)


def test_the_policy_allows_the_private_run_and_nothing_that_asks_for_more(
    manifest: RunManifest, tmp_path: Path
) -> None:
    file = tmp_path / budgets.POLICY_FILE
    file.write_text(budgets.POLICY)
    policy = Policy.read(file)
    run = CompiledRun.of(manifest)
    policy.check(run)
    for k, member in enumerate(manifest.members):  # what each hospital's part of the shared noise is alone
        data = datasets.load(f"digits/{member.name}").train
        run.profile.check_part(k, policy.privacy, unit_of(data), float(len(data)))
    more = build_simulation(compose_spec([*RUNS[PRIVATE], "rounds=2", "privacy.epsilon=8.5"]))[0]
    with pytest.raises(RefusedError):
        policy.check(CompiledRun.of(more))


def test_the_ledger_of_a_run_says_what_was_projected(
    manifest: RunManifest, hospitals: dict[str, Ledger], tmp_path: Path
) -> None:
    for k, member in enumerate(manifest.members):
        for release in CompiledRun.of(manifest).profile.releases(k):
            assert release.collection == TRAIN  # test images are public: nothing is charged for them
            charge(hospitals[member.name], member.name, release.mechanism)
    found = budgets.spending(tmp_path, manifest)
    assert list(found) == [f"hospital{k}" for k in range(6)]
    for s in found.values():
        assert s.epsilon == pytest.approx(s.projected, rel=1e-9)
        assert 6 < s.epsilon <= budgets.EPSILON  # of two rounds, beside which the repetition of one fits
        assert s.tight == s.epsilon  # exact, since every release is over all records
        assert s.delta == budgets.DELTA


def test_what_was_spent_is_read_from_the_ledger_and_not_from_the_plan(
    manifest: RunManifest, hospitals: dict[str, Ledger], tmp_path: Path
) -> None:
    charge(hospitals["hospital2"], "hospital2", Mechanism(20.0))
    found = budgets.spending(tmp_path, manifest)
    assert found["hospital0"].epsilon == 0
    assert 0 < found["hospital2"].epsilon < 1
    assert found["hospital2"].projected > 6


def detail(accuracy: float, model: str) -> pb.RunDetail:
    """A finished run of one round."""
    made = pb.RunDetail(manifest_json=json.dumps({"model": {"name": model}, "schema": {"classes": ["0", "1"]}}))
    made.info.accuracy = made.info.best_accuracy = accuracy
    for share in (0.5, accuracy):
        made.rounds.add(correct=[10 * share] * 2, examples=[10.0] * 2)
    return made


def test_the_report_names_models_accuracies_and_what_was_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies = {PLAIN: 0.75, REPAIRED: 0.9, CLOSED: 0.95, PRIVATE: 0.7}
    found = {name: detail(accuracy, "a") for name, accuracy in accuracies.items()}
    spent = {
        "h0": budgets.PrivateRunSpending(7.5, 1e-5, 7.5, 7.1, 2.9),
        "h1": budgets.PrivateRunSpending(7.4, 1e-5, 7.5, 7.1, 2.9),
    }
    silos = [pb.SiloInfo(name=name, fingerprint=name * 20) for name in spent]
    scores = {m: {"h0": 0.6, "h1": None} for m in found}
    show_reply(report(tmp_path, found, scores, spent, silos, {"h0": [5, 0]}, 12.0), as_json=False)
    printed = capsys.readouterr().out
    assert printed.startswith(f"The results, as a page: {(tmp_path / 'index.html').as_uri()}\n")
    assert printed.count("┏") == 1, "one table; the page has the others"
    assert "analytic, epsilon 8" in printed
    assert "7.50" in printed
    page = (tmp_path / "index.html").read_text()
    assert "The models (a) and how they were trained" in page
    assert "7.4000" in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["model"] == dict.fromkeys(found, "a")
    assert summary["rounds_to_milestone"] == {PLAIN: None, REPAIRED: 1, CLOSED: 1, PRIVATE: None}
    assert [summary[f"{run}global_accuracy"] for run in ("", "analytic_", "private_")] == pytest.approx(
        [0.9, 0.95, 0.7]
    )
    assert summary["training_images"] == {"h0": [5, 0]}
    assert summary["epsilon"] == {"h0": 7.5, "h1": 7.4}
    assert summary["epsilon_projected"]["h1"] == 7.5
    assert summary["silos"][1]["epsilon"] == 7.4
    assert summary["silos"][1]["delta"] == 1e-5
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
