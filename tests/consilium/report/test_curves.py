"""Measures over the rounds of a run."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from consilium.report.curves import by_class, curves
from privacy.accounting.uncertainty import NOTHING, EvaluationNoise, accuracy
from protos.consilium.v1 import federation_pb2 as pb
from tests.support.recorded_runs import measured

SEEN = [0.1, 0.3, 0.9, 0.5, 0.6, 0.7, 0.8, 0.65]


def test_scores_are_of_trained_models_alone_and_the_mean_is_of_the_last_five() -> None:
    found = curves(measured([0.99, *SEEN[1:]]))["accuracy"]
    assert found.rounds == tuple(range(8))
    assert [v.point for v in found.values] == pytest.approx([0.99, *SEEN[1:]])
    assert found.scores.final.point == pytest.approx(0.65)
    assert found.scores.best.point == pytest.approx(0.9)
    assert found.scores.last.point == pytest.approx((0.5 + 0.6 + 0.7 + 0.8 + 0.65) / 5)


def test_fewer_than_five_rounds_are_averaged_all_and_a_run_without_a_round_has_no_score() -> None:
    assert curves(measured([0.0, 0.2, 0.6]))["accuracy"].scores.last.point == pytest.approx(0.4)
    assert curves([]) == {}
    alone = curves(measured([0.3, 0.4])[:1])["accuracy"].scores
    assert (alone.final, alone.best, alone.last) == (NOTHING, NOTHING, NOTHING)
    without_training = curves(measured([0.3]))["accuracy"].scores  # measured alone: the model was trained elsewhere
    assert without_training.final.point == pytest.approx(0.3)


def test_accuracy_and_balanced_accuracy_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    true = draw.integers(0, 4, 400) % draw.integers(1, 5, 400)
    said = np.where(draw.random(400) < 0.7, true, draw.integers(0, 4, 400))
    correct = [float(((said == true) & (true == c)).sum()) for c in range(4)]
    examples = [float((true == c).sum()) for c in range(4)]
    found = curves([pb.RoundInfo(round=3, kind=pb.EVALUATE, correct=correct, examples=examples)])
    assert found["accuracy"].scores.final.point == pytest.approx(accuracy_score(true, said))
    assert found["balanced_accuracy"].scores.final.point == pytest.approx(balanced_accuracy_score(true, said))
    assert [c.values[0].point for c in by_class([pb.RoundInfo(correct=correct, examples=examples)])] == pytest.approx(
        [correct[c] / examples[c] for c in range(4)]
    )


def test_the_best_of_noisy_rounds_has_the_interval_that_holds_for_all_of_them_at_once() -> None:
    noise = EvaluationNoise(2.0, 3)
    rounds = [
        pb.RoundInfo(round=k, correct=[200 + k, 100], examples=[300, 300], noise=pb.Noise(std=2.0, draws=3))
        for k in range(1, 7)
    ]
    scores = curves(rounds)["accuracy"].scores
    wide = [accuracy(r.correct, r.examples, noise, 1 - 0.05 / 6) for r in rounds]
    assert scores.best.low == max(e.low for e in wide)
    five = [accuracy(r.correct, r.examples, noise, 1 - 0.05 / 5) for r in rounds[-5:]]
    assert scores.last.low == pytest.approx(sum(e.low for e in five) / 5)
    assert scores.last.low < scores.last.point < scores.last.high


@pytest.mark.parametrize("spoilt", [float("nan"), 1e300, -500.0, float("inf")])
def test_sums_that_no_counts_can_be_are_withheld(spoilt: float) -> None:
    rounds = measured([0.1, 0.2, 0.3])
    rounds[1].correct[0] = spoilt
    scores = curves(rounds)["accuracy"].scores
    assert scores.last.withheld
    assert scores.last.point is None


def test_scores_of_personal_models_count_the_round_that_trained_them_and_noise_hides_them() -> None:
    rounds = measured([0.1, 0.2, 0.3])
    for k, r in enumerate(rounds[:2]):
        r.personal["pa"] = 0.5 + k / 10
    found = curves(rounds)["pa"]
    assert found.rounds == (1, 2)
    assert found.scores.best.point == pytest.approx(0.6)
    rounds[1].personal.clear()
    rounds[1].withheld.append("pa")
    assert curves(rounds)["pa"].scores.best.withheld
