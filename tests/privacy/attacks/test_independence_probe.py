"""The probe refuses every loss that looks beyond its own example, and lets all methods pass that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from fl_core import rng
from fl_core.errors import ConfigError, RefusedError
from fl_core.methods import METHODS
from fl_core.models import build_model
from fl_core.models.split_model import assemble
from fl_core.rounds.manifest import NamedOptions
from fl_core.types.records import TrainConfig
from fl_core.types.values import ClassSums, Losses, LossFn
from privacy import profiles
from privacy.accounting.dry_run import dry_run
from privacy.mechanisms.record.independence import check_independence, check_rows
from tests.support.federations import SCHEMA

PLAIN = TrainConfig(lr=0.1, batch_size=1000, epochs=3)


def model_of() -> nn.Module:
    return build_model("digits_cnn", {}, SCHEMA, 0)


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(each(model, x, y))


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y, reduction="none")


def of_place() -> LossFn:
    return lambda m, x, y: Losses(each(m, x, y) * (1 + torch.arange(len(y))))


def of_the_end() -> LossFn:
    return lambda m, x, y: Losses(each(m, x, y) * (1 + torch.arange(len(y)).flip(0)))


def of_the_size() -> LossFn:
    return lambda m, x, y: Losses(each(m, x, y) / len(y))


def of_large_batches() -> LossFn:
    return lambda m, x, y: Losses(each(m, x, y) * (2 if len(y) > 20 else 1))


def of_the_mean() -> LossFn:
    return lambda m, x, y: Losses(each(m, x, y) - 1e-6 * m(x).mean())


def normalised() -> LossFn:
    """The sum over a batch stays what it was: a probe of sums alone would not see it."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Losses:
        found = each(m, x, y)
        return Losses(found + 0.5 * (found.mean() - found))

    return loss


def of_the_largest() -> LossFn:
    return lambda m, x, y: Losses(each(m, x, y) * (1 + (x > 1).any()))


def spreading() -> LossFn:
    """Nothing moves while all are finite: 0 times the others' sum."""
    return lambda m, x, y: Losses(each(m, x, y) + 0 * m(x).sum())


def failing() -> LossFn:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Losses:
        assert bool(torch.isfinite(x).all())
        return Losses(each(m, x, y))

    return loss


def branching() -> LossFn:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Losses:
        return Losses(each(m, x, y) * (1.0 if bool(torch.isnan(x).any()) else 2.0))

    return loss


def remembering() -> LossFn:
    """A moving average over batches: gradients of one batch hold what came in another."""
    kept = {"mean": torch.zeros(())}

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Losses:
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * x.nan_to_num(posinf=1.0).clamp(-9, 9).mean().double()
        return Losses(each(m, x, y) * (1 + kept["mean"]))

    return loss


def remembering_in_the_coupled_term() -> LossFn:
    seen = {"n": 0}

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Losses:
        seen["n"] += len(y)
        return Losses(each(m, x, y), m(x).square().mean() * seen["n"])

    return loss


def too_short() -> LossFn:
    return lambda m, x, y: Losses(each(m, x, y).mean().unsqueeze(0))


def drawing() -> LossFn:
    """Draws that move nothing visible are refused, too: they may, at another time."""
    held = {"generators": [rng.stream(0, "held")]}

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Losses:
        return Losses(each(m, x, y) * (1 + 1e-30 * torch.rand(len(y), generator=held["generators"][0])))

    return loss


def drawing_from_torch() -> LossFn:
    return lambda m, x, y: Losses(each(m, x, y) * (1 + 1e-30 * torch.rand(len(y))))


def using_what_it_draws() -> LossFn:
    draw = rng.stream(0, "noise")
    return lambda m, x, y: Losses(each(m, x + 0.1 * torch.rand(x.shape, generator=draw), y))


def bound() -> LossFn:
    class Bound:
        """A method's own loss, whose generator hangs on the object."""

        def __init__(self) -> None:
            self.random = rng.stream(0, "bound")

        def loss(self, m: nn.Module, x: Tensor, y: Tensor) -> Losses:
            return Losses(each(m, x, y) + 0 * torch.rand((), generator=self.random))

    return Bound().loss


MIXING = (
    of_place,
    of_the_end,
    of_the_size,
    of_large_batches,
    of_the_mean,
    normalised,
    of_the_largest,
    spreading,
    failing,
    branching,
    remembering,
    remembering_in_the_coupled_term,
    too_short,
)
DRAWING = (drawing, drawing_from_torch, using_what_it_draws, bound)


@pytest.mark.parametrize("planted", [*MIXING, *DRAWING], ids=lambda f: f.__name__)
def test_a_loss_that_looks_at_others_or_draws_is_refused(planted: Callable[[], LossFn]) -> None:
    with pytest.raises(RefusedError, match="E-PRIV-16"):
        check_independence(model_of(), planted(), SCHEMA)


class Own(nn.Module):
    """Drops features by the functional form, beside a layer that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(self.layer(x.flatten(1)), 0.5, self.training)


@pytest.mark.parametrize("body", [nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5)), Own()])
def test_layers_that_drop_are_no_fault_of_the_loss(body: nn.Module) -> None:
    model = assemble(body, 8, (), 4, head_bias=True).train()
    before = torch.get_rng_state()
    check_independence(model, ce, SCHEMA)
    assert all(m.training for m in model.modules())  # the model is as it was
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(RefusedError, match="E-PRIV-16"):
        check_independence(model, of_place(), SCHEMA)


def test_a_layer_that_mixes_is_refused_when_the_run_is_planned() -> None:
    model = build_model("digits_cnn", {"norm": "batch"}, SCHEMA, 0)
    with pytest.raises(ConfigError, match=r"E-PRIV-14.*model\.norm=group"):
        check_independence(model, ce, SCHEMA)


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
def test_the_size_of_the_runs_batches_is_probed_up_to_a_limit(size: int) -> None:
    seen: list[int] = []

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Losses:
        seen.append(len(y))
        return Losses(each(m, x, y))

    check_independence(model_of(), loss, SCHEMA, size)
    assert {1, 2, 3, min(size, 64)} <= set(seen)
    assert max(seen) <= 64 + 5


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("analytic", "fedcd")])
def test_every_method_passes_in_its_private_form(name: str) -> None:
    choice, _ = profiles.private_form(NamedOptions(name, {}), NamedOptions("dp_record", {}))
    method = METHODS[name](**choice.options)  # type: ignore[arg-type]
    needs = dry_run(method, build_model("digits_mlp", {}, SCHEMA, 0), SCHEMA, PLAIN, lambda _: 1, personal=True)
    assert needs.steps


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedmr", {"inter_weighting": "batch"}),
        ("fedmr", {"inter_weighting": "example", "lite": 4, "mu2": 1.0}),
        ("fedmr", {"inter_weighting": "example", "lite": 4, "mu2": 1.0, "mu1": 0.0}),
        ("fedgen", {"draws": "example"}),
    ],
)
def test_what_the_private_form_replaces_is_what_the_probe_refuses(name: str, options: dict[str, object]) -> None:
    method = METHODS[name](**options)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="E-PRIV-16"):
        dry_run(method, model_of(), SCHEMA, PLAIN, lambda _: 1)


def test_a_vector_in_a_sum_that_looks_at_others_is_refused() -> None:
    check_rows(ClassSums(lambda x, y: x.flatten(1), 4), SCHEMA)
    for mixing in (
        lambda x, y: x.flatten(1) - x.flatten(1).mean(0),
        lambda x, y: x.flatten(1) / len(x),
        lambda x, y: x.flatten(1) * torch.arange(len(x)).unsqueeze(1),
        lambda x, y: x.flatten(1)[:1],
    ):
        with pytest.raises(RefusedError, match="E-PRIV-16"):
            check_rows(ClassSums(mixing, 4), SCHEMA)
