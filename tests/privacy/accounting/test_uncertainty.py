"""Intervals of noisy accuracies hold what they promise, for any sums there can be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_core.rounds.manifest import NamedOptions
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.evaluation import evaluate
from fl_core.types.metric_parts import METRICS
from fl_core.types.values import Part
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.uncertainty import (
    IMPOSSIBLE,
    NOISY,
    NOTHING,
    WIDEST,
    Estimate,
    EvaluationNoise,
    accuracy,
    balanced,
    best,
    by_class,
)
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.noise.sources import SeededNoise
from privacy.mechanisms.silo.guard import silo_level
from privacy.profiles import result_noise
from tests.support import some
from tests.support.privacy import examples, hospital_level, model_of, plan_of, private, private_data

pytestmark = pytest.mark.integration

DRAWS = 1000
MIN_COVERAGE = 0.936
"""0.95 minus two standard errors of so many draws."""


def spread(n: float, silos: int = 6, classes: int = 8) -> np.ndarray:
    return np.full((silos, classes), n)


def first_silo(n: float) -> np.ndarray:
    """All examples at one hospital: every other row holds noise alone."""
    return np.vstack([np.full((1, 8), n), np.zeros((5, 8))])


def beside_small_ones() -> np.ndarray:
    """One large class, and rows that are dropped as often as their examples weigh most."""
    rows = spread(28.0)
    rows[:, 0] = 1500
    return rows


ROWS = {
    "even": spread(150.0),
    "one hospital": first_silo(400.0),
    "small rows": beside_small_ones(),
    "one row": np.array([[300.0]]),
    "many absent": np.vstack([spread(800.0, 2, 10), np.zeros((18, 10))]),
}


@pytest.mark.parametrize("suppressed", [False, True], ids=["all rows", "small rows dropped"])
@pytest.mark.parametrize("share", some([0.8, 0.35, 0.0, 1.0], 2))
@pytest.mark.parametrize("case", ROWS)
def test_the_interval_holds_the_true_accuracy_19_times_of_20(case: str, share: float, suppressed: bool) -> None:
    n, std = ROWS[case], 20 * math.sqrt(2)
    noise = EvaluationNoise(std, len(n), suppressed)
    draw, right, given_out = np.random.default_rng(7), n * share, 0
    wrong = 0
    for _ in range(DRAWS):
        counted, answered = n + draw.normal(0, std, n.shape), right + draw.normal(0, std, n.shape)
        kept = counted >= 1 if suppressed else np.ones_like(n, dtype=bool)
        found = accuracy(list((answered * kept).sum(0)), list((counted * kept).sum(0)), noise)
        if found.withheld:
            continue
        given_out += 1
        assert 0 <= found.low <= found.point <= found.high <= 1
        assert found.high - found.low <= WIDEST
        wrong += not found.low - 1e-9 <= share <= found.high + 1e-9
    assert wrong <= (1 - MIN_COVERAGE) * DRAWS
    assert given_out > DRAWS / 2 or case == "one row"


def test_sensitivities_and_their_mean_are_shares_whose_intervals_hold_where_the_ratios_of_the_sums_are_none() -> None:
    """Three hospitals, four classes, of which the model recognises all, most, few and none of the examples."""
    n, std, draw = np.full((3, 4), 250.0), 15.0, np.random.default_rng(11)
    shares, noise = np.array([1.0, 0.9, 0.1, 0.0]), EvaluationNoise(15.0, 3)
    wrong, wrong_mean, outside, withheld, draws = np.zeros(4), 0, np.zeros(4), 0, 300
    for _ in range(draws):
        right = (n * shares + draw.normal(0, std, n.shape)).sum(0)
        examples = (n + draw.normal(0, std, n.shape)).sum(0)
        outside += (right / examples > 1) | (right < 0)
        for c, found in enumerate(by_class(list(right), list(examples), noise)):
            if found.withheld:
                withheld += 1
                continue
            assert 0 <= found.low <= found.point <= found.high <= 1
            wrong[c] += not found.low - 1e-9 <= shares[c] <= found.high + 1e-9
        mean = balanced(list(right), list(examples), noise)
        if mean.withheld:
            continue
        assert 0 <= mean.low <= mean.point <= mean.high <= 1
        wrong_mean += not mean.low <= shares.mean() <= mean.high
    assert (wrong <= 0.08 * draws).all()  # 0.05 and more than two standard errors
    assert wrong_mean <= 0.05 * draws
    assert withheld <= 0.05 * 4 * draws  # sums that no shares could have given
    assert (outside[[0, 3]] > 0.4 * draws).all()  # what would be printed without: sensitivities of 102 % and of -1 %


def test_the_best_of_noisy_rounds_is_not_taken_for_the_best_accuracy() -> None:
    """Forty rounds of one and the same model: the largest number is luck, and its interval knows."""
    n, std, draw = spread(150.0), 20 * math.sqrt(2), np.random.default_rng(3)
    noise, wrong, above, naive = EvaluationNoise(std, 6), 0, 0, 0
    for _ in range(100):
        rounds = [
            (
                list((0.6 * n + draw.normal(0, std, n.shape)).sum(0)),
                list((n + draw.normal(0, std, n.shape)).sum(0)),
                noise,
            )
            for _ in range(40)
        ]
        found = best(rounds)
        assert found.point is not None
        wrong += not found.low <= 0.6 <= found.high
        above += found.point > 0.62
        luckiest = max((accuracy(*sums) for sums in rounds), key=lambda e: e.point)
        naive += luckiest.low > 0.6
    assert wrong <= 0.06 * 100
    assert above > 96  # what a number alone would have said
    assert naive > 33  # and what the interval of the luckiest round would have


@pytest.mark.parametrize("groups", [False, True])
def test_the_noise_is_what_the_doors_release_with(groups: bool) -> None:
    terms = RecordDpConfig(metric_noise=3.0)
    manifest = private(metric_noise=3.0)
    known = CompiledRun.of(manifest).profile.noise().evaluation
    assert known is not None
    data, model, plan = examples(300, groups), model_of(), plan_of(terms, units=300)
    silent = evaluate(model, private_data(plan, data), 4)
    source, off = SeededNoise(5, "t"), []
    for _ in range(100):
        found = evaluate(model, private_data(plan, data, source), 4)
        off += [found.weight - silent.weight, found.total["correct"] - silent.total["correct"]]
    assert float(torch.cat(off).std()) == pytest.approx(known.std, rel=0.08)
    assert abs(float(torch.cat(off).mean())) < 4 * known.std / math.sqrt(800)
    assert known.suppressed


@pytest.mark.parametrize("placement", ["local", "central"])
def test_the_noise_is_what_a_hospitals_guard_adds(placement: str) -> None:
    manifest = hospital_level(placement=placement, metric_noise=2.0, metric_clip=50.0)
    guard, grid = silo_level(RunSetup.of(manifest)), manifest.grid
    known = result_noise(manifest).of(("a", "b", "c"))
    assert known is not None
    seen = []
    for t in range(100):
        zero = {METRICS: Part({"correct": torch.zeros(10)}, torch.zeros(10))}
        sent = [guard.outgoing(zero, k, t)[METRICS] for k in range(3)]
        total = {METRICS: Part({"correct": sum(p.total["correct"] for p in sent)}, sum(p.weight for p in sent))}
        summed = guard.incoming(total, 3, t)[METRICS]
        seen += [grid.decode(METRICS, summed.total["correct"].clone())]
        seen += [grid.decode(f"{METRICS}.weight", summed.weight.clone())]
    assert float(torch.cat(seen).std()) == pytest.approx(known.std * math.sqrt(known.draws), rel=0.08)


@pytest.mark.slow
def test_real_releases_of_three_hospitals_hold_the_true_accuracy() -> None:
    terms = RecordDpConfig(metric_noise=1.0)
    known, model, plan = (
        CompiledRun.of(private(metric_noise=1.0)).profile.noise().evaluation,
        model_of(),
        plan_of(terms, units=200),
    )
    assert known is not None
    data, source = [examples(n) for n in (200, 220, 240)], SeededNoise(11, "t")
    exact = [evaluate(model, private_data(plan, d), 4) for d in data]
    true = sum(float(p.total["correct"].sum()) for p in exact) / sum(float(p.weight.sum()) for p in exact)
    wrong = 0
    for _ in range(100):
        parts = [evaluate(model, private_data(plan, d, source), 4) for d in data]
        found = accuracy(
            sum(p.total["correct"] for p in parts).tolist(), sum(p.weight for p in parts).tolist(), known.over(3)
        )
        assert found.point is not None
        wrong += not found.low <= true <= found.high
    assert wrong <= 0.05 * 100 + 2 * math.sqrt(100 * 0.05 * 0.95)


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -0.0, 70.3, 39.1, -4.0, 1e-40, 1e38])
noises = st.none() | st.builds(
    EvaluationNoise,
    st.sampled_from([0.0, 1e-300, 1e-40, 0.3, 28.3, 1e38, 1e200, math.inf, math.nan, -1.0]),
    st.integers(0, 50),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(st.tuples(numbers, numbers), max_size=5), noises)
def test_whatever_the_sums_a_share_is_one_or_withheld(rows: list[tuple[float, float]], noise) -> None:
    correct, of = [a for a, _ in rows], [b for _, b in rows]
    for found in (
        accuracy(correct, of, noise),
        *by_class(correct, of, noise),
        balanced(correct, of, noise),
        best([(correct, of, noise)] * 3),
    ):
        if found.point is None:
            assert (found.low, found.high) == (None, None)
        else:
            assert 0 <= found.low <= found.point <= found.high <= 1
            assert not found.withheld


def test_sums_that_say_nothing_are_withheld() -> None:
    noise = EvaluationNoise(20 * math.sqrt(2), 3, True)
    for correct, of in (
        ([70.3], [39.1]),
        ([-4.0], [100.0]),
        ([642.0], [100.0]),
        ([0.0] * 4, [0.0] * 4),
        ([5.0], [-300.0]),
        ([math.nan], [1e4]),
        ([1e4], [math.inf]),
        ([], []),
    ):
        assert accuracy(correct, of, noise) == Estimate(withheld=NOISY)
    assert accuracy([9000.0], [1000.0], noise).withheld == NOISY  # significantly more right answers than questions


def test_without_noise_it_is_the_ratio_and_counts_that_cannot_be_are_withheld() -> None:
    assert accuracy([3.0, 4.0], [5.0, 5.0], None) == Estimate(0.7, 0.7, 0.7)
    assert accuracy([0.0], [0.0], None) == NOTHING
    for correct, of in ((5.0, 4.0), (-1.0, 4.0), (1.0, -4.0), (math.nan, 4.0), (1.0, math.inf)):
        assert accuracy([correct], [of], None) == Estimate(withheld=IMPOSSIBLE)


def test_more_noise_and_dropped_rows_make_wider_intervals() -> None:
    def width(noise: EvaluationNoise) -> float:
        found = accuracy([7000.0], [10_000.0], noise)
        return found.high - found.low

    widths = [width(EvaluationNoise(s, 6)) for s in (1.0, 10.0, 100.0)]
    assert widths == sorted(widths)
    assert width(EvaluationNoise(100.0, 6, True)) > widths[-1]
    assert width(EvaluationNoise(100.0, 1)) < widths[-1]


def test_what_rounding_takes_off_right_answers_stays_in_the_interval() -> None:
    """Each right answer of a record arrives as 1 - g, g a few parts of ten thousand; of many records that shows."""
    found = accuracy([1e6 * (1 - 2**-11)], [1e6], EvaluationNoise(1.0))
    assert found.low < 1 - 2**-11 < found.high == 1


def test_a_balanced_accuracy_is_withheld_with_its_smallest_class() -> None:
    noise = EvaluationNoise(10.0, 2)
    assert balanced([900.0, 500.0], [1000.0, 1000.0], noise).point == pytest.approx(0.7)
    assert balanced([900.0, 5.0], [1000.0, 10.0], noise).withheld == NOISY
    assert balanced([900.0, 0.0], [1000.0, 0.0], None) == Estimate(0.9, 0.9, 0.9)


def test_which_runs_are_noisy_is_read_off_the_manifest() -> None:
    assert result_noise(private()).evaluation is not None
    assert result_noise(private()).scores == {"pa", "pm_l", "pm_v"}
    published = result_noise(private(test_data="public"))
    assert (published.evaluation, published.scores) == (None, {"pm_l", "pm_v"})  # class counts stay noisy
    plain = result_noise(replace(private(), privacy=NamedOptions("none")))
    assert (plain.evaluation, plain.scores) == (None, frozenset())
    assert result_noise(private(epsilon=math.inf)) == plain
    central = result_noise(hospital_level(placement="central"))
    assert central.of("abc") == central.of("a")
    assert result_noise(hospital_level()).of("abc").draws == 3


def test_a_run_without_a_global_model_measures_none() -> None:
    """At silo level what it sends in its place is noise alone."""
    assert CompiledRun.of(private("fedproto")).profile.noise().evaluation is None
    noise = result_noise(hospital_level("fedproto", {"weights": "uniform"})).of("abc")
    assert noise is not None
    assert accuracy([9e5], [1e6], noise) == Estimate(withheld=NOISY)
