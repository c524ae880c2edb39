"""A caller's own network as a model: where it is divided, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fl_core.errors import ConfigError
from fl_core.models import MODELS
from fl_core.models.own import maker, options_of, split
from fl_core.types.records import Schema

SCHEMA = Schema((1, 8, 8), ("a", "b", "c"))


class Branched(nn.Module):
    """Two paths that meet before the last layer, whose name is no `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 3)  # the order in which layers are made is not that in which they are called
        self.left, self.right = nn.Linear(64, 5), nn.Conv2d(1, 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cat((self.left(x.flatten(1)), self.right(x).flatten(1)), 1))


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(9, 3))


def torchvision_like() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Sequential(nn.Linear(144, 3)))


@pytest.mark.parametrize("make", [sequential, torchvision_like, Branched])
def test_a_network_is_divided_before_its_last_layer_and_answers_as_before(make) -> None:  # type: ignore[no-untyped-def]
    own, x = make().eval(), torch.randn(4, 1, 8, 8)
    expected = own(x)
    found = split(make_copy(own), SCHEMA).eval()
    assert torch.equal(found(x), expected)
    assert torch.equal(found.head(found.features(x)), expected)
    assert found.features(x).shape == (4, found.feature_dim)
    assert found.n_classes == 3
    assert not any(getattr(module, "inplace", False) for module in found.modules())


def make_copy(model: nn.Module) -> nn.Module:
    return maker(model)(SCHEMA)


def test_a_linear_layer_alone_is_a_head_on_the_pixels() -> None:
    own, x = nn.Linear(64, 3), torch.randn(2, 1, 8, 8)
    assert torch.equal(split(own, SCHEMA)(x), own(x.flatten(1)))


def test_a_module_begins_with_its_weights_and_is_left_alone() -> None:
    own = sequential()
    first = split(make_copy(own), SCHEMA)
    with torch.no_grad():
        first.head.weight.zero_()  # type: ignore[union-attr]
    assert bool(own[-1].weight.any())
    assert split(make_copy(own), SCHEMA).head.weight.equal(own[-1].weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), "one of 2 outputs"),
        (nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()), "no such layer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Softmax(1)), "last nn.Linear, '1', found another"),
        (nn.Sequential(nn.Flatten(), nn.Linear(100, 3)), "examples of shape"),
        (nn.Conv2d(1, 3, 3), r"found \(2, 3, 6, 6\)"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_was_found(own: nn.Module, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        split(own, SCHEMA)
    assert caught.value.code == "E-CFG-08"


def test_a_function_that_returns_no_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nn\.Module from the function, found int"):
        options_of(lambda _: 7)().build(SCHEMA)  # type: ignore[arg-type, return-value]


def test_our_own_models_are_what_they_are() -> None:
    made = MODELS["digits_cnn"]().build(SCHEMA)
    assert split(made, SCHEMA) is made
