"""A coordinator that asks for less noise, more rounds, or another method than allowed: refused, and written down."""

from __future__ import annotations

import pytest
import torch

from fl_core import datasets
from fl_core.rounds.run_setup import RunSetup
from privacy.ledger.account import Refusal
from privacy.profiles.record import release_plan
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until
from tests.support.privacy import SEEDED_POLICY, TRAIN, budgeted, private


@pytest.fixture
def make(make, tmp_path):
    def hospital(run):
        made = make(run, folder=tmp_path / "home")
        made.start()
        return made

    return hospital


@pytest.fixture
def reads(monkeypatch):
    read, plain = [], datasets.TensorExamples.batch

    def batch(examples, index, augment=None):
        read.append(len(index))
        return plain(examples, index, augment)

    monkeypatch.setattr(datasets.TensorExamples, "batch", batch)
    return read


def refusals(ledger) -> list[tuple[str, str]]:
    return [
        (subject, Refusal.of(detail).code) for _, subject, state, detail, _ in ledger.events() if state == "REFUSED"
    ]


@pytest.mark.parametrize(("round", "cohort"), [(2, 3), (7, 3), (0, 2)])
def test_a_round_that_the_plan_does_not_have_is_refused_with_a_record(make, tmp_path, reads, round, cohort):
    """The run has two rounds of three hospitals: a third one would be a release that its noise was not solved for."""
    ledger = budgeted(tmp_path / "home", epsilon=100.0)
    hospital = make(private())
    del reads[:]
    hospital.offer(round, pb.TRAIN, cohort=cohort)
    assert hospital.refused().code == "E-RUN-33"
    assert refusals(ledger) == [(hospital.run_id, "E-RUN-33")]
    assert reads == []
    assert ledger.history(TRAIN) == []


def test_a_round_asked_for_again_and_again_is_charged_each_time_and_three_times_at_most(make, tmp_path):
    """Another base makes it another task: noise is fresh, and so is the charge; the plan's two rounds and its reserve
    are used up."""
    ledger = budgeted(tmp_path / "home")
    hospital = make(private())
    once = (
        release_plan(RunSetup.of(private()), 1)
        .training(release_plan(RunSetup.of(private()), 1).steps_per_call[0])[0]
        .mechanism
    )
    for attempt in range(4):
        moved = {n: v + attempt for n, v in hospital.server["w"].items()}
        hospital.offer(0, pb.TRAIN, {"w": moved})
        done = attempt + 1
        until(lambda done=done: hospital.events().count("sent") == done or "refused" in hospital.events(), seconds=60)
    assert hospital.refused().code == "E-BUDGET-12"
    assert hospital.events().count("sent") == 3
    assert ledger.history(TRAIN)[0].steps == 3 * once.steps
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["SPENT"] * 3
    assert refusals(ledger) == [(hospital.run_id, "E-BUDGET-12")]
    assert ledger.status(TRAIN).used <= 1


def test_more_rounds_are_more_noise_per_round_and_no_more_epsilon(tmp_path):
    """The hospital solves the noise for the rounds of the manifest: who asks for more gets less of each."""
    from dataclasses import replace

    few, many = (release_plan(RunSetup.of(replace(private(), rounds=rounds)), 1) for rounds in (2, 40))
    assert many.noise > 1.5 * few.noise
    ledger = budgeted(tmp_path / "home", policy=SEEDED_POLICY)
    for course in (few, many):
        whole = [r.mechanism for t in range(course.rounds) for r in course.releases(t, True) if r.collection == "train"]
        assert ledger.budget(TRAIN).admits(ledger.history(TRAIN), whole)
        assert not ledger.budget(TRAIN).admits(ledger.history(TRAIN), [*whole, *whole[:: max(1, len(whole) // 20)]])
    assert torch.isfinite(torch.tensor(many.noise))
