"""Tensors in one row: the same tensors, and the same steps bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from fl_core import rng, rows, trees
from fl_core.models import MODELS
from fl_core.optimizers import make_optimizer, make_optimizers, make_steppers
from fl_core.rows import RowOptimizer
from fl_core.types import BLOCK, Schema, TrainConfig

SHAPES = ((5, 3), (7,), (1,), (2, 3, 3, 3), (31,), (64, 9))
CONFIGS = {
    "momentum": TrainConfig(lr=0.1, momentum=0.9, weight_decay=1e-3),
    "plain": TrainConfig(lr=0.1, momentum=0.0, weight_decay=0.0),
    "nesterov": TrainConfig(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": TrainConfig(lr=0.01, optimizer="adam", weight_decay=1e-3),
}


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    draw = rng.stream(3, "parameters")
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]


def make(config: TrainConfig) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    return lambda given: make_optimizer(given, config.lr, config)


def laid(given: list[nn.Parameter], config: TrainConfig) -> RowOptimizer:
    row = rows.lay(given)
    assert row is not None
    return RowOptimizer(given, row, make(config))


def equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("missing", [None, 0, 2], ids=["all", "never", "from the third step"])
def test_takes_the_steps_of_the_tensors_by_themselves_bit_for_bit(name: str, missing: int | None) -> None:
    config, alone, together = CONFIGS[name], parameters(), parameters()
    ours, theirs = laid(together, config), make(config)(alone)
    for step in range(5):
        draw = rng.stream(step, "gradients")
        for k, (a, b) in enumerate(zip(alone, together, strict=True)):
            gradient = torch.randn(a.shape, generator=draw)
            there = k != 3 or missing is None or step < missing
            a.grad, b.grad = (gradient, gradient.clone()) if there else (None, None)
        theirs.step()
        ours.step()
        assert equal(alone, together)


def test_a_parameter_without_a_gradient_takes_no_step() -> None:
    given = parameters()
    ours, before = laid(given, CONFIGS["momentum"]), [p.detach().clone() for p in given]
    for p in given[1:]:
        p.grad = torch.ones_like(p)
    ours.step()
    assert torch.equal(given[0], before[0])
    assert not any(torch.equal(p, old) for p, old in zip(given[1:], before[1:], strict=True))


def test_parameters_stay_the_objects_that_they_are() -> None:
    given = parameters()
    values, places = [p.detach().clone() for p in given], [id(p) for p in given]
    given[0].grad = torch.ones_like(given[0])
    row = rows.lay(given)
    assert row is not None
    assert row.tolist() == torch.cat([v.flatten() for v in values]).tolist()
    assert equal(given, values)
    assert [id(p) for p in given] == places
    assert given[0].grad is not None
    row += 1
    assert equal(given, [v + 1 for v in values])
    given[2].data.fill_(7.0)
    assert float(row[22]) == 7.0


def test_a_row_is_found_where_it_lies_and_nowhere_else() -> None:
    given = parameters()
    assert rows.joined(given) is None
    row = rows.lay(given)
    again = rows.lay(given)
    assert row is not None
    assert again is not None
    assert again.data_ptr() == row.data_ptr()
    part = rows.joined(given[1:4])
    assert part is not None
    assert torch.equal(part, row[15:77])
    assert rows.joined(list(reversed(given))) is None
    assert rows.joined(copy.deepcopy(given)) is None  # a copy lies elsewhere
    given[1].data = given[1].data.clone()
    assert rows.joined(given) is None


@pytest.mark.parametrize(
    "given",
    [
        parameters([(4,)]),
        parameters([(BLOCK,), (1,)]),
        [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double())],
        [nn.Parameter(torch.zeros(3, 2).t()), nn.Parameter(torch.zeros(2))],
        [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 2))],
        [],
    ],
    ids=["a single one", "many numbers", "two types", "a format of its own", "nothing", "none"],
)
def test_what_gains_nothing_or_cannot_be_is_left_alone(given: list[nn.Parameter]) -> None:
    before = [p.data_ptr() for p in given]
    assert rows.lay(given) is None
    assert [p.data_ptr() for p in given] == before


@pytest.mark.parametrize("plain", [None, lambda name: name in "ad"], ids=["one group", "two groups"])
def test_steppers_equal_the_optimizers_bit_for_bit(plain: Callable[[str], bool] | None) -> None:
    config = CONFIGS["momentum"]
    alone, together = (dict(zip("abcdef", parameters(), strict=True)) for _ in range(2))
    theirs, ours = make_optimizers(alone, 0.1, config, plain), make_steppers(together, 0.1, config, plain)
    assert any(isinstance(o, RowOptimizer) for o in ours)
    for step in range(3):
        for name, p in alone.items():
            p.grad = torch.randn(p.shape, generator=rng.stream(step, name))
            together[name].grad = p.grad.clone()
        for o in (*theirs, *ours):
            o.step()
        assert equal([*alone.values()], [*together.values()])


@pytest.mark.parametrize("name", MODELS)
def test_names_of_tensors_are_those_of_the_state_dict(name: str) -> None:
    odd = {"char_lstm": (80,), "spiral_mlp": (2,), "mlp_net": (1, 28, 28)}
    shape = (1, 8, 8) if name.startswith("digits") else odd.get(name, (3, 32, 32))
    with torch.device("meta"):
        model = MODELS[name]().build(Schema(shape, tuple("abcd")))
    assert [*trees.named(model)] == [*model.state_dict()]
    wanted = {id(v) for v in model.state_dict(keep_vars=True).values()}
    assert {id(v) for v in trees.named(model).values()} == wanted


def test_a_buffer_that_is_not_kept_has_no_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[0].register_buffer("scratch", torch.zeros(1), persistent=False)
    assert [*trees.named(model)] == [*model.state_dict()]
    assert "0.scratch" not in trees.named(model)
