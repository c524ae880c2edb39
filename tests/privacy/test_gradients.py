"""Clipped sums against a loop over examples, in float64; sensitivity by brute force."""

from __future__ import annotations

import copy

import pytest
import torch
from opacus.grad_sample.conv import compute_conv_grad_sample as opacus_conv
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.errors import ConfigError
from fl_core.models import build_model
from fl_core.types import Schema
from privacy.gradients import Gradients, clipped, conv_grad_sample, per_unit, trainable
from privacy.validate import validate

SCHEMA = Schema((1, 8, 8), tuple("abcd"))


def made(dtype: torch.dtype = torch.float64) -> nn.Module:
    return build_model("digits_cnn", {}, SCHEMA, 3).to(dtype)


def batch(n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    return torch.rand(n, 1, 8, 8, generator=g, dtype=torch.float64), torch.arange(n) % 4


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y, reduction="none")


def loop(model: nn.Module, x: Tensor, y: Tensor, units: Tensor, clip: float) -> Gradients:
    """The slow way: one unit at a time."""
    params = trainable(model)
    total = [torch.zeros_like(p) for p in params]
    for u in range(int(units.max()) + 1):
        mine = units == u
        grads = torch.autograd.grad(ce(model, x[mine], y[mine]).mean(), params)
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for t, g in zip(total, grads, strict=True):
            t += g * min(1.0, clip / float(norm))
    return total


def fast(model: nn.Module, x: Tensor, y: Tensor, units: Tensor, clip: float) -> Gradients:
    with per_unit(model) as engine:
        return engine.clipped_sum(lambda: ce(model, x, y), units, clip)


@pytest.mark.parametrize("clip", [0.05, 0.5, 1e6])
@pytest.mark.parametrize("grouped", [False, True])
def test_t_17_clipped_sums_are_those_of_a_loop_over_units(clip: float, grouped: bool) -> None:
    model, (x, y) = made(), batch(9)
    units = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4]) if grouped else torch.arange(9)
    for a, b in zip(fast(model, x, y, units, clip), loop(model, x, y, units, clip), strict=True):
        assert torch.allclose(a, b, rtol=2e-6, atol=1e-12)


def test_hooks_are_gone_afterwards() -> None:
    model, (x, y) = made(), batch(4)
    clean = copy.deepcopy(model)
    fast(model, x, y, torch.arange(4), 1.0)
    assert [*model.state_dict()] == [*clean.state_dict()]
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert all(not m._forward_hooks and not m._backward_hooks for m in model.modules())
    fast(model, x, y, torch.arange(4), 1.0)  # and can be put on again


@pytest.mark.parametrize(("channels", "groups"), [(4, 1), (4, 2), (6, 6), (4, 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_t_18_grouped_sampler_equals_opacus(channels: int, groups: int, bias: bool) -> None:
    layer = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, groups=groups, bias=bias).double()
    x = torch.randn(5, channels, 7, 7, dtype=torch.float64)
    dy = torch.randn_like(layer(x))
    ours, theirs = conv_grad_sample(layer, [x], dy), opacus_conv(layer, [x], dy)
    assert set(ours) == set(theirs)
    for p, value in theirs.items():
        assert torch.allclose(ours[p], value, rtol=0, atol=1e-12)


def norm_of(grads: Gradients) -> float:
    return float(torch.stack([g.square().sum() for g in grads]).sum().sqrt())


def test_t_14_adding_or_removing_any_record_moves_the_sum_by_at_most_the_clip() -> None:
    model, (x, y) = made(), batch(12)
    clip, whole = 0.03, None
    whole = fast(model, x, y, torch.arange(12), clip)
    moved = []
    for i in range(12):
        rest = [k for k in range(12) if k != i]
        less = fast(model, x[rest], y[rest], torch.arange(11), clip)
        moved.append(norm_of([a - b for a, b in zip(whole, less, strict=True)]))
    assert max(moved) <= clip
    assert max(moved) > 0.99 * clip  # the bound is reached


def test_t_14_adding_or_removing_any_group_moves_the_sum_by_at_most_the_clip() -> None:
    model, (x, y) = made(), batch(9)
    units, clip = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3]), 0.03
    whole = fast(model, x, y, units, clip)
    for u in range(4):
        keep = units != u
        renumbered = torch.unique(units[keep], return_inverse=True)[1]
        less = fast(model, x[keep], y[keep], renumbered, clip)
        assert norm_of([a - b for a, b in zip(whole, less, strict=True)]) <= clip


def test_a_microbatch_is_shortened_to_its_clip() -> None:
    model, (x, y) = made(), batch(6)
    loss = ce(model, x, y).sum()
    assert norm_of(clipped(100 * loss, trainable(model), 0.2)) == pytest.approx(0.2, rel=1e-5)
    assert norm_of(clipped(100 * ce(model, x, y).sum(), trainable(model), 0.2)) <= 0.2
    free = clipped(ce(model, x, y).sum(), trainable(model), 1e9)
    for a, b in zip(free, torch.autograd.grad(ce(model, x, y).sum(), trainable(model)), strict=True):
        assert torch.allclose(a, b)


def test_a_parameter_without_influence_has_a_zero_gradient() -> None:
    model, (x, y) = made(), batch(3)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    assert any(torch.equal(g, torch.zeros(2, dtype=torch.float64)) for g in fast(model, x, y, torch.arange(3), 1.0))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3).requires_grad_(False)


@pytest.mark.parametrize(
    "bad", [nn.BatchNorm2d(3), Frozen(), nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)), nn.ReLU(True)]
)
def test_t_19_modules_that_mix_examples_or_work_in_place_are_refused(bad: nn.Module) -> None:
    with pytest.raises(ConfigError, match="E-PRIV-14"):
        validate(nn.Sequential(nn.Linear(2, 2), bad))


@pytest.mark.parametrize(("name", "options"), [("digits_cnn", {}), ("resnet18", {"norm": "group"})])
def test_t_19_models_without_batch_norm_pass(name: str, options: dict[str, object]) -> None:
    validate(build_model(name, options, SCHEMA if name == "digits_cnn" else Schema((3, 32, 32), tuple("abcd")), 0))
