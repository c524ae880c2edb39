"""A hospital's service in private runs: what the ledger is charged, and what stops when it does not fit."""

from __future__ import annotations

import pytest
import torch

from consilium.research.engines.in_process import SiloShare, local_ports
from fl_core import datasets
from fl_core.errors import StateError
from fl_core.methods import build_method
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.silo_round import run_silo_round
from privacy.accounting.accountant import aggregated, epsilon_of
from privacy.compiled_run import CompiledRun
from privacy.profiles.record import release_plan
from privacy.release_log import InMemoryReleaseLog
from protos.consilium.v1 import federation_pb2 as pb
from silo.reports.disclosure import disclosures_of
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.hospital import Watched, first, rounds_equal
from tests.support.privacy import SEEDED_POLICY, TEST, TRAIN, budgeted, private

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedavg", {}), ("fedgela", {}), ("analytic", {"release": "noisy"})],
    ids=["fedavg", "fedgela", "analytic"],
)
def test_rounds_are_charged_as_planned_equal_the_simulation_and_are_read_here_without_noise(
    started, tmp_path, method, options
):
    ledger = budgeted(tmp_path / "home0")
    run = private(method, options)
    hospital = started(run)
    shares = [SiloShare(d.train, d.test) for d in (datasets.load(f"digits/p3c4/{k}") for k in range(3))]
    book = InMemoryReleaseLog()
    doors = [CompiledRun.of(run).profile.data_factory(k, book if k == 1 else InMemoryReleaseLog()) for k in range(3)]
    port = local_ports(RunSetup.of(run), shares, doors)[1]
    msg = build_method(method, options).broadcast(RunSetup.of(run).initial_state())
    rounds_equal(hospital, port, [msg] * 3)
    course = release_plan(RunSetup.of(run), 1)
    planned = [r for t in range(3) for r in course.releases(t, t < 2, True, counts=t == 0)]
    assert planned == book.releases
    for collection, split in ((TRAIN, "train"), (TEST, "test")):
        wanted = aggregated([r.mechanism for r in planned if r.collection == split])
        assert aggregated(ledger.history(collection)) == wanted
        assert {state for _, state, _ in ledger.entries(collection)} == {"SPENT"}
    outputs = {detail for _, _, state, detail, _ in ledger.events() if state == "SPENT"}
    assert len(outputs) == 3
    assert ledger.status(TRAIN).used <= 1
    assert {e.split("/")[2] for e, _, _ in ledger.entries(TRAIN)} == {"train, seeded noise"}
    # What it reads of the model on its own images has no noise; the update, above, and the charge know nothing of it.
    store = SiloStore(tmp_path / "home0/silo.db")
    assert disclosures_of(store).verdict == "No image has left this hospital"
    (record,) = store.history()
    test, received = (
        shares[1].test,
        build_method(method, options).global_model(RunSetup.of(run).silo_runtime().model, msg),
    )
    for task in record.tasks:
        found = task.evaluation
        assert found is not None
        assert found.noise is None
        assert list(found.examples) == torch.bincount(test.labels, minlength=10).tolist()
        right = received.eval()(test.batch(torch.arange(len(test)))[0]).argmax(1) == test.labels
        assert list(found.correct) == torch.bincount(test.labels[right], minlength=10).tolist()


def test_over_budget_is_refused_before_an_example_is_read_and_told_by_its_code_alone(started, tmp_path, monkeypatch):
    ledger = budgeted(tmp_path / "home0", epsilon=0.5)
    hospital = started(private())
    watched = Watched(monkeypatch)
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == "E-BUDGET-01"
    assert watched.read == 0
    assert "center1" not in refused.reason
    assert not any(character.isdigit() for character in refused.reason)
    states = [state for _, _, state, _, _ in ledger.events()]
    assert states[-1] == "REFUSED"
    assert ledger.entries(TRAIN) == ledger.entries(TEST) == []  # neither is set aside
    assert ledger.status(TRAIN).spent_rdp == 0
    assert ledger.status(TEST).spent_rdp == 0


@pytest.mark.parametrize("unregistered", [True, False])
def test_data_without_a_registration_or_a_budget_is_not_used(started, tmp_path, unregistered):
    if unregistered:
        (tmp_path / "home0").mkdir(mode=0o700)
        (tmp_path / "home0/policy.toml").write_text(SEEDED_POLICY)
    else:
        budgeted(tmp_path / "home0")
    hospital = started(private(), data="digits/p3c4/1" if unregistered else "digits/p3c4/0")
    hospital.offer()
    assert hospital.refused().code == "E-BUDGET-04"


def test_resending_is_free_a_failed_task_stays_charged_and_a_new_try_is_a_new_attempt(started, tmp_path):
    folder = tmp_path / "home0"
    ledger = budgeted(folder)
    failing = [True]

    def do(*args):
        found = run_silo_round(*args)
        if failing.pop() if failing else False:
            raise OSError("the disk is full")
        return found

    hospital = started(private(), do)
    hospital.offer()
    assert hospital.refused().code == "E-RUN-31"
    once = ledger.history(TRAIN)
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["RUNNING"]
    hospital.stop()
    hospital.start()
    assert "recovered" in hospital.events()
    assert ledger.history(TRAIN) == once
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["SPENT_ON_RECOVERY"]
    hospital.train()
    twice = ledger.history(TRAIN)
    assert twice[0].steps == 2 * once[0].steps
    assert [e.split("/")[3] for e, _, _ in ledger.entries(TRAIN)] == ["0", "1"]
    hospital.stop()
    hospital.transfer.receipts.clear()
    hospital.transfer.uploads.clear()
    hospital.start()
    hospital.offer()
    hospital.sent(2)
    assert ledger.history(TRAIN) == twice


@pytest.mark.parametrize("reserve", [0, 1])
def test_a_hospital_that_ends_between_charge_and_upload_has_paid_for_its_one_release_once(started, tmp_path, reserve):
    """Before the update is safe the charge stands, and a new try needs a reserve; afterwards it is sent again."""
    ledger = budgeted(tmp_path / "home0")
    failing = [True]

    def do(*args):
        found = run_silo_round(*args)
        if failing.pop() if failing else False:
            raise OSError("the disk is full")
        return found

    hospital = started(private("analytic", {"release": "noisy"}, reserve_rounds=reserve), do)
    msg = build_method("analytic", {"release": "noisy"}).broadcast(hospital.server)
    hospital.offer(state=msg)
    assert hospital.refused().code == "E-RUN-31"
    hospital.stop()
    hospital.start()
    once = ledger.history(TRAIN)
    assert [m.steps for m in once] == [1]
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["SPENT_ON_RECOVERY"]
    hospital.offer(state=msg)
    if not reserve:
        until(lambda: len([a for a in hospital.answers() if not a.accepted]) == 2)
        assert hospital.answers()[-1].code in ("E-BUDGET-01", "E-BUDGET-12")
        assert ledger.history(TRAIN) == once
        return
    hospital.sent()
    twice = ledger.history(TRAIN)
    assert [m.steps for m in twice] == [2]
    assert epsilon_of(twice, 1e-5) <= 8.0
    hospital.stop()
    hospital.transfer.receipts.clear()
    hospital.transfer.uploads.clear()
    hospital.start()
    hospital.offer(state=msg)
    hospital.sent(2)
    assert ledger.history(TRAIN) == twice


def test_class_counts_are_released_once_and_survive_a_restart(started, tmp_path):
    ledger = budgeted(tmp_path / "home0", epsilon=20.0)
    hospital = started(private("fedgela"))
    first(hospital)
    hospital.settle()
    hospital.stop()
    hospital.run_id = "run-2"
    hospital.start()
    first(hospital, 2)
    purposes = [p.purpose for _, _, planned in ledger.entries(TRAIN) for p in planned]
    assert purposes.count("class counts") == 1
    assert purposes.count("training") == 2


def test_an_older_ledger_is_found_at_the_start_and_by_what_the_coordinator_remembers(started, tmp_path):
    folder = tmp_path / "home0"
    budgeted(folder)
    backup = (folder / "ledger.db").read_bytes()
    hospital = started(private())
    first(hospital)
    attested = next(iter(hospital.transfer.opened.values())).attestation
    assert attested.ledger_seq > 3
    hospital.stop()
    (folder / "ledger.db").write_bytes(backup)
    with pytest.raises(StateError, match="E-BUDGET-08"):
        hospital.start()
    hospital.service = None
    (folder / "silo.db").unlink()  # the hospital's own memory is gone as well
    SiloStore(folder / "silo.db", accept_loss=True).close_database()
    welcomed = hospital.control.welcome
    hospital.control.welcome = lambda hello: _with(welcomed(hello), attested)
    ended = _started_and_ended(hospital)
    assert isinstance(ended, StateError)
    assert ended.code == "E-BUDGET-08"


def test_what_a_coordinator_makes_up_about_the_ledger_is_not_believed(started, tmp_path):
    """It would burn the budget of whoever restores a ledger that lacks nothing."""
    folder = tmp_path / "home0"
    ledger = budgeted(folder)
    hospital = started(private())
    first(hospital)
    honest = pb.Attestation()
    sent = next(iter(hospital.transfer.opened.values()))
    honest.CopyFrom(sent.attestation)
    honest.ledger_sealed = sent.ledger_sealed
    assert honest.ledger_sealed
    assert TRAIN.encode() not in honest.ledger_sealed
    hospital.stop()
    welcomed = hospital.control.welcome
    for lie in (
        {"ledger_seq": 2**64 - 1},
        {"ledger_seq": honest.ledger_seq + 4, "ledger_sealed": b""},
        {"ledger_restored": 7},
        {"ledger_seq": honest.ledger_seq + 1, "ledger_head": "ab" * 32},
    ):
        claimed = pb.Attestation()
        claimed.CopyFrom(honest)
        for name, value in lie.items():
            setattr(claimed, name, value)
        hospital.control.welcome = lambda hello, claimed=claimed: _with(welcomed(hello), claimed)
        hospital.service = None
        ended = _started_and_ended(hospital)
        assert isinstance(ended, StateError)
        assert ended.code == "E-BUDGET-18"
        assert not (folder / "attested.json").exists()
    assert ledger.verify() > 0
    hospital.service = None


def _with(message: pb.CoordinatorMessage, attested: pb.Attestation) -> pb.CoordinatorMessage:
    message.welcome.attested.CopyFrom(attested)
    return message


def _started_and_ended(hospital):
    service = hospital.start()
    assert service.wait(20)
    hospital.stop()
    return service.error
