"""Parts of a step that another process computes: they add up to the step of one process, and to an independent sum."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from fl_core.training.local_data import PlainLocalData
from fl_core.training.team import HelperData
from fl_core.types import tensor_maps
from fl_core.types.interfaces import Gradients, LocalData, RoundData, StepPart, Team
from fl_core.types.records import TrainConfig
from fl_core.types.values import LossFn, SgdOptions
from privacy.accounting.record_config import RecordDpConfig
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.sources import SeededNoise
from privacy.mechanisms.record.private_data import PrivateHelperData
from tests.support.federations import Given
from tests.support.privacy import CONTEXT, ce, network, plan_of, private_data, records

EXACT = 1e-5
"""Of what float32 sums of ten examples may differ from float64, relative to their length."""


class OneProcess(Team):
    """A team whose helpers are copies of the model in this process."""

    def __init__(self, helper: HelperData, model: nn.Module, loss: LossFn, size: int = 3) -> None:
        self.size, self._helper, self._loss = size, helper, loss
        self._models = [copy.deepcopy(model) for _ in range(size - 1)]
        self._gradients: list[Gradients] = []
        self.parts = list[StepPart]()

    def deal(self, params: Sequence[nn.Parameter], parts: Sequence[StepPart]) -> None:
        for model, part in zip(self._models, parts, strict=False):
            theirs = list(model.parameters())
            with torch.no_grad():
                for p, value in zip(theirs, params, strict=True):
                    p.copy_(value)
            with self._helper.computing(model, self._loss, theirs) as gradients:
                self._gradients.append([None if g is None else g.clone() for g in gradients(part)])
            self.parts.append(part)

    def collect(self) -> Iterator[Gradients]:
        made, self._gradients = self._gradients, []
        return iter(made)


class NoLeader:
    """Nothing is asked of it here."""


def helper(config: TrainConfig, private: bool) -> HelperData:
    if private:
        return PrivateHelperData(NoLeader(), config, config.lr, config.batch_size, grouped=False)
    return HelperData(NoLeader(), config, config.lr, config.batch_size)  # type: ignore[arg-type]


def opened(config: TrainConfig, private: bool, team: Team | None) -> LocalData:
    x, y = records()
    if private:
        plan = plan_of(RecordDpConfig(clip=0.1, physical_batch=3), config, units=len(x))
        return private_data(plan, Given(x, y), SeededNoise(5, "team"), team=team or Team())
    return PlainLocalData(RoundData(Given(x, y), Given(x, y), config, CONTEXT, team=team or Team()))


@pytest.mark.parametrize("private", [False, True], ids=["plain", "private"])
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_a_step_has_the_same_bits_whoever_computes_its_parts(private: bool, dropout: bool) -> None:
    config = TrainConfig(lr=0.3, momentum=0.9, batch_size=8, epochs=3, micro_batch=0 if private else 3, clip_norm=1.0)
    start, trained = network(dropout), list[str]()
    for shared in (False, True):
        model = copy.deepcopy(start)
        team = OneProcess(helper(config, private), model, ce) if shared else None
        opened(config, private, team).sgd(model, ce, SgdOptions(penalty=lambda m: 0.01 * next(m.parameters()).sum()))
        trained.append(tensor_maps.digest(tensor_maps.copy_state(model)))
        assert team is None or len(team.parts) > 3
    assert trained[0] == trained[1] != tensor_maps.digest(tensor_maps.copy_state(start))


def test_parts_of_a_step_begin_where_memory_is_aligned() -> None:
    """Products of matrices have other last bits elsewhere, and a helper's copy of a part is aligned."""
    config = TrainConfig(lr=0.3, batch_size=8, micro_batch=3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 4))
    team = OneProcess(helper(config, private=False), model, ce)
    x, y = torch.rand(10, 5, generator=torch.Generator().manual_seed(1)), records()[1]
    PlainLocalData(RoundData(Given(x, y), Given(x, y), config, CONTEXT, team=team)).sgd(model, ce)
    assert {part.tensors[0].data_ptr() % 64 for part in team.parts} == {0}


def test_parts_of_a_step_draw_each_their_own_dropout() -> None:
    config = TrainConfig(lr=0.3, batch_size=8, micro_batch=2)
    team = OneProcess(helper(config, private=False), network(dropout=True), ce)
    opened(config, False, team).sgd(network(dropout=True), ce)
    seeds = [part.seed for part in team.parts]
    assert None not in seeds
    assert len(set(seeds)) == len(seeds) > 2


def gradient_of_each(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Compute one gradient after the other, flat, in float64."""
    model = copy.deepcopy(model).double()
    each = []
    for k in range(len(x)):
        loss = ce(model, x[k : k + 1].double(), y[k : k + 1]).per_example.sum()
        each.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return each


def gradient_of_part(private: bool, part: StepPart, model: nn.Module) -> Tensor:
    with helper(TrainConfig(), private).computing(model, ce, list(model.parameters())) as gradients:
        return torch.cat([g.double().flatten() for g in gradients(part) if g is not None])


def test_a_helper_adds_up_gradients_that_are_clipped_one_by_one_without_noise() -> None:
    (x, y), model, clip = records(), network(dropout=False), 1.3
    units = torch.arange(8)
    units[5:] = -1  # rows that fill the chunk up
    added = gradient_of_part(True, StepPart((x[:8], y[:8], units), (clip, 5)), model)
    each = gradient_of_each(model, x[:5], y[:5])
    assert min(float(g.norm()) for g in each) < clip < max(float(g.norm()) for g in each)
    slowly = torch.stack([g * min(1.0, clip / float(g.norm())) for g in each]).sum(0)
    assert float((added - slowly).norm()) <= grid.FLOATS * clip


def test_a_helper_weighs_the_mean_gradient_of_its_part_by_its_share() -> None:
    (x, y), model = records(), network(dropout=False)
    added = gradient_of_part(False, StepPart((x[:4], y[:4]), (0.4, 1.0), 7), model)
    slowly = 0.4 * torch.stack(gradient_of_each(model, x[:4], y[:4])).mean(0)
    assert float((added - slowly).norm()) <= EXACT * float(slowly.norm())
