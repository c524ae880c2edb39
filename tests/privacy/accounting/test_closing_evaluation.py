"""A method whose personal models are made at the end: what its closing evaluation releases is planned and charged."""

from __future__ import annotations

import pytest

from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_spec
from fl_core.methods import build_method
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleasePlan
from tests.support.federations import SCHEMA
from tests.support.privacy import PLAIN, model_of

pytestmark = pytest.mark.integration


def plan(personal: bool, reserve: int = 1) -> ReleasePlan:
    terms = RecordDpConfig(reserve_rounds=reserve)
    return ReleasePlan.of(terms, PLAIN, 4, 24, build_method("fedbabu", {}), model_of(), SCHEMA, personal)


def test_fine_tuning_at_the_end_is_planned_for_the_closing_evaluation_alone() -> None:
    with_it, without = plan(True), plan(False)
    assert with_it.steps_per_call == without.steps_per_call
    assert (with_it.closing_steps, without.closing_steps) == ((5,), ())  # five epochs of full batches
    rounds, end = with_it.releases(0, True), with_it.releases(4, False)
    assert [r.purpose for r in rounds] == [r.purpose for r in without.releases(0, True)]
    assert [(r.purpose, r.mechanism.steps) for r in end if r.purpose == "training"] == [("training", 5)]
    assert sum(r.purpose == "evaluation" for r in end) == 2  # of the global and of the personal model
    assert with_it.noise > without.noise  # one budget, more steps
    assert plan(True, reserve=2).noise > with_it.noise  # the closing evaluation may be repeated, too


def test_a_private_run_of_it_spends_what_it_announced() -> None:
    words = ["method=fedbabu", "data=digits", "federation=p5c2", "rounds=1", "train.max_steps=2", "personal=true"]
    result = runner.run(compose_spec([*words, "privacy=dp_record", "privacy.epsilon=8", "privacy.rng=test"]))
    assert result.privacy is not None
    assert 0 < float(str(result.privacy["epsilon"])) <= 8
    assert [bool(r.personal) for r in result.records] == [False, True]
