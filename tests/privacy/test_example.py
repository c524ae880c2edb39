"""The private doors: equal to the plain ones without noise, bounded with it, and noisy as planned."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers_core import SCHEMA, Given
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import trees
from fl_core.errors import ConfigError, RefusedError
from fl_core.local import PlainData
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.types import ClassSums, Coupling, Federation, Losses, Split, TrainConfig, Turn
from privacy.course import Course, Rates, Spend
from privacy.entropy import SecureNoise, SeededNoise
from privacy.example import PrivateData
from privacy.gradients import clipped
from privacy.rehearsal import check_independence, rehearse
from privacy.release import Units, class_sums, exact_class_sums
from privacy.terms import Terms, nominal

TURN = Turn(Federation(3, 4, rounds=5, round=0, cohort=3), 0, 7)
PLAIN = TrainConfig(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=1000, epochs=3)


class Silent(SeededNoise):
    """Samples as usual, adds nothing."""

    def gaussian(self, shape: tuple[int, ...], std: float) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)


def examples(n: int = 24, groups: bool = False) -> Given:
    g = torch.Generator().manual_seed(n)
    made = Given(torch.rand(n, 1, 8, 8, generator=g), torch.arange(n) % 4)
    if groups:
        made.groups = tuple(f"patient {i // 3}" for i in range(n))
    return made


def model_of(seed: int = 0) -> nn.Module:
    return build_model("digits_cnn", {}, SCHEMA, seed)


def course_of(
    terms: Terms, train: TrainConfig = PLAIN, units: int = 24, method: str = "fedavg", **options: object
) -> Course:
    return Course.of(terms, train, 5, units, build_method(method, options), model_of(), SCHEMA)


def doors(course: Course, data: Given, noise: object = None, round: int = 0, **more: object) -> PrivateData:
    turn = replace(TURN, fed=replace(TURN.fed, round=round))
    spend = Spend([r for _ in range(3) for r in course.releases(round, True)])
    source = Silent(1, "sampling") if noise is None else noise
    return PrivateData(data, data, course.rates.train, turn, course, spend, source, **more)  # type: ignore[arg-type]


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(cross_entropy(model(x), y, reduction="none"))


OPEN = Terms(clip=1e6, physical_batch=5)


def test_with_infinite_clip_and_no_noise_the_private_door_equals_the_plain_one() -> None:
    """Full batches (q = 1), so that both doors see the same examples; in chunks of 5 on the private side."""
    data, course = examples(), course_of(OPEN)
    private, plain = model_of(), model_of()
    assert doors(course, data).sgd(private, ce) == PlainData(data, data, PLAIN, TURN).sgd(plain, ce) == 3
    for name, value in trees.read(plain).items():
        assert torch.allclose(trees.read(private)[name], value, rtol=1e-4, atol=1e-6)


def test_t_22_penalty_and_shift_are_added_after_the_noise() -> None:
    data, course = examples(), course_of(Terms(clip=1e-3), replace(PLAIN, epochs=1, momentum=0.0, weight_decay=0.0))
    start = trees.read(model_of())
    shift = {name: torch.full_like(v, 0.5) for name, v in start.items()}

    def penalty(model: nn.Module) -> Tensor:
        return sum((p.sum() for p in model.parameters()), torch.zeros(()))

    a, b = model_of(), model_of()
    doors(course, data).sgd(a, ce)
    doors(course, data).sgd(b, ce, penalty=penalty, shift=shift)
    for name, value in trees.read(b).items():
        moved = (value.double() - trees.read(a)[name].double()) / -0.1
        assert torch.allclose(moved, torch.full_like(moved, 1.5), atol=1e-5)  # 1 of the penalty, 0.5 of the shift


@pytest.mark.parametrize("coupled", ["split", "micro"])
def test_t_15_an_empty_draw_is_noise_and_a_step(coupled: str) -> None:
    """AU-1: the noise has the planned scale, and not 2/3 or 3/2 of it (T-16)."""
    train = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=1, epochs=1, max_steps=1)
    course = course_of(Terms(coupled=coupled), train, units=100_000, method="fedmr", mu1=1e-4, mu2=0.0)
    course.__dict__["noise"] = 1.3
    data, model = examples(), build_model("simple_cnn", {}, replace(SCHEMA, shape=(3, 32, 32)), 0)
    private = doors(course, data)
    private._noise = SecureNoise()
    before = trees.read(model)
    assert private.sgd(model, ce) == 1
    moved = torch.cat([(trees.read(model)[n] - v).flatten() for n, v in before.items()])
    divisor = course.groups if coupled == "micro" else course.batch
    std = float(moved.double().std()) * divisor
    assert std == pytest.approx(1.3 * course.terms.sensitivity(True), rel=0.02)
    assert len(private._spend.made) == 1


def test_t_20_steps_and_divisor_do_not_follow_the_true_number_of_records() -> None:
    course = course_of(Terms(), replace(PLAIN, batch_size=8), units=24)
    for n in (23, 24, 25):
        private = doors(course, examples(n))
        assert private.planned_steps() == 9
        assert private.size() == 24
        assert course.batch == 8


def test_units_declared_to_two_digits() -> None:
    assert [nominal(n) for n in (7, 99, 101, 1437, 12345)] == [7, 99, 100, 1400, 12000]


def moved_by(course: Course, loss, keep: list[int] | None) -> Tensor:  # type: ignore[no-untyped-def]
    """Return the sum of clipped gradients (times the divisor) over all but one record: q = 1, the same labels."""
    data = examples(12)
    whole = Given(data.x if keep is None else data.x[keep], data.labels if keep is None else data.labels[keep])
    private, model = doors(course, whole, Fixed(keep, 12)), model_of()
    before = trees.trainable(model)
    private.sgd(model, loss)
    divisor = course.groups if course.terms.coupled == "micro" and course.coupled else course.batch
    return torch.cat([(v - trees.trainable(model)[n]).flatten().double() for n, v in before.items()]) * divisor


class Fixed(Silent):
    """Draws every record, and deals each one to the microbatch that its number among all records says."""

    def __init__(self, keep: list[int] | None, n: int) -> None:
        super().__init__(0, "fixed")
        self._numbers = torch.tensor(range(n) if keep is None else keep)
        self._calls = 0

    def uniform(self, n: int) -> Tensor:
        self._calls += 1
        return torch.zeros(n).double() if self._calls == 1 else (self._numbers % 3).double() / 3 + 0.01


def intra(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    """A coupled term of a size that its clip always cuts."""
    z = model.features(x)  # type: ignore[operator]
    return Losses(cross_entropy(model.head(z), y, reduction="none"), 100 * (z.T @ z).square().sum())  # type: ignore[operator]


@pytest.mark.parametrize(("coupled", "bound"), [("split", 0.02 + 2 * 0.005), ("micro", 0.04)])
def test_t_14_no_record_moves_a_coupled_step_by_more_than_its_sensitivity(coupled: str, bound: float) -> None:
    train = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=12, epochs=1)
    terms = Terms(clip=0.02, coupled=coupled, microbatch=4)
    course = course_of(terms, train, units=12, method="fedmr", mu1=1e-4, mu2=0.0)
    assert course.terms.sensitivity(course.coupled) == pytest.approx(bound)
    assert course.groups == 3
    whole = moved_by(course, intra, None)
    moved = [float((whole - moved_by(course, intra, [k for k in range(12) if k != i])).norm()) for i in range(12)]
    assert max(moved) <= bound * (1 + 1e-4)
    assert max(moved) > 0.1 * bound  # the bound is not vacuous; T-14's constructed case below reaches it


def test_t_14_a_record_can_turn_a_microbatch_around() -> None:
    """1-D: a microbatch of sum 5 is clipped to 1; one record of -100 makes it -1: the sensitivity 2 C is reached."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def micro(values: list[float]) -> float:
        return float(clipped((w * torch.tensor(values, dtype=torch.float64)).sum(), [w], 1.0)[0])

    assert micro([2.0, 3.0]) - micro([2.0, 3.0, -100.0]) == pytest.approx(2.0, abs=1e-5)


def test_t_14_consecutive_blocks_would_have_no_bound() -> None:
    """Values (10, -9, -2, 3) repeated 50 times: one more record in front shifts every block of two."""
    values = [10.0, -9.0, -2.0, 3.0] * 50

    def blocks(v: list[float]) -> float:
        return sum(max(-1.0, min(1.0, sum(v[i : i + 2]))) for i in range(0, len(v), 2))

    assert abs(blocks(values) - blocks([0.0, *values])) >= 99
    dealt = [k % 100 for k in range(200)]  # every record keeps its microbatch: ours

    def ours(v: list[float], groups: list[int]) -> float:
        sums = [0.0] * 100
        for value, group in zip(v, groups, strict=True):
            sums[group] += value
        return sum(max(-1.0, min(1.0, total)) for total in sums)

    assert abs(ours(values, dealt) - ours([-500.0, *values], [7, *dealt])) <= 2


def test_coupled_terms_every_other_step_have_two_entries_of_equal_noise() -> None:
    terms = Terms(coupled_every=4, clip=1.0, coupled_clip_ratio=0.25)
    course = course_of(terms, replace(PLAIN, batch_size=6, epochs=4), method="fedmr", mu1=1e-4, mu2=0.0)
    course.__dict__["noise"] = 1.0
    (a, b) = (r.mechanism for r in course.training(16))
    assert (a.noise, a.steps) == (1.0, 4)
    assert (b.noise, b.steps) == (1.5, 12)  # the same standard deviation over the smaller sensitivity


def test_t_13_a_loss_that_mixes_examples_is_found_by_the_probe() -> None:
    model = model_of()
    check_independence(model, ce, SCHEMA)

    def mixing(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        logits = model(x)
        return Losses(cross_entropy(logits - 0.01 * logits.mean(0), y, reduction="none"))

    with pytest.raises(RefusedError, match="E-PRIV-13"):
        check_independence(model, mixing, SCHEMA)


def test_t_13_fedmrs_inter_loss_must_be_weighted_by_example() -> None:
    with pytest.raises(RefusedError, match="E-PRIV-13"):
        course_of(Terms(), method="fedmr", mu1=0.0, mu2=0.1, inter_weighting="batch")
    course_of(Terms(), method="fedmr", mu1=0.0, mu2=0.1, inter_weighting="example")


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedproc", "moon", "fedrs", "fedlc", "fedgela", "fednh"])
def test_t_13_every_per_example_method_passes_the_probe(name: str) -> None:
    method = build_method(name, {})
    assert method.coupling is Coupling.EXAMPLE
    needs = rehearse(method, model_of(), SCHEMA, PLAIN, Rates(PLAIN, 24).steps)
    assert needs.steps
    assert needs.example_sums == 0


def test_a_release_that_was_not_planned_is_refused_before_any_example_is_read() -> None:
    course = course_of(Terms())
    spend = Spend([])

    class Closed(Given):
        def batch(self, index, augment=None):  # type: ignore[no-untyped-def]
            raise AssertionError("an example was read")

    data = Closed(examples().x, examples().labels)
    private = PrivateData(data, data, PLAIN, TURN, course, spend, Silent(0, "x"))
    with pytest.raises(RefusedError, match="E-PRIV-15"):
        private.sgd(model_of(), ce)
    with pytest.raises(RefusedError, match="E-PRIV-15"):
        private.class_counts()
    with pytest.raises(RefusedError, match="E-PRIV-15"):
        private.sum(ClassSums(lambda x, y: x.flatten(1), 4))


def test_batch_norm_is_refused_before_the_first_step() -> None:
    model = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    with pytest.raises(ConfigError, match="E-PRIV-14"):
        doors(course_of(Terms()), examples()).sgd(model, ce)


FLAT = ClassSums(lambda x, y: x.flatten(1) - 0.5, 4)


@pytest.mark.parametrize("groups", [False, True])
def test_t_24_adding_or_removing_any_unit_moves_the_joint_query_by_at_most_delta(groups: bool) -> None:
    data, bound, weight = examples(24, groups), 0.7, 0.35
    units = Units.of(data)

    def joint(data: Given) -> Tensor:
        total, count = exact_class_sums(FLAT, data, Units.of(data), bound)
        return torch.cat((total.flatten(), weight * count))

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
    wide = ClassSums(lambda x, y: x.flatten(1).repeat(1, 40), 4)
    noise, rows, counts = SeededNoise(5, "t"), [], []
    for _ in range(400):
        found = class_sums(wide, few, Units.of(few), 1.0, 0.5, 8.0, noise, few=0.0)
        rows.append(found["sum"][3])
        counts.append(float(found["count"][3]))
    seen = torch.stack([r for r in rows if bool(r.any())])
    assert float(seen.std()) == pytest.approx(8 * math.hypot(1, 0.5), rel=0.01)
    positive = torch.tensor([c for c in counts if c > 0])
    assert float(positive.square().mean().sqrt()) == pytest.approx(8 * math.hypot(1, 0.5) / 0.5, rel=0.1)  # 17.9


def test_t_27_an_absent_class_is_suppressed() -> None:
    few = Given(examples(40).x, torch.zeros(40, dtype=torch.long))
    narrow = ClassSums(lambda x, y: x.flatten(1)[:, :1], 4)
    noise, passed = SeededNoise(6, "t"), 0
    trials = 3400
    for _ in range(trials):
        passed += int((class_sums(narrow, few, Units.of(few), 1.0, 0.5, 8.0, noise, few=20)["count"][1:] > 0).sum())
    assert passed / (3 * trials) < 0.005


def test_without_noise_a_joint_release_is_the_plain_sum() -> None:
    data = examples()
    private = class_sums(FLAT, data, Units.of(data), 1e6, 1.0, 0.0, SeededNoise(0, "x"))
    plain = PlainData(data, data, PLAIN, TURN).sum(FLAT)
    assert torch.allclose(private["sum"], plain["sum"], atol=1e-5)
    assert torch.equal(private["count"], plain["count"])


def test_rounds_without_a_release_send_zeros_of_weight_zero() -> None:
    course = course_of(Terms(prototype_every=2), method="fedproc")
    silent = doors(course, examples(), round=1).sum(FLAT)
    assert not silent["sum"].any()
    assert not silent["count"].any()
    assert silent["sum"].shape == (4, 64)
    assert not any(r.purpose == "prototypes" for r in course.releases(1, True))
    assert sum(r.purpose == "prototypes" for r in course.releases(2, True)) == 1


def test_class_counts_are_released_once() -> None:
    course = course_of(Terms(), method="fedrs")
    cache: dict[str, Tensor] = {}
    first = doors(course, examples(), SeededNoise(1, "n"), counts=cache)
    once = first.class_counts()
    later = PrivateData(examples(), examples(), PLAIN, TURN, course, Spend([]), SeededNoise(2, "n"), counts=cache)
    assert torch.equal(later.class_counts(), once)
    assert sum(r.purpose == "class counts" for r in first._spend.made) == 1


def test_evaluation_on_the_test_split_is_charged_to_its_own_collection() -> None:
    course = course_of(Terms())
    private = doors(course, examples(), SeededNoise(1, "n"))
    private.sum(ClassSums(lambda x, y: torch.ones(len(x), 1), 4), bound=1.0, split=Split.TEST)
    (made,) = private._spend.made
    assert (made.purpose, made.collection) == ("evaluation", "test")


@pytest.mark.parametrize(
    "wrong", [{"epsilon": 0.0}, {"delta": 0.1}, {"coupled": "splt"}, {"clip": -1.0}, {"microbatch": 0}, {"rng": "none"}]
)
def test_impossible_terms_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="E-PRIV-11"):
        Terms.of(wrong)
