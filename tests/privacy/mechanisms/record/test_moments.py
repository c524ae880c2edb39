"""The release of second moments: bounded for every unit by force, exact in integers, noisy as planned, made once."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from fl_core.errors import RefusedError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.types.records import Schema
from fl_core.types.values import MomentSums
from privacy.accounting.accountant import Mechanism, PrivacyFilter, epsilon_of, epsilon_prv
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleasePlan
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.discrete_gaussian import MAX_SIGMA
from privacy.mechanisms.noise.sources import SecureNoise, SeededNoise
from privacy.mechanisms.record import moments
from privacy.mechanisms.record.class_sums import PrivacyUnits
from tests.support.federations import SCHEMA, Given
from tests.support.privacy import PLAIN, NoNoise, examples, extreme_records, private_data, records

WIDTH, CLASSES, SHARE = 65, 4, 0.25
H = moments.FINEST
TERMS = RecordDpConfig(rng="test", epsilon=8.0)


def vectors(x: Tensor, y: Tensor) -> Tensor:
    """The pixels as they are, at any length, and a constant."""
    return torch.cat((x.flatten(1).double(), torch.full((len(x), 1), SHARE, dtype=torch.float64)), dim=1)


def query(second: bool = True, joint: bool = False) -> MomentSums:
    return MomentSums(vectors, WIDTH, CLASSES, SHARE, second, joint)


def vector_of(data: Given, second: bool, joint: bool = False) -> Tensor:
    """Return (svec(A), B) as the mechanism sums it, before its noise, in float64."""
    a, b = moments.exact_sums(query(second, joint), data, PrivacyUnits.of(data), H)
    rows, columns = torch.tril_indices(WIDTH, WIDTH)
    factor = torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()
    return torch.cat((a[rows, columns].double() * factor * H**2, b.double().flatten() * H))


def with_group(data: Given, groups: list[str] | None) -> Given:
    data.groups = None if groups is None else tuple(groups)
    return data


@pytest.mark.parametrize(("second", "joint"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("grouped", [False, True])
def test_no_unit_moves_the_release_further_than_is_accounted(second: bool, joint: bool, grouped: bool) -> None:
    """Hundreds of records of every kind, in front, in the middle and at the end; of a group three of them together."""
    x, y = records()
    names = [f"patient {i // 2}" for i in range(len(y))] if grouped else None
    before, tried, furthest = vector_of(with_group(Given(x, y), names), second, joint), 0, 0.0
    most = moments.sensitivity(query(second))
    for place in (0, 4, len(y)):
        for _, image, label in extreme_records():
            for scale in (1.0, 1e-3, 1e6):
                more, labels = [image * scale], [label]
                if grouped:
                    more, labels = [image * scale, 1 - x[4], image], [label, 1, label]
                data = Given(
                    torch.cat((x[:place], torch.stack(more), x[place:])),
                    torch.cat((y[:place], torch.tensor(labels), y[place:])),
                )
                own = None if names is None else [*names[:place], *["another"] * len(more), *names[place:]]
                moved = float((vector_of(with_group(data, own), second, joint) - before).norm())
                assert moved <= most * (1 + 1e-12)
                furthest, tried = max(furthest, moved), tried + 1
    assert tried > 500
    assert furthest > (0.6 if grouped else 0.999) * most  # the bound is reached by records that are all alike


def test_a_joint_sum_is_one_row_with_noise_of_sensitivity_one_and_the_others_are_zeros() -> None:
    data, z = examples(150), 40.0
    rows = [
        moments.moment_sums(query(False, True), data, PrivacyUnits.of(data), z, SeededNoise(k, "joint"))
        for k in range(60)
    ]
    exact = moments.exact_sums(query(False, True), data, PrivacyUnits.of(data), H)[1][0].double() * H
    noise = torch.stack([r["b"][0] - exact for r in rows]) / z
    assert not any(bool(r["b"][1:].any()) or bool(r["a"].any()) for r in rows)
    assert all(float(r["variance"]) == z**2 for r in rows)
    assert kstest(noise.flatten().numpy(), "norm").pvalue > 1e-4


def test_the_measurement_sees_a_missing_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = records()
    monkeypatch.setattr(grid, "contributions", lambda rows, bound: torch.nan_to_num(rows))
    before = vector_of(Given(x, y), True)
    after = vector_of(Given(torch.cat((x, torch.ones(1, 1, 8, 8))), torch.cat((y, y[:1]))), True)
    assert float((after - before).norm()) > 10 * moments.sensitivity(query())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_no_number_adds_nothing(value: float) -> None:
    x, y = records()
    bad = torch.zeros(1, 1, 8, 8)
    bad[0, 0, 3, 3] = value
    after = vector_of(Given(torch.cat((bad, x)), torch.cat((y[:1], y))), True)
    assert torch.equal(after, vector_of(Given(x, y), True))


@pytest.mark.parametrize("grouped", [False, True])
def test_sums_are_those_of_exact_arithmetic_in_any_order(grouped: bool) -> None:
    """Against fractions, record by record; the order of records and batches leaves no trace."""
    data = examples(150, grouped)
    found = moments.exact_sums(query(), data, PrivacyUnits.of(data), H)
    u = [[Fraction(v) for v in row] for row in _truncated(data)]
    a = [[Fraction(0)] * WIDTH for _ in range(WIDTH)]
    b = [[Fraction(0)] * WIDTH for _ in range(CLASSES)]
    for members in PrivacyUnits.of(data).members:
        own, n = members.tolist(), len(members)
        for i in range(0, WIDTH, 9):
            for j in range(0, WIDTH, 7):
                a[i][j] += int(sum(u[k][i] * u[k][j] for k in own) / n)
            for c in range(CLASSES):
                b[c][i] += int(sum(u[k][i] for k in own if int(data.labels[k]) == c) / n)
    assert all(int(found[0][i, j]) == a[i][j] for i in range(0, WIDTH, 9) for j in range(0, WIDTH, 7))
    assert all(int(found[1][c, i]) == b[c][i] for c in range(CLASSES) for i in range(0, WIDTH, 9))
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
    other = Given(data.x[order], data.labels[order])
    other.groups = None if data.groups is None else tuple(data.groups[k] for k in order.tolist())
    again = moments.exact_sums(query(), other, PrivacyUnits.of(other), H)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, again, strict=True))


def _truncated(data: Given) -> list[list[int]]:
    v = vectors(data.x, data.labels).numpy()
    v = v / np.maximum(1.0, np.linalg.norm(v, axis=1, keepdims=True) * (1 + 1e-12))
    return np.trunc(v / H).astype(int).tolist()


def test_noise_is_that_of_the_sensitivity_on_every_number_and_symmetric() -> None:
    """Against the normal distribution: the true scale is accepted, two thirds and three halves of it are not."""
    none, z, source = Given(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long)), 3.0, SeededNoise(4, "moments")
    std = z * math.sqrt(2.0)
    diagonal, beside, sums = [], [], []
    rows, columns = torch.tril_indices(WIDTH, WIDTH, -1)
    for _ in range(60):
        found = moments.moment_sums(query(), none, PrivacyUnits.of(none), z, source)
        assert torch.equal(found["a"], found["a"].T)
        assert torch.equal(found["a"], torch.round(found["a"] / H**2) * H**2)
        assert torch.equal(found["b"], torch.round(found["b"] / H) * H)
        assert float(found["variance"]) == pytest.approx(std**2)
        diagonal.append(found["a"].diagonal().numpy())
        beside.append(found["a"][rows, columns].numpy())
        sums.append(found["b"].flatten().numpy())
    for drawn, scale in ((diagonal, std), (beside, std / math.sqrt(2)), (sums, std)):
        values = np.concatenate(drawn)[:8000]
        assert kstest(values, "norm", (0, scale)).pvalue > 1e-3
        assert kstest(values, "norm", (0, scale * 2 / 3)).pvalue < 1e-6
        assert kstest(values, "norm", (0, scale * 3 / 2)).pvalue < 1e-6
    whole = np.stack([np.concatenate((beside[k], sums[k])) for k in range(60)])
    assert len(np.unique(whole)) > 0.999 * whole.size  # no number of one draw is that of another


def test_class_sums_alone_have_less_noise_and_no_moments() -> None:
    data = examples()
    found = moments.moment_sums(query(second=False), data, PrivacyUnits.of(data), 3.0, SeededNoise(4, "moments"))
    assert not found["a"].any()
    assert float(found["variance"]) == pytest.approx(9.0)


def test_small_classes_leave_rows_of_zeros() -> None:
    data = Given(0.1 * examples(40).x, torch.zeros(40, dtype=torch.long))
    found = moments.moment_sums(query(), data, PrivacyUnits.of(data), 0.5, SeededNoise(4, "moments"), few=20)
    assert bool(found["b"][0].any())
    assert not found["b"][1:].any()


@pytest.mark.parametrize("z", [1e-2, 0.6, 50.0, 1e6])
def test_the_grid_has_room_for_every_noise_that_a_run_may_have(z: float) -> None:
    std = z * math.sqrt(2)
    h = moments.grid_of(std)
    assert std / h >= 4
    assert std / h**2 <= MAX_SIGMA
    assert h <= 2**-9  # an entry of 65 is about 2^-3
    data = examples(8)
    moments.moment_sums(query(), data, PrivacyUnits.of(data), z, SecureNoise())


# ---- the plan --------------------------------------------------------------------------------------------------------


def plan_of(rounds: int = 5, **options: object) -> ReleasePlan:
    method = build_method("analytic", {"release": "noisy", **options})
    model = build_model("random_features", {"width": 16}, SCHEMA, 0)
    return ReleasePlan.of(replace(TERMS, reserve_rounds=0), PLAIN, rounds, 24, method, model, SCHEMA)


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({}, {0: ["moments"]}),
        ({"head": "ncm"}, {0: ["moments"]}),
        ({"ridge": 0.0}, {0: ["moments"]}),
        ({"class_weights": "balanced"}, {0: ["class counts"], 1: ["moments"]}),
    ],
)
def test_one_release_is_planned_whatever_the_head_and_however_many_rounds(
    options: dict[str, object], made: dict[int, list[str]]
) -> None:
    plan = plan_of(**options)
    found = {t: [r.purpose for r in plan.releases(t, True, counts=t == 0) if r.collection == "train"] for t in range(5)}
    assert {t: purposes for t, purposes in found.items() if purposes} == made
    assert not [r for r in plan.releases(5, False) if r.collection == "train"]


@pytest.mark.parametrize("epsilon", [8.0, 1.0, 0.1])
def test_epsilon_by_two_other_accountants_is_within_what_was_asked_for(epsilon: float) -> None:
    plan = replace(plan_of(), terms=replace(TERMS, epsilon=epsilon, reserve_rounds=0))
    release = plan.moments(0).mechanism
    assert release == Mechanism(plan.noise)
    assert epsilon_of([release], 1e-5) <= epsilon
    assert epsilon_prv([release], 1e-5) <= epsilon + 0.0101  # whose error is 0.01
    assert PrivacyFilter.of(epsilon, 1e-5).used([release]) > 0.999  # and nothing is left over


def test_a_run_of_one_release_keeps_no_reserve_unless_it_asks_for_one() -> None:
    assert (replace(plan_of(), terms=TERMS).reserve, replace(plan_of(), terms=TERMS).noise) == (0, plan_of().noise)


def test_a_reserve_is_room_for_the_release_once_more() -> None:
    kept = replace(TERMS, reserve_rounds=1)
    one, two = plan_of(), replace(plan_of(), terms=kept)
    assert two.noise == pytest.approx(math.sqrt(2) * one.noise, rel=1e-3)
    assert [r.purpose for r in two.costliest if r.collection == "train"] == ["moments"]
    late = replace(plan_of(class_weights="balanced"), terms=kept)
    assert "moments" in [r.purpose for r in late.costliest]
    assert epsilon_of([late.moments(1).mechanism] * 2, 1e-5) <= 8


def test_a_second_release_is_refused_before_an_example_is_read() -> None:
    plan, data = plan_of(), examples()
    opened = private_data(plan, data, SeededNoise(1, "t"))
    opened._allowance.left = [plan.moments(0)]
    opened.sum(query())
    read = []
    data.batch = lambda *given: read.append(given)  # type: ignore[assignment, method-assign]
    with pytest.raises(RefusedError, match=r"E-PRIV-15"):
        opened.sum(query())
    assert not read


def test_what_private_data_release_is_the_plans_noise() -> None:
    plan, data = plan_of(), examples()
    found = private_data(plan, data, NoNoise(1, "t")).sum(query())
    assert float(found["variance"]) == pytest.approx(2 * plan.noise**2)


def test_the_schema_of_these_tests_has_the_classes_of_the_query() -> None:
    assert Schema((1, 8, 8), SCHEMA.classes) == SCHEMA
    assert len(SCHEMA.classes) == CLASSES
