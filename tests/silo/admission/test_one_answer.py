"""A coordinator that asks about one model twice, or about many in one task: each question has one answer."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from consilium.pages.hospital.site import HospitalPage
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.methods import build_method
from fl_core.rounds.manifest import make_members
from fl_core.types.metric_parts import METRICS
from privacy.secagg.coordinator_side import SealedRound
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import BundleFile, pack_state
from silo.reports.disclosure import disclosures_of
from silo.reports.questions import PendingDecision, PolicyAndLedger
from silo.storage.home import Home
from tests.support import until
from tests.support.fake_coordinator import MEMBERS, manifest
from tests.support.hospital import Watched
from tests.support.masked import (
    OWN,
    MaskedHospital,
    confirmation_of,
    masked_manifest,
    open_message,
    shares_of,
    sign_as_coordinator,
)

pytestmark = pytest.mark.integration
FOUR = (*MEMBERS, "center3")


@pytest.fixture
def hospital(tmp_path):
    """One of four hospitals in a masked run of three rounds."""
    grid = FixedPointFormat("ring64", len(FOUR))
    run = masked_manifest(members=make_members(FOUR, 3, 1.0), grid=grid, rounds=3)
    made = MaskedHospital(tmp_path / "home0", run)
    made.start()
    made.exchange()
    yield made
    made.end()


def sealed(hospital, offer, absent=(), own=True):
    total, _ = hospital.sum_of(offer, own, absent)
    return SealedRound(total, total.seal(sign_as_coordinator), hospital.colleagues[0].keys.peers)


def opened(hospital, state, times=1):
    """Let the hospital and its colleagues open a set."""
    hospital.send_seal(state.seal)
    state.confirm(OWN, confirmation_of(hospital.confirmed(times)))
    for u, colleague in hospital.colleagues.items():
        state.confirm(u, colleague.confirm(hospital.run, state.seal))
    hospital.control.last.send(secagg_open=open_message(state.opening(OWN)))
    state.answer(OWN, shares_of(hospital.shares(state.seal.round + 1)))
    for u, colleague in hospital.colleagues.items():
        state.answer(u, colleague.answer(hospital.run, state.opening(u)))
    return state.finish()


def moved(hospital, by=1.0):
    """Return another model than the run's first."""
    state = {group: {k: v + by for k, v in values.items()} for group, values in hospital.server.items()}
    return build_method("fedavg", {}).broadcast(state)


def evaluation():
    run = manifest(rounds=0)
    return replace(run, layout={METRICS: run.layout[METRICS]})


def all_four(hospital, round=0):
    """Open a round over everybody and close it."""
    opened(hospital, sealed(hospital, hospital.train(round)), round + 1)
    hospital.close(round)
    hospital.settled(round + 1)


@pytest.mark.fault(
    "a coordinator",
    "sends the same model in two rounds of a masked run and claims in one of them that a hospital was absent",
    "the second set is refused, whatever round it is for (E-RUN-50)",
)
@pytest.mark.parametrize("restarts", [False, True])
def test_the_sum_of_a_model_is_opened_for_one_set_whatever_the_round(hospital, restarts):
    all_four(hospital)
    if restarts:
        hospital.stop()
        hospital.start()
    state = sealed(hospital, hospital.train(1), absent={3})
    hospital.send_seal(state.seal)
    assert hospital.refusal().code == "E-RUN-50"
    assert "another set" in hospital.refusal().reason
    assert [m for s in hospital.control.sessions for m in s.got("secagg_confirm") if m.round == 1] == []
    ask = pb.SecaggOpen(run_id=hospital.run_id, round=1, kind=pb.TRAIN, seal_hash=state.hash)
    hospital.control.last.send(secagg_open=ask)
    assert hospital.refusal(2).code == "E-RUN-50"
    assert len([m for s in hospital.control.sessions for m in s.got("secagg_shares")]) == 1


def test_a_helper_that_is_called_absent_does_not_open_the_same_model_for_the_others(hospital):
    """It sent in round 1, and is said to be away in round 2: with its help the difference would be its own update."""
    all_four(hospital)
    offer = hospital.offer_of(1, secagg_keys_digest=hospital.keys_object, cohort=len(FOUR))
    hospital.send_seal(sealed(hospital, offer, own=False).seal)
    assert hospital.refusal().code == "E-RUN-50"
    hospital.close(1, included=True)
    hospital.settled(2)
    said = next(n for n in reversed(hospital.notices) if n.event == "closed")
    assert said.facts["included"] is False
    assert "not included: nothing was sent from here, although the coordinator says it was" in said.text
    assert [task.included for task in hospital.service.store.history()[0].tasks] == [True, False]


def padded(packed: bytes) -> bytes:
    """Write the same tensors in other bytes: spaces behind a header are allowed."""
    size = int.from_bytes(packed[:8], "little")
    return (size + 8).to_bytes(8, "little") + packed[8 : 8 + size] + b" " * 8 + packed[8 + size :]


def test_other_bytes_of_the_same_numbers_are_the_same_model(hospital):
    all_four(hospital)
    base = padded(pack_state(build_method("fedavg", {}).broadcast(hospital.server)))
    digest = hospital.transfer.offer(base)
    offer = hospital.ask(1, base_digest=digest, base_size=len(base))
    hospital.sent(2)
    assert offer.base_digest == digest
    hospital.send_seal(sealed(hospital, offer, absent={3}).seal)
    assert hospital.refusal().code == "E-RUN-50"


def test_the_same_model_is_opened_again_for_the_same_set_and_another_model_for_any(hospital):
    """A learning rate of 0 moves no model, and a round that was not opened is asked for again: neither ends a run."""
    all_four(hospital)
    again = sealed(hospital, hospital.train(1))
    opened(hospital, again, 2)
    hospital.send_seal(again.seal)
    assert hospital.confirmed(3) == hospital.confirmed(2)
    hospital.close(1)
    hospital.settled(2)
    hospital.offer(2, state=moved(hospital), secagg_keys_digest=hospital.keys_object, cohort=len(FOUR))
    hospital.sent(3)
    offer = hospital.offer_of(2, state=moved(hospital))
    opened(hospital, sealed(hospital, offer, absent={3}), 4)


# ---- evaluations -----------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "a coordinator",
    "offers an evaluation again with another model, to infer test images from many answers",
    "refused with E-RUN-33 before any record is read",
)
@pytest.mark.parametrize("closes", [False, True])
def test_an_evaluation_is_about_one_model_for_ever(started, monkeypatch, closes):
    hospital = started(evaluation())
    hospital.offer(0, pb.EVALUATE)
    hospital.sent()
    if closes:
        hospital.close(kind=pb.EVALUATE)
        hospital.settled()
    hospital.stop()
    hospital.start()
    watched = Watched(monkeypatch)
    for attempt, incarnation in enumerate(("", "", "a", "b"), start=1):
        state = moved(hospital, attempt)
        hospital.offer(0, pb.EVALUATE, state, incarnation=incarnation, attempt=attempt)
        until(lambda attempt=attempt: len([a for a in hospital.answers() if not a.accepted]) >= attempt)
    assert {a.code for a in hospital.answers() if not a.accepted} == {"E-RUN-33"}
    assert watched.read == 0
    assert len(hospital.transfer.uploads) == 1


def test_an_evaluation_under_masks_is_about_one_model(hospital):
    hospital.train(3, pb.EVALUATE)
    hospital.ask(3, pb.EVALUATE, state=moved(hospital))
    assert hospital.refused().code == "E-RUN-50"
    hospital.close(3, kind=pb.EVALUATE)
    hospital.settled()
    hospital.ask(3, pb.EVALUATE, state=moved(hospital), attempt=1, incarnation="restored")
    until(lambda: len([a for a in hospital.answers() if not a.accepted]) == 2)
    assert len(hospital.transfer.uploads) == 1


def test_a_round_that_is_trained_is_measured_in_its_training_and_has_no_evaluation_beside(started):
    """The evaluation of a run is the one after its last round; others would measure models of no round."""
    hospital = started(manifest(rounds=3))
    for round in (0, 2):
        hospital.offer(round, pb.EVALUATE, moved(hospital))
        until(lambda round=round: len([a for a in hospital.answers() if not a.accepted]) == 1 + round // 2)
    assert {a.code for a in hospital.answers() if not a.accepted} == {"E-RUN-33"}
    assert hospital.transfer.uploads == {}


@pytest.mark.fault(
    "a coordinator",
    "offers a training round again with another model, to get test results for more models",
    "refused with E-RUN-33, unless the coordinator was restored",
)
def test_a_round_of_training_is_about_one_model_unless_the_coordinator_was_restored(started):
    hospital = started()
    hospital.offer(incarnation="a")
    hospital.sent()
    hospital.offer(state=moved(hospital), incarnation="a")
    assert hospital.refused().code == "E-RUN-33"
    hospital.offer(state=moved(hospital), incarnation="b")
    hospital.sent(2)
    assert hospital.service.store.answers.measured_today() == 2


@pytest.mark.fault(
    "a coordinator",
    "requests evaluation after evaluation, each of another model",
    "the policy limits the runs per day that evaluate models (E-POLICY-19), even if the clock is set back",
)
def test_runs_of_a_day_that_measure_models_are_bounded_by_the_policy(started):
    hospital = started(evaluation())
    hospital.folder.joinpath("policy.toml").write_text("[evaluation]\nruns_a_day = 3\n")
    for number in range(3):
        hospital.run_id = f"run-{number}"
        hospital.offer(0, pb.EVALUATE, moved(hospital, number))
        hospital.sent(number + 1)
    hospital.run_id = "run-3"
    hospital.offer(0, pb.EVALUATE)
    assert hospital.refused().code == "E-POLICY-19"
    assert not any(c.isdigit() for c in hospital.refused().reason)  # the limit stays here
    session = hospital.control.last
    session.send(preflight=pb.Preflight(run_id="run-3", manifest_digest=hospital.digest))
    until(lambda: session.got("preflight"))
    assert session.got("preflight")[-1].code == "E-POLICY-19"
    hospital.run_id = "run-1"  # one that was begun goes on
    session.send(preflight=pb.Preflight(run_id="run-1", manifest_digest=hospital.digest))
    until(lambda: len(session.got("preflight")) == 2)
    assert session.got("preflight")[-1].ready
    hospital.folder.joinpath("policy.toml").write_text('[evaluation]\nruns_a_day = 3\nsend = "nothing"\n')
    hospital.run_id = "run-4"
    hospital.offer(0, pb.EVALUATE)
    hospital.sent(4)


# ---- what leaves of small classes, and what is said of it ------------------------------------------------------------


def test_of_classes_below_the_policys_floor_nothing_leaves_and_log_question_and_page_name_them(started, caplog):
    """The hospital has 18 test images of class 6 and 36 of three others; its own figures keep them all."""
    hospital = started(evaluation())
    policy = hospital.folder / "policy.toml"
    policy.write_text("[runs]\napprove = 'by hand'\n[evaluation]\nmin_examples = 20\n")
    hospital.control.last.send(preflight=pb.Preflight(run_id="run-1", manifest_digest=hospital.digest))
    until(lambda: "approval" in hospital.events())
    (asked,) = hospital.service.store.approvals.all()
    known = PolicyAndLedger.of(Home(hospital.folder), measured=hospital.service.store.answers.measured_today())
    rows = {c.what: c for c in PendingDecision.of(asked, known).comparisons}
    assert "1 model, counted exactly: of a class with one test image" in rows["Results on test images"].requested
    assert rows["Results on test images"].policy.endswith(
        "no class of fewer than 20 test images: 6; 0 of at most 100 runs a day evaluated models here"
    )
    assert "1 model evaluated on test images here, counted exactly" in asked.about
    hospital.service.store.approvals.decide("run-1", True)
    hospital.offer(0, pb.EVALUATE)
    hospital.sent()
    file = hospital.folder / "read-by-a-test"
    file.write_bytes(bytes(next(iter(hospital.transfer.uploads.values()))))
    sent = BundleFile(file)[METRICS]
    assert sent.weight.tolist() == [0, 0, 0, 0, 36, 36, 0, 36, 0, 0]
    assert sent.total["correct"][6] == 0
    assert "results withheld for 6: fewer than 20 test images" in caplog.text
    (task,) = hospital.service.store.history()[0].tasks
    assert sum(task.evaluation.examples) == 126
    page = HospitalPage(Home(hospital.folder))
    assert page.facts()["measured"] == 1
    page.close()


def test_a_run_without_masks_says_to_the_hospital_who_reads_its_update(started):
    hospital = started()
    hospital.folder.joinpath("policy.toml").write_text("[runs]\napprove = 'by hand'\n")
    hospital.control.last.send(preflight=pb.Preflight(run_id="run-1", manifest_digest=hospital.digest))
    until(lambda: "approval" in hospital.events())
    (asked,) = hospital.service.store.approvals.all()
    read = "the coordinator reads this hospital's update by itself"
    assert read in asked.about
    rows = {
        c.what: c.requested for c in PendingDecision.of(asked, PolicyAndLedger.of(Home(hospital.folder))).comparisons
    }
    assert rows["Secure aggregation"] == f"none: {read}"
    hospital.service.store.approvals.decide("run-1", True)
    hospital.train()
    assert any(read in n.text for n in hospital.notices if n.event == "training")
    (left,) = disclosures_of(hospital.service.store).runs
    assert left.privacy == f"no privacy: {read}"


# ---- a home that was put back ----------------------------------------------------------------------------------------


class Echoing:
    """Welcomes as a coordinator does that remembers how many answers it has seen. most: what it says at least."""

    def __init__(self, hospital: MaskedHospital) -> None:
        self.plain, self.hospital, self.most = hospital.control.welcome, hospital, 0
        hospital.control.welcome = self

    def __call__(self, hello: pb.Hello) -> pb.CoordinatorMessage:
        confirmed = [m.masked_answers for s in self.hospital.control.sessions for m in s.got("secagg_confirm")]
        stated = [s.hello.masked_answers for s in self.hospital.control.sessions]
        message = self.plain(hello)
        message.welcome.masked_answers = max([self.most, *stated, *confirmed])
        return message


def test_a_home_that_was_put_back_as_a_whole_gives_its_masked_runs_up_and_says_so(hospital, tmp_path):
    """The copy does not know which set was confirmed since it was made: it would sign another one."""
    Echoing(hospital)
    offer = hospital.train()
    hospital.stop()
    shutil.copytree(hospital.folder, tmp_path / "copy", symlinks=True)
    hospital.start()
    assert "behind" not in hospital.events()
    hospital.send_seal(sealed(hospital, offer).seal)
    assert hospital.confirmed().masked_answers == hospital.service.store.answers.masked_answers()
    hospital.stop()
    shutil.rmtree(hospital.folder)
    shutil.move(tmp_path / "copy", hospital.folder)
    hospital.start()
    until(lambda: "behind" in hospital.events())
    (said,) = [n.text for n in hospital.notices if n.event == "behind"]
    assert "it lacks 1 answer in masked runs" in said
    assert "absent for the rest of run-1" in said
    hospital.send_seal(sealed(hospital, offer, absent={3}).seal)
    assert hospital.refusal().code == "E-RUN-50"
    assert len([m for s in hospital.control.sessions for m in s.got("secagg_confirm")]) == 1
    hospital.run_id = "run-2"
    hospital.exchange()
    hospital.stop()
    hospital.start()  # said once: it counts on from there, and takes part in the next run
    hospital.train()
    assert hospital.events().count("behind") == 1


@pytest.mark.fault(
    "a coordinator",
    "claims that it saw more answers in masked runs than the hospital gave",
    "the hospital leaves its masked runs and says why; history, budget and plain runs stay",
)
@pytest.mark.parametrize("number", [1, 2**63, 2**64 - 1])
def test_a_coordinator_that_claims_too_many_answers_ends_masked_runs_and_nothing_else(hospital, number):
    echoing = Echoing(hospital)
    hospital.train()
    before = hospital.service.store.history()
    hospital.stop()
    echoing.most = number + hospital.control.last.hello.masked_answers + 1 if number == 1 else number
    for _ in range(2):
        hospital.start()
        until(lambda: "behind" in hospital.events())
        assert hospital.service.store.secagg.state("run-1") == "gone"
        assert hospital.service.store.history() == before
        assert hospital.service.store.answers.measured_today() == 1
        hospital.stop()
    plain = manifest()
    hospital.run_id, hospital.digest = "run-plain", hospital.transfer.offer(plain.to_json().encode())
    hospital.start()
    hospital.offer(cohort=len(MEMBERS))
    hospital.sent(2)
