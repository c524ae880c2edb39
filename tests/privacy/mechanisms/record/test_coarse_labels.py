"""Records of coarse labels in private runs: units like all others, in no sum that asks for a class."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fl_core.methods.fedavg import FedAvg
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import RoundData
from fl_core.types.targets import has_class, one_of
from fl_core.types.values import ClassSums, ExampleSums, MomentSums
from privacy.accounting.record_config import RecordDpConfig
from privacy.mechanisms.noise import grid
from privacy.mechanisms.record import moments
from privacy.mechanisms.record.class_sums import PrivacyUnits, class_sums, unit_shares
from tests.support.federations import Given
from tests.support.privacy import CONTEXT, PLAIN, NoNoise, examples, model_of, plan_of, private_data

FLAT = ClassSums(lambda x, y: x.flatten(1) - 0.5 + y.unsqueeze(1), 4)
MOMENTS = MomentSums(lambda x, y: torch.cat((x.flatten(1), y.unsqueeze(1) * 0 + 0.25), 1).double() / 9, 65, 4, 0.25)


def coarse(groups: bool = False) -> Given:
    """Give examples of which every fourth is of class 0 or 3."""
    made = examples(24, groups)
    labels = torch.where(torch.arange(24) % 4 == 1, one_of([0, 3]), made.labels)
    return grouped(made.x, labels, made.groups)


def grouped(x: Tensor, labels: Tensor, groups: tuple[str, ...] | None) -> Given:
    made = Given(x, labels)
    made.groups = groups
    return made


def without(data: Given) -> Given:
    known = has_class(data.labels)
    return Given(data.x[known], data.labels[known])


def test_sums_over_classes_are_those_without_them() -> None:
    data, rest = coarse(), without(coarse())
    plain, other = (PlainLocalData(RoundData(d, d, PLAIN, CONTEXT)) for d in (data, rest))
    assert torch.equal(plain.class_counts(), torch.tensor([6.0, 0, 6, 6]))
    for query in (FLAT, MOMENTS):
        found, wanted = plain.sum(query), other.sum(query)
        assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)
    every = plain.sum(ExampleSums(lambda x, _: {"n": torch.ones(len(x))}))  # not about classes
    assert float(every["n"]) == 24
    noisy = [class_sums(FLAT, d, PrivacyUnits.of(d), 50.0, 1.0, 0.0, NoNoise(0)) for d in (data, rest)]
    assert all(torch.allclose(noisy[0][name], noisy[1][name], atol=1e-4) for name in noisy[1])
    exact = [moments.exact_sums(MOMENTS, d, PrivacyUnits.of(d), moments.FINEST) for d in (data, rest)]
    assert all(torch.equal(a, b) for a, b in zip(*exact, strict=True))


@pytest.mark.parametrize("groups", [False, True])
def test_no_unit_with_coarse_labels_moves_a_sum_farther_than_another(groups: bool) -> None:
    data, bound, weight = coarse(groups), 0.7, 0.35
    units = PrivacyUnits.of(data)

    def joint(some: Given) -> Tensor:
        shares = unit_shares(FLAT, some, PrivacyUnits.of(some), bound)
        return torch.cat((shares.summed(shares.vectors, 4).flatten(), weight * shares.summed(shares.counts, 4)))

    for u in range(len(units)):
        keep = torch.nonzero(units.of_example != u).flatten()
        names = None if data.groups is None else tuple(data.groups[i] for i in keep.tolist())
        rest = grouped(data.x[keep], data.labels[keep], names)
        assert float((joint(data) - joint(rest)).norm()) <= math.hypot(bound, weight) * (1 + 1e-12)


def test_private_steps_on_them_are_the_plain_ones_without_clip_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "ROUNDING", 1e-12)
    data, plan = coarse(), plan_of(RecordDpConfig(clip=1e4, physical_batch=5))
    private, plain, other = model_of(), model_of(), model_of()
    private_data(plan, data).sgd(private, FedAvg.loss)
    PlainLocalData(RoundData(data, data, PLAIN, CONTEXT)).sgd(plain, FedAvg.loss)
    PlainLocalData(RoundData(without(data), data, PLAIN, CONTEXT)).sgd(other, FedAvg.loss)
    wanted = tensor_maps.copy_state(plain)
    found = tensor_maps.copy_state(private)
    assert all(torch.allclose(found[name], v, rtol=1e-4, atol=1e-6) for name, v in wanted.items())
    assert not torch.allclose(tensor_maps.copy_state(other)["head.bias"], wanted["head.bias"], atol=1e-3)
