"""Whatever numbers a model and a record make, a unit adds a finite vector within its bound and changes nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from fl_core.datasets.augmentation import LESIONS
from fl_core.datasets.examples import TensorExamples
from fl_core.models import build_model
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling, Split
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import ClassSums
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleasePlan, SamplingSchedule
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.sources import SecureNoise, SeededNoise
from privacy.mechanisms.record import per_sample_gradients
from privacy.mechanisms.record.class_sums import KeyedUnits, PrivacyUnits, class_sums, pad_batch, unit_shares
from privacy.mechanisms.record.draws import Draws, is_stochastic, record_keys
from privacy.mechanisms.record.per_sample_gradients import MODES, PADDING, clipped, per_unit
from tests.support.federations import Given
from tests.support.privacy import NoNoise, ce, examples, model_of, plan_of, private_data

pytestmark = pytest.mark.integration

EXTREMES = (0.0, 1e-45, 1e-40, 1e-30, 1e-10, 1.0, 1e10, 1e19, 1e30, 3e38, math.inf, -math.inf, math.nan)
STEP = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=1000, epochs=1, max_steps=1)


# ---- the function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_contribution_is_finite_and_within_its_bound_whatever_its_numbers(bound: float, dtype: torch.dtype) -> None:
    rows = torch.tensor([[a, b, a * 0.5] for a in EXTREMES for b in EXTREMES], dtype=dtype)
    found = grid.contributions(rows, bound)
    assert bool(torch.isfinite(found).all())
    assert float(found.norm(dim=1).max()) <= bound
    finite = torch.isfinite(rows).all(1)
    assert not found[~finite].any()
    short = finite & (rows.double().norm(dim=1) <= bound * 0.999)
    assert torch.allclose(found[short], rows[short].double(), rtol=1e-11, atol=0)
    long = finite & (rows.double().abs().amax(1) > bound * 2)
    assert bool((found[long].norm(dim=1) > bound * (1 - 1e-9)).all())


def test_norms_and_factors_know_neither_overflow_nor_underflow() -> None:
    """Of float32 rows: exact to 1e-4 from 1e-15 to 3e38, so that no row is clipped by less than its norm."""
    for size in (1e-15, 1e-3, 1.0, 1e17, 1e19, 1e25, 1e37):
        rows = torch.full((2, 3000), size)
        found = grid.square_norms([rows[:, :1000], rows[:, 1000:]])
        assert torch.allclose(found.sqrt(), torch.full((2,), size * math.sqrt(3000), dtype=torch.float64), rtol=1e-4)
        for bound in (1e-4, 1.0):
            moved = grid.weighted_sum(grid.factors(found, bound)[:1], rows[:1], 1)
            assert float(moved.norm()) <= bound
            assert float(moved.norm()) > min(bound, size * math.sqrt(3000)) * (1 - 1e-3)
    odd = torch.ones(3, 5)
    odd[1, 2], odd[2, 0] = math.nan, math.inf
    assert grid.factors(grid.square_norms([odd]), 1.0)[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("n", [3, 64, 300, 1000])
def test_a_sum_in_float32_is_within_the_stated_slack_of_the_exact_one(n: int) -> None:
    """Against rationals, and by far: contributions of one sign, which rounding pulls one way."""
    draw = torch.Generator().manual_seed(n)
    rows = torch.rand(n, 7, generator=draw) + 0.1
    factor = grid.factors(grid.square_norms([rows]), 1.0)
    exact = [
        sum(Fraction(float(f)) * Fraction(float(r)) for f, r in zip(factor, rows[:, j], strict=True)) for j in range(7)
    ]
    found = grid.weighted_sum(factor, rows, grid.block_of(n))
    off = math.sqrt(sum(float(Fraction(float(v)) - e) ** 2 for v, e in zip(found, exact, strict=True)))
    assert off <= grid.FLOATS / 2
    assert grid.block_of(n) * n * 2.0**-24 <= grid.FLOATS / 2


def test_a_row_of_factor_zero_may_hold_anything_in_both_kinds_of_sum() -> None:
    rows = torch.ones(4, 6)
    rows[1], rows[3] = math.nan, math.inf
    factor = torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64)
    for block in (1, 2, 8):
        assert torch.allclose(grid.weighted_sum(factor, rows, block), torch.full((6,), 1.5).double())
    layer = nn.Linear(6, 2)
    dy = torch.ones(4, 2)
    dy[1] = math.nan
    found = per_sample_gradients.weighted_gradient(layer, rows, dy, factor)
    assert all(torch.allclose(v, torch.full_like(v, 1.5)) for v in found.values())


# ---- steps -----------------------------------------------------------------------------------------------------------


def step_sum(data: Given, model: nn.Module, loss: Callable = ce, noise: object = None, **terms: object) -> Tensor:
    """Take one silent step of rate 1 and return the sum that is released, in float64."""
    plan = ReleasePlan(RecordDpConfig(**terms), SamplingSchedule(STEP, 32), 1, _coupling(terms), (1,), 1, True)  # type: ignore[arg-type]
    plan.__dict__["noise"] = 1.0
    before = tensor_maps.trainable(model)
    private_data(plan, data, NoNoise(3, "s") if noise is None else noise).sgd(model, loss)
    divisor = plan.groups if terms.get("coupled") == "micro" else plan.batch
    after = tensor_maps.trainable(model)
    return torch.cat([(before[n].double() - after[n].double()).flatten() for n in before]) * divisor


def _coupling(terms: dict[str, object]) -> Coupling:
    return Coupling.BATCH if terms.get("coupled") in ("split", "micro") else Coupling.EXAMPLE


def odd_records() -> list[Tensor]:
    whole = [torch.full((1, 1, 8, 8), v) for v in (math.nan, math.inf, -math.inf, 3e38, 1e30, 1e-40)]
    single = torch.rand(1, 1, 8, 8)
    single[0, 0, 3, 3] = math.nan
    return [*whole, single]


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round so little that sums are compared as if they were not rounded."""
    monkeypatch.setattr(grid, "ROUNDING", 1e-9)


@pytest.mark.parametrize("place", ["front", "middle", "end"])
def test_a_record_that_is_not_finite_adds_zero_and_changes_nobody_elses_share(place: str, fine: None) -> None:
    """Bit for bit: the sum with the record is the sum without it."""
    base = examples(20)
    wide = model_of().double().float()
    without = step_sum(base, wide)
    at = {"front": 0, "middle": 10, "end": 20}[place]
    for record in odd_records()[:3] + odd_records()[6:]:
        x = torch.cat((base.x[:at], record, base.x[at:]))
        y = torch.cat((base.labels[:at], torch.tensor([1]), base.labels[at:]))
        with_record = step_sum(Given(x, y), model_of())
        assert torch.equal(with_record, without)


def overflowing(kind: str) -> nn.Module:
    """A model that overflows for the record whose first pixel is lit."""
    first, last = nn.Linear(64, 8), nn.Linear(8, 4)
    with torch.no_grad():
        first.weight[:, 0] = 1e30 if kind == "layer norm" else 3e38
        last.weight[:] = 10.0
    middle = {"projection": nn.ReLU(), "layer norm": nn.LayerNorm(8), "softplus": nn.Softplus()}[kind]
    return nn.Sequential(nn.Flatten(), first, middle, last)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["projection", "layer norm", "softplus"])
def test_a_model_that_overflows_for_one_record_alone_tells_nothing_of_it(kind: str, mode: str, fine: None) -> None:
    torch.manual_seed(0)
    model = overflowing(kind)
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6) % 4
    x[:, 0, 0, 0] = 0
    lit = torch.cat((torch.ones(1, 1, 8, 8), x))
    with per_unit(model, mode) as engine:
        few = engine.clipped_sum(lambda: ce(model, pad_batch(x, 8), pad_batch(y, 8)).per_example, numbers(6), 1.0)
        many = engine.clipped_sum(
            lambda: ce(model, pad_batch(lit, 8), pad_batch(torch.cat((y[:1], y)), 8)).per_example, numbers(7), 1.0
        )
    moved = torch.cat([(a - b).flatten() for a, b in zip(few, many, strict=True)])
    assert bool(torch.isfinite(moved).all())
    assert float(moved.norm()) <= 1.0


def numbers(n: int, rows: int = 8) -> Tensor:
    """Number n units in a batch of so many rows."""
    return torch.cat((torch.arange(n), torch.full((-n % rows,), PADDING)))


def test_a_microbatch_that_is_not_finite_adds_zero() -> None:
    w = nn.Parameter(torch.zeros(3))
    for bad in (math.nan, math.inf, 3e38):
        (found,) = clipped((w * torch.tensor([1.0, bad, 2.0])).sum() * 10, [w], 1.0)
        assert bool(torch.isfinite(found).all())
        assert float(found.norm()) <= 1.0
    assert not clipped((w * math.nan).sum(), [w], 1.0)[0].any()


def test_places_that_cancel_cannot_hide_a_gradient_from_its_clip() -> None:
    """A hostile layer input: huge terms of both signs whose Gram matrix sums to nothing, or to less, in floats."""
    for size in (1.0, 1e4, 1e8, 1e15):
        torch.manual_seed(1)
        layer, n, places = nn.Linear(16, 32, bias=False), 4, 4
        x = torch.randn(n, 1, 16).expand(-1, places, -1) * size
        dy = torch.randn(n, places, 32)
        dy[:, -1] = -dy[:, :-1].sum(1)
        exact = torch.einsum("nto,nti->noi", dy.double(), x.double()).flatten(1).norm(dim=1)
        assert bool((per_sample_gradients.ghost_norms(layer, x, dy) >= exact.square()).all())
        for u in range(n):
            factor = torch.zeros(n, dtype=torch.float64)
            factor[u] = grid.factors(per_sample_gradients.ghost_norms(layer, x, dy), 1.0)[u]
            moved = per_sample_gradients.weighted_gradient(layer, x, dy, factor)[layer.weight]
            assert float(moved.norm()) <= 1.0


# ---- other sums ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("value", EXTREMES)
def test_a_vector_or_metric_of_any_size_moves_a_class_sum_by_at_most_delta(value: float, groups: bool) -> None:
    data = examples(12, groups)
    vectors = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    units = PrivacyUnits.of(data)

    def joint(bad: bool) -> Tensor:
        table = vectors.clone()
        table[4, 1] = value if bad else table[4, 1]
        marked = Given(torch.arange(12.0).view(12, 1, 1, 1).expand(-1, 1, 8, 8).contiguous(), data.labels)
        query = ClassSums(lambda x, y: table[x.flatten(1)[:, 0].long()], 4)
        shares = unit_shares(query, marked, units, 0.7)
        return torch.cat((shares.summed(shares.vectors, 4).flatten(), 0.35 * shares.summed(shares.counts, 4)))

    moved = joint(True) - joint(False)
    assert bool(torch.isfinite(moved).all())
    assert float(moved.norm()) <= 2 * math.hypot(0.7, 0.35)  # one record for another
    sent = class_sums(
        ClassSums(lambda x, y: x.flatten(1)[:, :3] * value, 4), data, units, 0.7, 0.35, 1.0, SecureNoise()
    )
    assert all(bool(torch.isfinite(v).all()) for v in sent.values())


def test_an_evaluation_of_a_model_of_nan_is_released_like_any_other() -> None:
    plan, data = plan_of(RecordDpConfig()), examples()
    found = private_data(plan, data, SeededNoise(1, "n")).sum(
        ClassSums(lambda x, y: torch.full((len(x), 1), math.nan), 4), bound=1.0, split=Split.TEST
    )
    assert all(bool(torch.isfinite(v).all()) for v in found.values())


# ---- what leaves is a function of integers ---------------------------------------------------------------------------


def test_every_number_of_a_step_is_a_whole_multiple_of_the_grid() -> None:
    data, model = examples(), model_of()
    plan = plan_of(RecordDpConfig(), STEP)
    plan.__dict__["noise"] = 1.0
    seen: list[Tensor] = []

    def watch(done: int, total: int) -> None:
        seen.extend(p.grad.double() for p in model.parameters() if p.grad is not None)

    private_data(plan, data, SecureNoise(), progress=watch).sgd(model.double(), lambda m, x, y: ce(m, x.double(), y))
    g = grid.step(1.0, sum(p.numel() for p in model.parameters()))
    units = torch.cat([v.flatten() for v in seen]) * plan.batch / g
    assert len(units) == sum(p.numel() for p in model.parameters())
    assert float((units - units.round()).abs().max()) < 1e-4  # but for the division by the constant B
    assert len(torch.unique(units.round())) > 1000


def test_class_sums_and_counts_are_whole_multiples_of_the_grid() -> None:
    data = examples()
    found = class_sums(
        ClassSums(lambda x, y: x.flatten(1), 4), data, PrivacyUnits.of(data), 1.0, 0.5, 8.0, SecureNoise()
    )
    g = grid.step(math.hypot(1.0, 0.5), 4 * 65)
    for value, scale in ((found["sum"], 1.0), (found["count"], 0.5)):
        units = value.double() * scale / g
        assert torch.equal(units, units.round())


@pytest.mark.parametrize(("bound", "numbers"), [(1.0, 1), (1.0, 38_378), (1e-4, 7), (1e4, 11_200_000)])
def test_rounding_moves_neighbours_apart_by_at_most_its_share_of_the_bound(bound: float, numbers: int) -> None:
    g = grid.step(bound, numbers)
    assert g * math.sqrt(numbers) <= grid.ROUNDING * bound
    assert math.log2(g) == int(math.log2(g))
    a = torch.randn(min(numbers, 100_000), dtype=torch.float64)
    b = a + torch.randn_like(a) * g
    apart = (grid.rounded(a, g) - grid.rounded(b, g)).double().norm() * g
    assert float(apart) <= float((a - b).norm()) + g * math.sqrt(len(a))
    assert bool((grid.truncated(a, g).abs().double() * g <= a.abs()).all())


# ---- one shape, and draws that follow from a record ------------------------------------------------------------------

MODELS = (("digits_cnn", (1, 8, 8), {}), ("simple_cnn", (3, 32, 32), {}), ("resnet18", (3, 32, 32), {"norm": "group"}))


@pytest.mark.parametrize(("name", "shape", "options"), MODELS, ids=[m[0] for m in MODELS])
@pytest.mark.parametrize("rows", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_in_one_shape_a_records_gradient_is_the_same_bit_for_bit_whoever_else_is_there(
    name: str, shape: tuple[int, ...], options: dict[str, str], rows: int
) -> None:
    model = build_model(name, options, Schema(shape, tuple("abcdefgh")), 0)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.rand(rows - 3, *shape, generator=draw), torch.randint(8, (rows - 3,), generator=draw)

    def alone(x: Tensor, y: Tensor, k: int) -> list[Tensor]:
        """The clipped gradient of one record, computed among all: the others are not counted."""
        units = torch.cat((torch.arange(len(x)), torch.full((-len(x) % rows,), PADDING)))
        with per_unit(model) as engine:
            honest, grid_factors = engine, grid.factors
            try:
                grid.factors = lambda square, clip: grid_factors(square, clip) * (torch.arange(len(square)) == k)
                return honest.clipped_sum(
                    lambda: ce(model, pad_batch(x, rows), pad_batch(y, rows)).per_example, units, 1.0
                )
            finally:
                grid.factors = grid_factors

    before = alone(x, y, 2)
    inserted = alone(torch.cat((torch.rand(1, *shape, generator=draw) * 1e3, x)), torch.cat((y[:1], y)), 3)
    order = torch.randperm(len(x), generator=draw)
    moved = alone(x[order], y[order], int((order == 2).nonzero()))
    for a, b, c in zip(before, inserted, moved, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert any(bool(v.any()) for v in before)


def drawn(data: TensorExamples, noise: object, stochastic: bool = False) -> Draws:
    return Draws(noise, data, True, ("sgd", 0), stochastic)  # type: ignore[arg-type]


def test_in_tests_augmentation_follows_from_the_record_and_never_from_its_place() -> None:
    x, y = (torch.rand(6, 1, 8, 8) > 0.5).float(), torch.arange(6) % 4
    few, many = TensorExamples(x[1:], y[1:], how=LESIONS), TensorExamples(x, y, how=LESIONS)
    a, _ = drawn(few, SeededNoise(1)).read(torch.arange(5), 3)
    b, _ = drawn(many, SeededNoise(1)).read(torch.tensor([5, 4, 3, 2, 1, 0]), 3)
    assert torch.equal(a, b[:5].flip(0))
    later, _ = drawn(few, SeededNoise(1)).read(torch.arange(5), 4)
    assert not torch.equal(a, later)
    assert record_keys(few).tolist() == record_keys(many).tolist()[1:]


def test_at_a_hospital_augmentation_is_fresh_and_follows_from_no_seed() -> None:
    x, y = (torch.rand(6, 1, 8, 8) > 0.5).float(), torch.arange(6) % 4
    data = TensorExamples(x, y, how=LESIONS)
    found = [drawn(data, SecureNoise()).read(torch.arange(6), 0)[0] for _ in range(2)]
    assert not torch.equal(*found)


def dropping(rate: float = 0.5) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(rate), nn.Linear(32, 4))


def test_layers_that_draw_are_noticed() -> None:
    x, y = torch.rand(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)
    assert is_stochastic(dropping(), ce, x, y)
    assert not is_stochastic(model_of(), ce, x, y)


@pytest.mark.parametrize("groups", [False, True])
def test_in_tests_dropout_follows_from_the_record_and_never_from_its_place(groups: bool, fine: None) -> None:
    """One record more, in front: the sum moves by what that record adds, and no more."""
    base = examples(21, groups)
    rest = Given(base.x[3:], base.labels[3:])
    rest.groups = None if base.groups is None else base.groups[3:]
    first = Given(base.x[:3], base.labels[:3])
    first.groups = None if base.groups is None else base.groups[:3]
    whole, less, own = (step_sum(d, dropping()) for d in (base, rest, first))
    assert float((whole - less - own).norm()) < 1e-5  # float32 weights; the draws would move it by much more
    assert float(own.norm()) > 0.1


def test_at_a_hospital_dropout_is_fresh_and_follows_from_no_seed(fine: None) -> None:
    class Quiet(SecureNoise):
        def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
            return torch.zeros(shape, dtype=torch.long)

    a, b = (step_sum(examples(20), dropping(), noise=Quiet()) for _ in range(2))
    assert float((a - b).norm()) > 0.1


def test_a_seeded_run_samples_and_deals_units_by_their_contents() -> None:
    """A record in front shifts nobody's draw, and no group's."""
    base = examples(20, True)
    rest = Given(base.x[3:], base.labels[3:])
    rest.groups = base.groups[3:] if base.groups else None
    noise = SeededNoise(4)
    whole, less = (KeyedUnits(PrivacyUnits.of(d), d) for d in (base, rest))
    assert torch.equal(noise.uniform_of(whole, "s")[1:], noise.uniform_of(less, "s"))
    assert torch.equal(noise.uniform_of(whole.at(torch.tensor([2, 4])), "s"), noise.uniform_of(whole, "s")[[2, 4]])
