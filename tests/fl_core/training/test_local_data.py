"""The plain local data: schedule, streams, penalties, shifts and queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import rng
from fl_core.errors import ConfigError, DataError, RefusedError
from fl_core.models import build_model
from fl_core.training.local_data import PlainLocalData, draw_batches, eval_batch
from fl_core.types import tensor_maps
from fl_core.types.enums import Split
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import ClassSums, ExampleSums, Losses, RoundContext, SgdOptions
from tests.oracles.equations import slow_class_sums
from tests.support.federations import FED, SCHEMA, Given, same, shares


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(cross_entropy(model(x), y, reduction="none"))


def examples(n: int, seed: int = 0) -> Given:
    draw = rng.stream(seed, "x")
    return Given(torch.rand(n, 1, 8, 8, generator=draw), torch.arange(n) % 4)


def data(n: int = 10, context: RoundContext | None = None, **schedule: float) -> PlainLocalData:
    config = TrainConfig(**({"batch_size": 4, "epochs": 1, "lr": 0.1} | schedule))  # type: ignore[arg-type]
    return PlainLocalData(RoundData(examples(n), examples(6, seed=1), config, context or FED.for_silo(0, 0)))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 64))
        self.b = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.a.T + self.b


@pytest.mark.parametrize(
    ("n", "schedule", "epochs", "steps"),
    [
        (10, {}, None, 3),
        (8, {}, None, 2),
        (3, {}, None, 1),
        (10, {"epochs": 5}, None, 15),
        (10, {"epochs": 5, "max_steps": 7}, None, 7),
        (10, {"max_steps": 7}, None, 3),
        (10, {}, 2, 6),
        (10, {}, 0.4, 1),
        (10, {}, 0, 0),
    ],
)
def test_planned_steps_are_the_steps_taken(
    n: int, schedule: dict[str, float], epochs: float | None, steps: int
) -> None:
    silo = data(n, **schedule)
    assert silo.planned_steps(epochs) == steps
    assert silo.sgd(Linear(), ce, SgdOptions(epochs=epochs)) == steps


def test_drop_last_leaves_out_the_short_batch_of_each_epoch_and_refuses_where_no_whole_one_is() -> None:
    order = torch.Generator().manual_seed(0)
    batches = draw_batches(14, 5, order, 6, drop_last=True)
    assert [len(b) for b in batches] == [5] * 6
    assert all(len(set(torch.cat(batches[i : i + 2]).tolist())) == 10 for i in (0, 2, 4))
    assert len({tuple(sorted(torch.cat(batches[i : i + 2]).tolist())) for i in (0, 2, 4)}) > 1
    silo = data(14, epochs=3, batch_size=5, drop_last=True)
    assert silo.planned_steps() == silo.sgd(Linear(), ce) == 6
    assert TrainConfig(drop_last=True).facts()["drop_last"]
    assert "drop_last" not in TrainConfig().facts()
    with pytest.raises(RefusedError, match=r"E-RUN-52.*whole batch of 15"):
        draw_batches(14, 15, order, 0, drop_last=True)


def test_every_epoch_sees_every_example_once() -> None:
    seen: list[int] = []

    def spy(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        seen.extend(int(v) for v in (x[:, 0, 0, 0] * 1e6).round())
        return ce(model, x, y)

    data(10, epochs=2).sgd(Linear(), spy)
    every = sorted(int(v) for v in (examples(10).x[:, 0, 0, 0] * 1e6).round())
    assert sorted(seen[:10]) == sorted(seen[10:]) == every
    assert seen[:10] != seen[10:]


def test_batch_norm_skips_a_lone_example_and_does_not_count_it() -> None:
    model = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    silo = data(9)  # 4 + 4 + 1
    assert silo.planned_steps() == 3
    assert silo.sgd(model, ce) == 2
    assert data(9).sgd(build_model("digits_cnn", {}, SCHEMA, 0), ce) == 3
    assert tensor_maps.all_finite(tensor_maps.copy_state(model))


@pytest.mark.parametrize(("n", "schedule"), [(1, {}), (9, {"batch_size": 1}), (9, {"batch_size": 1, "epochs": 3})])
def test_training_whose_every_batch_is_left_out_is_refused_with_the_remedy(n: int, schedule: dict[str, int]) -> None:
    model = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    with pytest.raises(RefusedError, match=r"E-RUN-52.*batch norm.*train\.batch_size to 2"):
        data(n, **schedule).sgd(model, ce)
    assert data(n, **schedule).sgd(build_model("digits_cnn", {}, SCHEMA, 0), ce) >= 1


def test_learning_rate_falls_by_round() -> None:
    late = data(context=RoundContext(1, 4, 9, round=3).for_silo(0, 0), lr=0.8, lr_decay=0.5)
    assert late.lr == pytest.approx(0.1)


def test_steps_are_taken_outright_and_begin_as_the_epochs_would() -> None:
    longer, shorter, limited = Linear(), Linear(), Linear()
    assert data(10, epochs=5).sgd(longer, ce, SgdOptions(steps=4)) == 4
    assert data(10).sgd(shorter, ce, SgdOptions(epochs=4 / 3)) == 4
    assert data(10, max_steps=3).sgd(limited, ce, SgdOptions(steps=4)) == 4
    assert data(10).sgd(Linear(), ce, SgdOptions(steps=0)) == 0
    assert same(tensor_maps.copy_state(longer), tensor_maps.copy_state(shorter))
    assert same(tensor_maps.copy_state(longer), tensor_maps.copy_state(limited))


def test_scaled_rate_is_that_rate() -> None:
    scaled, lower = Linear(), Linear()
    data(lr=0.5, momentum=0.9, weight_decay=0.1).sgd(scaled, ce, SgdOptions(lr_scale=0.25))
    data(lr=0.125, momentum=0.9, weight_decay=0.1).sgd(lower, ce)
    assert same(tensor_maps.copy_state(scaled), tensor_maps.copy_state(lower))


def test_plain_parameters_take_bare_steps_beside_the_schedule() -> None:
    """Their gradient is neither clipped, decayed nor remembered; the others' is as if they were alone."""
    schedule = {"momentum": 0.9, "weight_decay": 0.5, "clip_norm": 0.01, "lr": 0.1}

    def slopes(model: nn.Module, x: Tensor, y: Tensor) -> Losses:  # slope 1 in every entry of a, 2 in every entry of b
        assert isinstance(model, Linear)
        return Losses((model.a.sum() + 2 * model.b.sum()).expand(len(y)))

    mixed, alone = Linear(), Linear()
    data(8, **schedule).sgd(mixed, slopes, SgdOptions(no_momentum=lambda name: name == "b"))
    data(8, **schedule).sgd(alone, slopes, SgdOptions(only=lambda name: name == "a"))
    torch.testing.assert_close(mixed.b.detach(), torch.full((4,), 1 - 2 * 0.1 * 2))
    assert torch.equal(mixed.a, alone.a)
    assert float(mixed.a.detach().abs().max()) < 0.01

    bare, adam = Linear(), Linear()
    data(8, **schedule).sgd(
        bare, slopes, SgdOptions(only=lambda name: name == "b", no_momentum=lambda name: name == "b")
    )
    assert torch.equal(bare.b, mixed.b)
    assert not bare.a.any()
    silo = PlainLocalData(
        RoundData(
            examples(8), examples(6), TrainConfig(lr=0.1, batch_size=4, epochs=1, optimizer="adam"), FED.for_silo(0, 0)
        )
    )
    silo.sgd(adam, slopes, SgdOptions(no_momentum=lambda name: name == "b"))
    assert torch.equal(adam.b, mixed.b)


def test_an_extra_pass_does_not_change_the_others() -> None:
    def trained(extra: bool) -> dict[str, Tensor]:
        silo, model = data(), Linear()
        silo.sgd(model, ce)
        if extra:
            silo.sum(ClassSums(lambda x, y: x.flatten(1), 4))
            silo.class_counts()
        silo.sgd(model, ce)
        return tensor_maps.copy_state(model)

    assert same(trained(False), trained(True))
    first, other = Linear(), Linear()
    data().sgd(first, ce)
    silo = data()
    silo.sgd(other, ce)
    silo.sgd(Linear(), ce)  # a pass over another model draws from a stream of its own
    assert same(tensor_maps.copy_state(first), tensor_maps.copy_state(other))


def test_silos_rounds_and_seeds_have_streams_of_their_own() -> None:
    finals = []
    for context in (
        FED.for_silo(0, 0),
        FED.for_silo(1, 0),
        FED.for_silo(0, 1),
        RoundContext(3, 4, 3, 2, 3).for_silo(0, 0),
    ):
        model = Linear()
        data(context=context).sgd(model, ce)
        finals.append(tensor_maps.digest(tensor_maps.copy_state(model)))
    assert len(set(finals)) == 4


def test_two_steps_with_penalty_shift_momentum_decay_and_clipping_equal_a_hand_derived_step() -> None:
    lr, momentum, decay, clip = 0.1, 0.9, 0.01, 0.05
    silo = data(4, epochs=2, lr=lr, momentum=momentum, weight_decay=decay, clip_norm=clip)
    model, shift = Linear(), {"a": torch.full((4, 64), 0.3), "unknown": torch.ones(1)}
    silo.sgd(model, ce, SgdOptions(penalty=lambda m: 0.5 * (m.get_parameter("b") ** 2).sum(), shift=shift))
    every = examples(4)  # one batch of four: the order does not matter
    x, y = every.x.flatten(1), torch.nn.functional.one_hot(every.labels, 4).float()
    a, b = torch.zeros(4, 64), torch.ones(4)
    va, vb = torch.zeros(4, 64), torch.zeros(4)
    for _ in range(2):
        error = (torch.softmax(x @ a.T + b, 1) - y) / 4
        ga, gb = error.T @ x, error.sum(0) + b
        norm = (ga.square().sum() + gb.square().sum()).sqrt()
        factor = min(1.0, clip / float(norm))
        ga, gb = ga * factor + 0.3, gb * factor  # the shift is data-free and comes after clipping
        va, vb = momentum * va + ga + decay * a, momentum * vb + gb + decay * b
        a, b = a - lr * va, b - lr * vb
    assert torch.allclose(model.a, a, atol=1e-5)
    assert torch.allclose(model.b, b, atol=1e-5)


def test_only_selects_what_moves() -> None:
    model = Linear()
    data().sgd(model, ce, SgdOptions(only=lambda name: name == "a", shift={"b": torch.ones(4)}))
    assert torch.equal(model.b, torch.ones(4))
    assert bool(model.a.abs().sum() > 0)


def test_class_sums_equal_a_loop() -> None:
    every = examples(11)
    silo = PlainLocalData(RoundData(every, every, TrainConfig(), FED.for_silo(0, 0)))
    sums = silo.sum(ClassSums(lambda x, y: x.flatten(1), 5))
    total, count = slow_class_sums(every.x.flatten(1), every.labels, 5)
    assert torch.allclose(sums["sum"], total, atol=1e-5)
    assert torch.equal(sums["count"], count)
    assert torch.equal(silo.class_counts(), count[:4])
    assert silo.size() == 11


def test_example_sums_over_both_splits() -> None:
    query = ExampleSums(lambda x, y: {"pixels": x.flatten(1), "ones": torch.ones(len(y))})
    silo = data(10)
    assert torch.allclose(silo.sum(query)["pixels"], examples(10).x.flatten(1).sum(0), atol=1e-5)
    assert float(silo.sum(query, split=Split.TEST)["ones"]) == 6


def test_queries_and_evaluation_are_never_augmented_but_training_is() -> None:
    plain, varied = Linear(), Linear()
    data().sgd(plain, ce)
    silo = data(augment=True)
    silo.sgd(varied, ce)
    assert not same(tensor_maps.copy_state(plain), tensor_maps.copy_state(varied))
    query = ClassSums(lambda x, y: x.flatten(1), 4)
    assert torch.equal(silo.sum(query)["sum"], data().sum(query)["sum"])


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    data().sgd(build_model("digits_cnn", {}, SCHEMA, 0), ce)
    assert torch.equal(before, torch.get_rng_state())


def test_a_silo_without_training_examples_is_refused_and_one_without_test_examples_is_not() -> None:
    empty = PlainLocalData(RoundData(examples(0), examples(0), TrainConfig(batch_size=4, epochs=1), FED.for_silo(0, 0)))
    with pytest.raises(DataError) as caught:
        empty.sgd(Linear(), ce)
    assert caught.value.code == "E-DATA-08"
    share = shares()[0]
    untested = PlainLocalData(RoundData(share.train, examples(0), TrainConfig(), FED.for_silo(0, 0)))
    assert untested.sum(ClassSums(lambda x, y: x.flatten(1)[:, :1], 4), split=Split.TEST)["count"].tolist() == [0] * 4


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_gradients_of_micro_batches_add_up_to_those_of_the_batch(amp: str) -> None:
    found = []
    for micro_batch in (0, 3, 10):  # 10: as large as the batch, whose parts are then none
        model, local = Linear(), data(24, batch_size=10, epochs=2, momentum=0.9, micro_batch=micro_batch, amp=amp)
        half = SgdOptions(penalty=lambda m: 0.5 * (m.b**2).sum())
        assert local.sgd(model, ce, half) == 6
        found.append(tensor_maps.copy_state(model))
    tolerance = 1e-6 if amp == "off" else 1e-3
    assert all(torch.allclose(v, found[1][name], atol=tolerance) for name, v in found[0].items())
    assert same(found[0], found[2])
    assert not same(found[0], tensor_maps.copy_state(Linear()))


def test_a_loss_that_mixes_examples_cannot_be_divided_into_micro_batches() -> None:
    def mixed(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        return Losses(ce(model, x, y).per_example, model(x).std())

    with pytest.raises(ConfigError, match=r"E-CFG-08.*micro_batch=0"):
        data(micro_batch=2).sgd(Linear(), mixed)


def test_larger_images_are_summed_in_smaller_groups_and_small_ones_as_ever() -> None:
    assert [eval_batch(shape) for shape in ((1, 8, 8), (80,), (3, 64, 64))] == [512, 512, 512]
    assert [eval_batch(shape) for shape in ((3, 224, 224), (3, 1024, 1024), (3, 5000, 5000))] == [41, 2, 1]
    seen = []

    class Large(Given):
        def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
            seen.append(len(index))
            return torch.zeros(len(index), 3, 224, 224), self.labels[index]

    large = Large(torch.zeros(90, 1), torch.arange(90) % 4)
    local = PlainLocalData(RoundData(large, large, TrainConfig(), FED.for_silo(0, 0)))
    ones = local.sum(ExampleSums(lambda x, y: {"n": torch.ones(len(x))}))
    assert ones["n"] == 90
    assert max(seen) == 41
