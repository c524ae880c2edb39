"""Clipped sums against a loop over examples, in float64; sensitivity by brute force."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # Opacus' sampler looks into it
from opacus.grad_sample.conv import compute_conv_grad_sample as opacus_conv
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from fl_core.errors import ConfigError
from fl_core.models import build_model
from fl_core.types.records import Schema
from privacy.mechanisms.noise import grid
from privacy.mechanisms.record import per_sample_gradients
from privacy.mechanisms.record.model_check import validate
from privacy.mechanisms.record.per_sample_gradients import (
    MODES,
    Gradients,
    clipped,
    conv_grad_sample,
    mode_of,
    per_unit,
    trainable,
)

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


def fast(model: nn.Module, x: Tensor, y: Tensor, units: Tensor, clip: float, mode: str = "bookkeeping") -> Gradients:
    with per_unit(model, mode) as engine:
        return engine.clipped_sum(lambda: ce(model, x, y), units, clip)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", [0.05, 0.5, 1e6])
@pytest.mark.parametrize("grouped", [False, True])
def test_t_17_clipped_sums_are_those_of_a_loop_over_units(clip: float, grouped: bool, mode: str) -> None:
    model, (x, y) = made(), batch(9)
    units = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4]) if grouped else torch.arange(9)
    for a, b in zip(fast(model, x, y, units, clip, mode), loop(model, x, y, units, clip), strict=True):
        assert torch.allclose(a, b, rtol=1e-4 if clip < 1 else 1e-9, atol=1e-12)  # the clip is 5e-5 shorter


@pytest.mark.parametrize("mode", MODES)
def test_hooks_are_gone_afterwards(mode: str) -> None:
    model, (x, y) = made(), batch(4)
    clean = copy.deepcopy(model)
    fast(model, x, y, torch.arange(4), 1.0, mode)
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
        assert groups > 1 or torch.equal(ours[p], value)


@pytest.mark.parametrize("padding", ["same", "valid", 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_t_18_the_sampler_of_ordinary_convolutions_has_the_bits_of_opacus(padding, dtype: torch.dtype) -> None:
    layer = nn.Conv2d(3, 16, (3, 5), padding=padding, dilation=(1, 2)).to(dtype)
    x = torch.randn(4, 3, 17, 19, dtype=dtype)
    dy = torch.randn_like(layer(x))
    ours, theirs = conv_grad_sample(layer, [x], dy), opacus_conv(layer, [x], dy)
    assert all(torch.equal(ours[p], value) for p, value in theirs.items())


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv3d])
def test_t_18_opacus_samples_the_other_convolutions(kind: type[nn.Conv1d] | type[nn.Conv3d]) -> None:
    layer = kind(2, 3, 3).double()
    x = torch.randn(4, 2, *[6] * (layer.weight.dim() - 2), dtype=torch.float64)
    dy = torch.randn_like(layer(x))
    whole = torch.autograd.grad((layer(x) * dy).sum(), list(layer.parameters()))
    samples = conv_grad_sample(layer, [x], dy)
    for p, grad in zip(layer.parameters(), whole, strict=True):
        assert torch.allclose(samples[p].sum(0), grad, rtol=0, atol=1e-12)


def norm_of(grads: Gradients) -> float:
    return float(torch.stack([g.square().sum() for g in grads]).sum().sqrt())


@pytest.mark.parametrize("mode", MODES)
def test_t_14_adding_or_removing_any_record_moves_the_sum_by_at_most_the_clip(mode: str) -> None:
    model, (x, y) = made(), batch(12)
    clip = 0.03
    whole = fast(model, x, y, torch.arange(12), clip, mode)
    moved = []
    for i in range(12):
        rest = [k for k in range(12) if k != i]
        less = fast(model, x[rest], y[rest], torch.arange(11), clip, mode)
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
    assert norm_of(clipped(100 * loss, trainable(model), 0.2)) == pytest.approx(0.2, rel=1e-4)
    assert norm_of(clipped(100 * ce(model, x, y).sum(), trainable(model), 0.2)) <= 0.2
    free = clipped(ce(model, x, y).sum(), trainable(model), 1e9)
    for a, b in zip(free, torch.autograd.grad(ce(model, x, y).sum(), trainable(model)), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_without_influence_has_a_zero_gradient(mode: str) -> None:
    model, (x, y) = made(), batch(3)
    model.add_module("unused", nn.Linear(2, 3, dtype=torch.float64))
    found = fast(model, x, y, torch.arange(3), 1.0, mode)
    assert [g.shape for g in found] == [p.shape for p in trainable(model)]
    assert [bool(g.any()) for g in found] == [True] * (len(found) - 2) + [False] * 2


class Odd(nn.Module):
    """Every kind of layer and use: a sequence, a strided and a grouped convolution, few places and many."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.few = nn.Conv2d(8, 16, 4, stride=3, padding=1, dilation=1)
        self.norm = nn.GroupNorm(4, 16)
        self.rows = nn.Linear(16, 48)
        self.twice = nn.Linear(48, 48, bias=False)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.few(self.grouped(self.wide(x)).tanh())).flatten(2).mT
        z = self.twice(self.rows(z).tanh()).tanh()
        logits: Tensor = self.head(self.twice(z.mean(1)))
        return logits


@pytest.mark.parametrize("clip", [0.05, 1e6])
@pytest.mark.parametrize("grouped", [False, True])
def test_every_kind_of_layer_gives_the_sums_of_a_loop(clip: float, grouped: bool) -> None:
    torch.manual_seed(0)
    model, (x, y) = Odd().double(), batch(6)
    units = torch.tensor([0, 0, 1, 1, 1, 2]) if grouped else torch.arange(6)
    assert mode_of(model) == "bookkeeping"
    for a, b in zip(fast(model, x, y, units, clip), loop(model, x, y, units, clip), strict=True):
        assert torch.allclose(a, b, rtol=1e-4 if clip < 1 else 1e-9, atol=1e-12)  # the clip is 5e-5 shorter


def test_norms_come_by_gram_matrices_where_places_are_few() -> None:
    model = Odd()
    assert per_sample_gradients.prefers_ghost_norms(model.rows, torch.zeros(5, 4, 48))
    assert not per_sample_gradients.prefers_ghost_norms(model.rows, torch.zeros(5, 8, 48))
    assert per_sample_gradients.prefers_ghost_norms(model.head, torch.zeros(5, 4))
    late, early = nn.Conv2d(256, 256, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
    assert per_sample_gradients.prefers_ghost_norms(late, torch.zeros(2, 256, 8, 8))
    assert not per_sample_gradients.prefers_ghost_norms(early, torch.zeros(2, 64, 32, 32))
    assert not per_sample_gradients.prefers_ghost_norms(nn.Conv2d(256, 256, 3, groups=256), torch.zeros(2, 256, 2, 2))


@pytest.mark.parametrize("places", [1, 4])
def test_norms_by_gram_matrices_are_exact_where_terms_cancel(places: int) -> None:
    """All places see nearly the same, and their gradients sum to nearly nothing: the norm is 1e-4 of its terms."""
    torch.manual_seed(1)
    layer = nn.Conv2d(64, 64, 1)
    x = torch.randn(3, 64, 1, 1).expand(-1, -1, 1, places) + 1e-4 * torch.randn(3, 64, 1, places)
    dy = torch.randn(3, 64, 1, places)
    dy = dy - dy.mean(3, keepdim=True) if places > 1 else dy
    exact = conv_grad_sample(layer, [x.double()], dy.double())
    true = torch.stack([g.flatten(1).square().sum(1) for g in exact.values()]).sum(0)
    found = per_sample_gradients.ghost_norms(layer, x, dy)
    assert bool((found >= true * (1 - 1e-12)).all())  # longer by a bound on its error, never shorter
    assert torch.allclose(found, true, rtol=1e-4 if places > 1 else 1e-6, atol=0)


FEW_PLACES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one place": (lambda: nn.Linear(7, 5), (7,)),
    "a sequence": (lambda: nn.Linear(7, 5, bias=False), (4, 7)),
    "one pixel": (lambda: nn.Conv2d(7, 5, 1, bias=False), (7, 2, 3)),
    "a kernel": (lambda: nn.Conv2d(4, 5, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(2, 1)), (4, 5, 3)),
}
HOSTILE: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda v: v,
    "huge": lambda v: 3e38 * v.sign(),
    "denormal": lambda v: 1e-44 * v.sign(),
    "wide": lambda v: v * 10.0 ** (30 * v.sign()),
    "cancelling": lambda v: v,
    "nan": lambda v: torch.where(v == v.max(), math.nan, v),
    "infinite": lambda v: torch.where(v == v.max(), -math.inf, v),
}


def made_hostile(kind: str, layer: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Make the inputs of a layer and the slopes of its outputs; the first of six examples is ordinary."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(6, *shape, generator=g)
    dy = torch.randn(layer(x).shape, generator=g)
    if kind == "cancelling" and len(shape) > 1:  # all places see the same, and their slopes add up to nearly nothing
        axis = (2, 3) if len(shape) == 3 else 1
        x = 1e19 * x.mean(axis, keepdim=True).expand_as(x)
        dy = 1e15 * (dy - dy.mean(axis, keepdim=True))
    rest = HOSTILE[kind]
    return torch.cat((x[:1], rest(x[1:]))), torch.cat((dy[:1], rest(dy[1:])))


SCALE = 149
"""Every float32 is a whole multiple of 2^-149."""


def whole(values: Tensor) -> np.ndarray:
    numbers = [int(Fraction(v) * 2**SCALE) for v in values.double().flatten().tolist()]
    return np.array(numbers, dtype=object).reshape(values.shape)


def exact_gradients(layer: nn.Module, x: Tensor, dy: Tensor) -> list[np.ndarray]:
    """Compute each example's gradient in whole multiples of 2^-298, without any rounding."""
    rows = list[np.ndarray]()
    for one, slope in zip(x, dy, strict=True):
        if isinstance(layer, nn.Conv2d):
            patches = unfold(one.unsqueeze(0), layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0]
            inputs, slopes = whole(patches), whole(slope.flatten(1))
        else:
            inputs, slopes = whole(one.reshape(-1, x.shape[-1]).T), whole(slope.reshape(-1, dy.shape[-1]).T)
        parts = [(slopes @ inputs.T).ravel()]
        if layer.bias is not None:
            parts.append(slopes.sum(1) * 2**SCALE)
        rows.append(np.concatenate(parts))
    return rows


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("places", FEW_PLACES)
def test_a_hostile_layer_of_few_places_adds_no_more_than_the_clip_of_each_example(places: str, kind: str) -> None:
    """Exactly: whole numbers of any size tell the true norms and sums that the computed ones are held against."""
    build, shape = FEW_PLACES[places]
    layer, clip = build(), 0.5
    x, dy = made_hostile(kind, layer, shape)
    factor = grid.factors(per_sample_gradients.ghost_norms(layer, x, dy), clip)
    finite = [bool(torch.isfinite(x[n]).all() and torch.isfinite(dy[n]).all()) for n in range(len(x))]
    assert [f > 0 for f in factor.tolist()] == finite
    assert any(finite)
    kept = [n for n, is_finite in enumerate(finite) if is_finite]
    total: Any = 0
    for n, gradient in zip(kept, exact_gradients(layer, x[kept], dy[kept]), strict=True):
        weight = Fraction(float(factor[n]))
        assert weight**2 * int((gradient**2).sum()) <= Fraction(clip) ** 2 * 2 ** (4 * SCALE)
        total = total + gradient * weight
    computed = per_sample_gradients.weighted_gradient(layer, x, dy, factor)
    flat = torch.cat([computed[p].flatten() for p in layer.parameters()]).tolist()
    off = [float(Fraction(value) - exact / 2 ** (2 * SCALE)) for value, exact in zip(flat, total, strict=True)]
    assert math.hypot(*off) <= grid.FLOATS * clip / 2
    assert kind != "ordinary" or math.hypot(*off) < 1e-14


@pytest.mark.parametrize("width", [3, 4096, 3_000_001])
def test_norms_of_millions_of_numbers_are_exact_to_what_the_clip_allows(width: int) -> None:
    """A float32 norm of the last one is wrong by 4e-5: its clipped gradient would be longer than the clip."""
    g = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    true = g.double().square().sum(1)
    assert torch.allclose(grid.square_norms([g]), true, rtol=1e-6, atol=0)


def test_modes_agree_on_a_resnet() -> None:
    model = build_model("resnet18", {"norm": "group"}, Schema((3, 16, 16), tuple("abcd")), 0)
    x, y = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(3)
    one, two = (fast(model, x, y, torch.arange(3), 0.5, mode) for mode in MODES)
    whole = norm_of(one)
    assert norm_of([a - b for a, b in zip(one, two, strict=True)]) < 1e-5 * whole


@pytest.mark.parametrize("kind", ["shared weights", "a weight of no layer"])
def test_a_model_that_bookkeeping_cannot_follow_gets_hooks(kind: str) -> None:
    model = made()
    assert mode_of(model) == "bookkeeping"
    if kind == "shared weights":
        model.add_module("twin", nn.Linear(64, 4))
        model.twin.weight = model.head.weight  # type: ignore[union-attr]
    else:
        model.register_parameter("loose", nn.Parameter(torch.ones(2)))
    assert mode_of(model) == "hooks"


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3).requires_grad_(False)


@pytest.mark.parametrize(
    "bad",
    [
        nn.LSTM(2, 2),
        nn.BatchNorm2d(3),
        Frozen(),
        nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)),
        nn.ReLU(True),
    ],
)
def test_t_19_modules_that_mix_examples_or_work_in_place_are_refused(bad: nn.Module) -> None:
    with pytest.raises(ConfigError, match="E-PRIV-14"):
        validate(nn.Sequential(nn.Linear(2, 2), bad))
