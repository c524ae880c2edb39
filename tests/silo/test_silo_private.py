"""A hospital's service in private runs: the ledger, the policy, and what leaves."""

from __future__ import annotations

import pytest
import torch
from helpers_private import DATA, SEEDED_POLICY, TEST, TRAIN, budgeted, private
from helpers_silo import Hospital, manifest, until

from fl_core import datasets
from fl_core.errors import StateError
from fl_core.methods import build_method
from fl_core.simulate import SiloShare, initial_state, local_ports
from fl_core.types import Federation, TaskKind
from fl_core.worker import work
from privacy.accounting import aggregated
from privacy.doors import PrivateDoors, SimulatedBook, course_of
from privacy.ledger import Ledger
from protos import codec
from protos.consilium.v1 import federation_pb2 as pb
from silo.desk import public_reason


@pytest.fixture
def make(tmp_path):
    made = []

    def hospital(run=None, do=work, folder=None, **settings):
        made.append(Hospital(folder or tmp_path / f"home{len(made)}", run, do, **settings))
        return made[-1]

    yield hospital
    for one in made:
        one.stop()
        one.host.stop()


class Watched:
    """Counts how often examples are read."""

    def __init__(self, monkeypatch) -> None:
        self.read = 0
        plain = datasets.TensorExamples.batch

        def batch(examples, index, augment=None):
            self.read += 1
            return plain(examples, index, augment)

        monkeypatch.setattr(datasets.TensorExamples, "batch", batch)


def first(hospital, times=1):
    """Let a hospital do a round."""
    method = build_method(hospital.manifest.method.name, hospital.manifest.method.options)
    hospital.offer(state=method.broadcast(hospital.server))
    until(lambda: hospital.events().count("sent") >= times or "refused" in hospital.events(), 60)
    assert "refused" not in hospital.events(), [n.text for n in hospital.notices]


@pytest.mark.parametrize("method", ["fedavg", "fedgela"])
def test_rounds_are_charged_as_planned_and_equal_the_simulation_bit_for_bit(make, tmp_path, method):
    ledger = budgeted(tmp_path / "home0")
    run = private(method)
    hospital = make(run)
    hospital.start()
    shares = [SiloShare(d.train, d.test) for d in (datasets.load(f"digits/p3c4/{k}") for k in range(3))]
    book = SimulatedBook()
    doors = [PrivateDoors(run, k, book if k == 1 else SimulatedBook()) for k in range(3)]
    port = local_ports(run, shares, doors)[1]
    msg = build_method(method, {}).broadcast(initial_state(run))
    for round, kind in ((0, TaskKind.TRAIN), (1, TaskKind.TRAIN), (2, TaskKind.EVALUATE)):
        hospital.transfer.uploads.clear()
        wire = pb.TRAIN if kind is TaskKind.TRAIN else pb.EVALUATE
        hospital.offer(round, wire, msg)
        hospital.sent(round + 1)
        found = bytes(next(iter(hospital.transfer.uploads.values())))
        assert found == codec.pack_bundle(port.round(msg, Federation(3, 10, 2, round, 3), kind))
        hospital.close(round, kind=wire)
        hospital.settled(round + 1)
    course = course_of(run, 1)
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


def test_over_budget_is_refused_before_an_example_is_read_and_told_by_its_code_alone(make, tmp_path, monkeypatch):
    ledger = budgeted(tmp_path / "home0", epsilon=0.5)
    hospital = make(private())
    hospital.start()
    watched = Watched(monkeypatch)
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == "E-BUDGET-01"
    assert watched.read == 0
    assert "center1" not in refused.reason
    assert not any(character.isdigit() for character in refused.reason)
    states = [state for _, _, state, _, _ in ledger.events()]
    assert states[-3:] == ["INTENT", "REFUSED", "RELEASED_UNUSED"]  # test records; training records; test records
    assert ledger.status(TRAIN).spent_rdp == 0
    assert ledger.status(TEST).spent_rdp == 0


def test_a_refusal_of_one_collection_gives_back_what_was_set_aside_in_the_other(make, tmp_path):
    ledger = budgeted(tmp_path / "home0", test_epsilon=0.001)
    hospital = make(private())
    hospital.start()
    hospital.offer()
    assert hospital.refused().code == "E-BUDGET-01"
    assert ledger.status(TRAIN).spent_rdp == 0


@pytest.mark.parametrize("unregistered", [True, False])
def test_data_without_a_registration_or_a_budget_is_not_used(make, tmp_path, unregistered):
    if unregistered:
        (tmp_path / "home0").mkdir(mode=0o700)
        (tmp_path / "home0/policy.toml").write_text(SEEDED_POLICY)
    else:
        budgeted(tmp_path / "home0")
    hospital = make(private(), data="digits/p3c4/1" if unregistered else "digits/p3c4/0")
    hospital.start()
    hospital.offer()
    assert hospital.refused().code == "E-BUDGET-06"


def test_resending_is_free_a_failed_task_stays_charged_and_a_new_try_is_a_new_attempt(make, tmp_path):
    folder = tmp_path / "home0"
    ledger = budgeted(folder)
    failing = [True]

    def do(*args):
        found = work(*args)
        if failing.pop() if failing else False:
            raise OSError("the disk is full")
        return found

    hospital = make(private(), do)
    hospital.start()
    hospital.offer()
    assert hospital.refused().code == "E-RUN-31"
    once = ledger.history(TRAIN)
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["RUNNING"]
    hospital.stop()
    hospital.start()
    assert "recovered" in hospital.events()
    assert ledger.history(TRAIN) == once
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["SPENT_ON_RECOVERY"]
    hospital.offer()
    hospital.sent()
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


def test_class_counts_are_released_once_and_survive_a_restart(make, tmp_path):
    ledger = budgeted(tmp_path / "home0", epsilon=20.0)
    hospital = make(private("fedgela"))
    hospital.start()
    first(hospital)
    hospital.close()
    hospital.settled()
    hospital.stop()
    hospital.run_id = "run-2"
    hospital.start()
    first(hospital, 2)
    purposes = [p.purpose for _, _, planned in ledger.entries(TRAIN) for p in planned]
    assert purposes.count("class counts") == 1
    assert purposes.count("training") == 2


def test_two_runs_share_one_budget(make, tmp_path):
    ledger = budgeted(tmp_path / "home0")
    hospital = make(private())
    hospital.start()
    for k in (1, 2):
        hospital.run_id = f"run-{k}"
        first(hospital, k)
        assert 0.49 * k < ledger.status(TRAIN).used <= 0.5 * k  # a run of two rounds, solved for the whole budget
    hospital.run_id = "run-3"
    hospital.offer()
    assert hospital.refused().code == "E-BUDGET-01"
    assert 0.98 < ledger.status(TRAIN).used <= 1


def test_an_older_ledger_is_found_at_the_start_and_by_what_the_coordinator_remembers(make, tmp_path):
    folder = tmp_path / "home0"
    budgeted(folder)
    backup = (folder / "ledger.db").read_bytes()
    hospital = make(private())
    hospital.start()
    first(hospital)
    attested = next(iter(hospital.transfer.opened.values())).attestation
    assert attested.ledger_seq > 3
    hospital.stop()
    (folder / "ledger.db").write_bytes(backup)
    with pytest.raises(StateError, match="E-BUDGET-08"):
        hospital.start()
    hospital.service = None
    (folder / "silo.db").unlink()  # the hospital's own memory is gone as well
    welcomed = hospital.control._welcome
    hospital.control.welcome = lambda hello: _with(welcomed(hello), attested)
    ended = _started_and_ended(hospital)
    assert isinstance(ended, StateError)
    assert ended.code == "E-BUDGET-08"


def _with(message: pb.CoordinatorMessage, attested: pb.Attestation) -> pb.CoordinatorMessage:
    message.welcome.attested.CopyFrom(attested)
    return message


def _started_and_ended(hospital):
    service = hospital.start()
    assert service.wait(20)
    hospital.stop()
    return service.error


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ("", "E-POLICY-05"),
        ("[runs]\nmethods = ['fedmr']\n", "E-POLICY-02"),
        ("[runs]\nleads = ['alice']\n", "E-POLICY-03"),
        ("[runs]\nhide_size = true\n", "E-POLICY-06"),
        ("[privacy]\nrng = 'test'\nepsilon = 4\n", "E-POLICY-05"),
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
def test_the_policy_wins_over_the_run_and_fails_closed(make, tmp_path, monkeypatch, policy, code):
    ledger = budgeted(tmp_path / "home0", policy=policy)
    hospital = make(private())
    hospital.start()
    watched = Watched(monkeypatch)
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == code
    assert not any(character.isdigit() for character in refused.reason.replace("0.001", ""))
    assert watched.read == 0
    assert ledger.history(TRAIN) == []
    if code != "E-POLICY-01":
        assert [state for _, _, state, _, _ in ledger.events() if state == "REFUSED"]


def test_a_plain_run_is_refused_where_privacy_is_required(make, tmp_path):
    budgeted(tmp_path / "home0", policy="[privacy]\nrequire = 'dp_record'\n")
    hospital = make(manifest())
    hospital.start()
    hospital.offer()
    assert hospital.refused().code == "E-POLICY-04"


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
    assert asked.about == "fedavg on digits, 2 rounds, without differential privacy"
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
        bundles.append(codec.FileBundle(tmp_path / hospital.run_id)["prototypes"])
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


def test_no_number_of_the_ledger_or_the_policy_reaches_the_coordinator():
    from fl_core.errors import RefusedError

    for code in ("E-BUDGET-01", "E-POLICY-05"):
        assert "17" not in public_reason(RefusedError(code, "expected 17, found folder:/home/doe"))
        assert "/home" not in public_reason(RefusedError(code, "expected 17, found folder:/home/doe"))


def test_the_declared_size_is_rounded_and_never_the_true_one(make, tmp_path):
    hospital = make()
    hospital.start()
    assert len(datasets.load(DATA).train) == 507
    assert hospital.control.last.hello.data.nominal_size == 510
    assert not Ledger(tmp_path / "unused.db").collections()


@pytest.mark.parametrize(("policy", "sent"), [("submit = true", 1), ("submit = false", 0)])
def test_a_hospitals_own_opt_out_is_neither_released_nor_charged(make, tmp_path, policy, sent):
    ledger = budgeted(tmp_path / "home0", policy=f"{SEEDED_POLICY}[prototypes]\n{policy}\nmin_count = 10000\n")
    hospital = make(private("fedproc"))
    hospital.start()
    first(hospital)
    purposes = [p.purpose for _, _, planned in ledger.entries(TRAIN) for p in planned]
    assert purposes.count("prototypes") == sent
    (raw,) = hospital.transfer.uploads.values()
    (tmp_path / "bundle").write_bytes(bytes(raw))
    bundle = codec.FileBundle(tmp_path / "bundle")
    weight = next(p.weight for name, p in bundle.items() if name != "metrics" and p.weight.shape == (10,))
    assert (weight == 0).all()  # submitted or not: no class has so many records


def test_a_hidden_class_that_the_run_does_not_know_closes_the_hospital(make, tmp_path):
    budgeted(tmp_path / "home0", policy=f"{SEEDED_POLICY}[prototypes]\nhidden = ['sevn']\n")
    hospital = make(private())
    hospital.start()
    hospital.offer()
    assert hospital.refused().code == "E-POLICY-09"
