"""Releases of class sums and counts: bounded for every unit, noisy as planned, suppressed where few, made once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.values import ClassSums
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.sources import SeededNoise
from privacy.mechanisms.record.class_sums import PrivacyUnits, class_sums, unit_shares
from privacy.mechanisms.record.private_data import DpSgdLocalData
from privacy.release_log import InMemoryReleaseLog
from tests.support.federations import Given
from tests.support.privacy import CONTEXT, PLAIN, examples, plan_of, private_data

pytestmark = pytest.mark.integration

FLAT = ClassSums(lambda x, y: x.flatten(1) - 0.5, 4)


@pytest.mark.parametrize("groups", [False, True])
def test_t_24_adding_or_removing_any_unit_moves_the_joint_query_by_at_most_delta(groups: bool) -> None:
    data, bound, weight = examples(24, groups), 0.7, 0.35
    units = PrivacyUnits.of(data)

    def joint(data: Given) -> Tensor:
        shares = unit_shares(FLAT, data, PrivacyUnits.of(data), bound)
        return torch.cat((shares.summed(shares.vectors, 4).flatten(), weight * shares.summed(shares.counts, 4)))

    whole, moved = joint(data), []
    for u in range(len(units)):
        keep = torch.nonzero(units.of_example != u).flatten()
        rest = Given(data.x[keep], data.labels[keep])
        rest.groups = None if data.groups is None else tuple(data.groups[i] for i in keep.tolist())
        moved.append(float((whole - joint(rest)).norm()))
    delta = math.hypot(bound, weight)
    assert max(moved) <= delta * (1 + 1e-12)
    if not groups:
        assert max(moved) == pytest.approx(delta)  # reached: the vectors are longer than the bound


def test_t_25_and_t_26_noise_of_a_prototype_release() -> None:
    """An absent class has noise of the same scale, and its count's noise is that of the specification."""
    few = Given(examples(8).x, torch.zeros(8, dtype=torch.long))
    wide = ClassSums(lambda x, y: x.flatten(1).repeat(1, 2), 4)  # some 100,000 numbers: a deviation within 0.3 %
    noise, rows, counts = SeededNoise(5, "t"), [], []
    for _ in range(1600):
        found = class_sums(wide, few, PrivacyUnits.of(few), 1.0, 0.5, 8.0, noise, few=0.0)
        rows.append(found["sum"][3])
        counts.append(float(found["count"][3]))
    seen = torch.stack([r for r in rows if bool(r.any())])
    assert float(seen.std()) == pytest.approx(8 * math.hypot(1, 0.5), rel=0.01)
    positive = torch.tensor([c for c in counts if c > 0])
    assert float(positive.square().mean().sqrt()) == pytest.approx(8 * math.hypot(1, 0.5) / 0.5, rel=0.1)  # 17.9


def test_t_27_an_absent_class_is_suppressed() -> None:
    few = Given(examples(40).x, torch.zeros(40, dtype=torch.long))
    absent, trials = 50, 210
    narrow = ClassSums(lambda x, y: x.flatten(1)[:, :1], absent + 1)
    noise, passed = SeededNoise(6, "t"), 0
    for _ in range(trials):
        passed += int(
            (class_sums(narrow, few, PrivacyUnits.of(few), 1.0, 0.5, 8.0, noise, few=20)["count"][1:] > 0).sum()
        )
    assert passed / (absent * trials) < 0.005


def test_without_noise_a_joint_release_is_the_plain_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "ROUNDING", 1e-12)
    data = examples()
    private = class_sums(FLAT, data, PrivacyUnits.of(data), 1e2, 1e2, 0.0, SeededNoise(0, "x"))
    plain = PlainLocalData(RoundData(data, data, PLAIN, CONTEXT)).sum(FLAT)
    assert torch.allclose(private["sum"], plain["sum"], atol=1e-5)
    assert torch.equal(private["count"], plain["count"])


def test_rounds_without_a_release_send_zeros_of_weight_zero() -> None:
    plan = plan_of(RecordDpConfig(prototype_every=2), method="fedproc")
    silent = private_data(plan, examples(), round=1).sum(FLAT)
    assert not silent["sum"].any()
    assert not silent["count"].any()
    assert silent["sum"].shape == (4, 64)
    assert not any(r.purpose == "prototypes" for r in plan.releases(1, True))
    assert sum(r.purpose == "prototypes" for r in plan.releases(2, True)) == 1


def test_class_counts_are_released_once() -> None:
    plan = plan_of(RecordDpConfig(), method="fedrs")
    log, allowance = InMemoryReleaseLog(), ReleaseAllowance(plan.releases(0, True))
    first = private_data(plan, examples(), SeededNoise(1, "n"), log=log, allowance=allowance)
    once = first.class_counts()
    later = DpSgdLocalData(
        RoundData(examples(), examples(), PLAIN, CONTEXT), plan, ReleaseAllowance([]), SeededNoise(2, "n"), log=log
    )
    assert torch.equal(later.class_counts(), once)
    assert sum(r.purpose == "class counts" for r in allowance.made) == 1
