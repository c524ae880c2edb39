"""The noisy answer to a survey: its sensitivity by brute force, its noise as a distribution, an attack, its charge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from consilium.audit.epsilon_bounds import epsilon_bound
from fl_core.datasets import TensorExamples
from fl_core.errors import RefusedError
from fl_core.models import build_model
from fl_core.survey.program import SurveyProgram
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.survey import parse_questions
from fl_core.types.values import SurveySums
from privacy.accounting.accountant import epsilon_of
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan
from privacy.mechanisms.noise.sources import SecureNoise, SeededNoise
from privacy.mechanisms.record import survey
from privacy.mechanisms.record.private_data import DpSgdLocalData
from privacy.release_log import InMemoryReleaseLog
from tests.support.federations import SCHEMA
from tests.support.privacy import CONTEXT, PLAIN, NoNoise

ASKED = "classes,images,patients,intensity:32"
QUERY = SurveySums(parse_questions(ASKED), 4, private=True)
DELTA = 1e-5


def data(seed: int = 0, patients: int = 12, without: str = "") -> tuple[TensorExamples, TensorExamples]:
    """Make two splits of patients with one to four images; without: a patient who is left out."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for half in range(2):
        names = [f"{half} {p}" for p in range(patients // 2) for _ in range(1 + p % 4)]
        x, y = torch.rand(len(names), 1, 4, 4, generator=draw), torch.randint(0, 4, (len(names),), generator=draw)
        kept = [i for i, name in enumerate(names) if name != without]
        found.append(TensorExamples(x[kept], y[kept], tuple(names[i] for i in kept)))
    return found[0], found[1]


def released(noise, z: float = 1.0, query: SurveySums = QUERY, **of) -> torch.Tensor:
    return survey.survey_release(query, *data(**of), z, noise)


@pytest.mark.parametrize("without", ["0 0", "0 3", "1 5"])
@pytest.mark.parametrize("seed", range(3))
def test_no_patient_moves_the_sum_by_more_than_its_sensitivity(without, seed):
    moved = released(NoNoise(0), seed=seed) - released(NoNoise(0), seed=seed, without=without)
    assert 0 < float(moved.norm()) <= survey.sensitivity(QUERY) == 2.0
    classes = moved[:4]
    assert float(classes.sum()) == pytest.approx(1.0, abs=0.01)  # however many images it has


def test_noise_is_a_gaussian_of_the_stated_deviation_on_every_number():
    z = 3.0
    exact = released(NoNoise(0))
    drawn = torch.stack([released(SeededNoise(k, "test"), z) - exact for k in range(60)])
    std = z * survey.sensitivity(QUERY)
    assert kstest(drawn.flatten().numpy() / std, norm.cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert kstest(drawn.flatten().numpy() / (std * wrong), norm.cdf).pvalue < 1e-6
    assert float(survey.as_answers(QUERY, exact, z)["variance"]) == pytest.approx(std**2)
    assert len({tuple(row.tolist()) for row in drawn}) == 60


def test_a_question_that_is_not_answered_is_zeros_without_noise_and_says_so():
    query = SurveySums(QUERY.questions, 4, frozenset({"images"}), private=True)
    found = survey.as_answers(query, released(SecureNoise(), query=query), 1.0)
    told = found["held"] == 0
    assert told.sum() == 2
    assert not found["patients"][~told].any()
    assert found["patients"][told].all()


@pytest.mark.integration
def test_whoever_knows_all_others_finds_nothing_at_the_stated_epsilon():
    """A differencing attack with and without one patient, by the likelihood ratio: the strongest there is."""
    plan = planned(RecordDpConfig(epsilon=2.0, delta=DELTA, reserve_rounds=0, rng="test"))
    z = plan.survey[0].mechanism.noise
    epsilon = epsilon_of([plan.survey[0].mechanism], DELTA)
    assert epsilon <= 2.0
    there, gone = released(NoNoise(0)), released(NoNoise(0), without="0 3")
    direction, std = there - gone, z * survey.sensitivity(QUERY)

    def scores(exact: torch.Tensor, seed: int) -> np.ndarray:
        g = survey.grid.step(survey.sensitivity(QUERY), QUERY.cells)
        source, units = SeededNoise(seed, "attack"), (exact / g).round().long()
        noisy = torch.stack([survey.grid.add_noise(units, g, std, source) for _ in range(1500)])
        return (noisy @ direction).numpy()

    found = epsilon_bound(scores(gone, 1), scores(there, 2), DELTA)
    assert found < epsilon
    sharp = epsilon_bound(scores(gone, 3) / 1e9, scores(there, 4) / 1e9 + 1, DELTA)
    assert sharp > epsilon  # the bound does find an answer that tells


# ---- in a round ------------------------------------------------------------------------------------------------------


def planned(terms: RecordDpConfig) -> ReleasePlan:
    method = SurveyProgram(questions=ASKED, release="noisy")
    return ReleasePlan.of(terms, PLAIN, 1, 24, method, build_model("digits_cnn", {}, SCHEMA, 0), SCHEMA)


def opened(plan: ReleasePlan, log: InMemoryReleaseLog, releases) -> DpSgdLocalData:
    train, test = data()
    made = RoundData(train, test, TrainConfig(), CONTEXT)
    return DpSgdLocalData(made, plan, ReleaseAllowance(releases), SeededNoise(5, "round"), log)


def test_an_answer_is_charged_to_both_splits_once_and_then_given_again():
    plan, log = planned(RecordDpConfig(rng="test")), InMemoryReleaseLog()
    releases = plan.releases(0, True)
    assert [(r.purpose, r.collection) for r in releases] == [("survey", "train"), ("survey", "test")]
    assert plan.releases(1, False) == []
    first = opened(plan, log, releases).sum(QUERY)
    again = opened(plan, log, plan.releases(0, True, surveys=False)).sum(QUERY)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = SurveySums(parse_questions("classes,images"), 4, private=True)
    with pytest.raises(RefusedError) as error:
        opened(plan, log, []).sum(other)
    assert error.value.code == "E-PRIV-15"


def test_the_noise_uses_the_budget_up():
    plan = planned(RecordDpConfig(epsilon=1.0, delta=DELTA, reserve_rounds=0))
    spent = epsilon_of([r.mechanism for r in plan.releases(0, True) if r.collection == "train"], DELTA)
    assert 0.9 < spent <= 1.0
    assert math.isclose(plan.survey[0].mechanism.rate, 1.0)


def test_without_noise_the_same_records_are_counted_by_patients():
    exact = PlainLocalData(RoundData(*data(), TrainConfig(), CONTEXT)).sum(SurveySums(QUERY.questions, 4, least=2))
    assert exact["patients"][4:6].tolist() == [6, 6]
    assert exact["images"][4:6].tolist() == [13, 13]
