"""Models as named tensors: the names of `state_dict`, without its detours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_core.models import MODELS
from fl_core.types import tensor_maps
from fl_core.types.records import Schema
from tests.support.federations import MODEL_SHAPES


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_names_of_tensors_are_those_of_the_state_dict(name: str) -> None:
    odd = {"char_lstm": (80,), "spiral_mlp": (2,), "mlp_net": (1, 28, 28), "table_mlp": (7,)}
    shape = (1, 8, 8) if name.startswith("digits") else odd.get(name, (3, 32, 32))
    with torch.device("meta"):
        model = MODELS[name]().build(Schema(shape, tuple("abcd")))
    assert [*tensor_maps.named_tensors(model)] == [*model.state_dict()]
    wanted = {id(v) for v in model.state_dict(keep_vars=True).values()}
    assert {id(v) for v in tensor_maps.named_tensors(model).values()} == wanted


def test_a_buffer_that_is_not_kept_has_no_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[0].register_buffer("scratch", torch.zeros(1), persistent=False)
    assert [*tensor_maps.named_tensors(model)] == [*model.state_dict()]
    assert "0.scratch" not in tensor_maps.named_tensors(model)


def test_the_digest_of_tensors_reads_them_as_they_are_numbered() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert (
        tensor_maps.digest({"x": x.t()})
        == tensor_maps.digest({"x": x.t().contiguous()})
        != tensor_maps.digest({"x": x})
    )
    assert tensor_maps.digest({"x": torch.tensor(1.0)}) != tensor_maps.digest({"x": torch.tensor(2.0)})


def test_adding_keeps_gradients_and_promotes_types() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(3)
    tensor_maps.add({"x": a}, {"x": b})["x"].sum().backward()
    assert a.grad is not None
    assert tensor_maps.add({"x": b}, {"x": b.double()})["x"].dtype is torch.float64
    assert tensor_maps.add({"x": b}, {"x": torch.ones(())}, 0.5)["x"].tolist() == [1.5, 1.5, 1.5]
