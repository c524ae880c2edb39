"""Local optimizers and their effective steps (specification of the baselines, section 1.2)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.capabilities import check_supported, required_capabilities
from fl_core.training.optimizers import GradientDescent, make_optimizer, make_optimizers
from fl_core.training.schedule import effective_steps
from fl_core.types.enums import Capability
from fl_core.types.records import TrainConfig

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("momentum", "steps", "expected"),
    [
        (0, 7, 7),
        (0.9, 1, 1),
        (0.9, 2, 2.9),
        (0.9, 3, 5.61),
        (0.9, 5, 13.1441),
        (0.9, 10, 41.381059609),
        (0.9, 20, 120.941898913),
        (0.5, 2, 2.5),
        (0.5, 10, 18.001953125),
    ],
)
def test_effective_steps_of_heavy_ball(momentum: float, steps: int, expected: float) -> None:
    assert effective_steps(TrainConfig(momentum=momentum), steps) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("steps", "expected"), [(2, 4.61), (10, 47.2429536481)])
def test_effective_steps_of_nesterov(steps: int, expected: float) -> None:
    assert effective_steps(TrainConfig(momentum=0.9, nesterov=True), steps) == pytest.approx(expected, rel=1e-9)


def test_effective_steps_with_a_pull() -> None:
    assert effective_steps(TrainConfig(momentum=0.0), 5, proximal=0.1) == pytest.approx(4.0951, rel=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_effective_steps_are_the_way_of_the_optimizer_itself(nesterov: bool) -> None:
    config, w = TrainConfig(momentum=0.7, nesterov=nesterov, weight_decay=0.0), nn.Parameter(torch.zeros(1).double())
    optimizer = make_optimizer([w], 0.05, config)
    for _ in range(6):
        w.grad = torch.ones_like(w)
        optimizer.step()
    assert effective_steps(config, 6) == pytest.approx(-float(w.detach()) / 0.05, rel=1e-12)


ROOT = Path(__file__).resolve().parents[3]


def _some(seed: int, *shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def test_bare_parameters_move_without_momentum_or_decay() -> None:
    full, bare = nn.Parameter(_some(0, 3)), nn.Parameter(_some(1, 3))
    optimizers = make_optimizers(
        {"full": full, "bare": bare}, 0.05, TrainConfig(momentum=0.9, weight_decay=0.5), lambda name: name == "bare"
    )
    for seed in (2, 3):
        full.grad = bare.grad = _some(seed, 3)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(bare, (_some(1, 3) - 0.05 * _some(2, 3)) - 0.05 * _some(3, 3))
    assert not torch.equal(full - _some(0, 3), bare - _some(1, 3))


OPTIMIZERS = {
    "sgd": (TrainConfig(momentum=0.9, weight_decay=0.01, nesterov=True), torch.optim.SGD),
    "adam": (TrainConfig(optimizer="adam", weight_decay=0.01), torch.optim.Adam),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_an_optimizer_that_is_never_compiled_is_torchs_bit_for_bit(kind: str, scaled: bool) -> None:
    config, theirs = OPTIMIZERS[kind]
    options = {"momentum": 0.9, "nesterov": True} if kind == "sgd" else {}
    own, other = nn.Parameter(_some(0, 3, 4)), nn.Parameter(_some(0, 3, 4))
    pairs = [
        (own, make_optimizer([own], 0.05, config)),
        (other, theirs([other], 0.05, weight_decay=0.01, **options)),  # type: ignore[operator]
    ]
    for parameter, optimizer in pairs:
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for seed in range(4):
            optimizer.zero_grad()
            scaler.scale((parameter * _some(seed, 3, 4)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert torch.equal(own, other)
    assert own.requires_grad
    assert own.grad_fn is None


def test_neither_counting_nor_digits_nor_training_import_what_they_do_not_use() -> None:
    """The compiler and scikit-learn take longer to import than all of ours; torchvision imports the compiler itself."""
    code = (
        "import sys; from fl_core.datasets import load; from fl_core.models import MODELS, describe\n"
        "from coordinator.config.hydra_config import compose_spec; from consilium.research.simulate import runner\n"
        "from tests.support.federations import MODEL_SHAPES, schema\n"
        "assert len(load('digits/p5c2/0').train) > 0\n"
        "for name in set(MODELS) - {'efficientnet_b0', 'frozen'}:\n"
        "    assert describe(name, schema(MODEL_SHAPES[name])).parameters > 0\n"
        "assert describe('random_features', schema((1, 8, 8)), {'kind': 'patches'}).parameters > 0\n"
        "words = ['method=fedmr', 'data=digits', 'federation=p3c4', 'rounds=1', 'train.epochs=1']\n"
        "for optimizer in ('sgd', 'adam'):\n"
        "    assert runner.run(compose_spec([*words, f'train.optimizer={optimizer}'])).summary()\n"
        "print([name for name in ('torch._dynamo', 'sympy', 'sklearn', 'torchvision') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.stdout == "[]\n", done.stderr


def test_an_adaptive_optimizer_has_no_effective_steps() -> None:
    with pytest.raises(ConfigError, match="E-CFG-08"):
        effective_steps(TrainConfig(optimizer="adam"), 3)


class Picky(FedAvg):
    """Lacks partial participation."""

    @property
    def unsupported(self):  # type: ignore[no-untyped-def]
        return {Capability.PARTIAL_PARTICIPATION: "train with cohort=0"}


@pytest.mark.parametrize(("cohort", "quorum", "refused"), [(2, 0, True), (0, 2, True), (3, 3, False), (0, 0, False)])
def test_a_method_is_refused_what_it_lacks_with_the_remedy(cohort: int, quorum: int, refused: bool) -> None:
    asked = required_capabilities(TrainConfig(), 3, cohort, quorum)
    if refused:
        with pytest.raises(ConfigError, match=r"fedavg.*partial participation.*cohort=0"):
            check_supported(Picky(), asked)
    check_supported(FedAvg(), asked)
    assert refused or not asked


def test_float16_scales_what_would_become_zero_and_takes_no_step_where_it_overflows() -> None:
    w = nn.Parameter(torch.zeros(3))
    descent = GradientDescent({"w": w}, 0.5, TrainConfig(amp="fp16", momentum=0.0, weight_decay=0.0))

    def step(factor: float) -> None:
        descent.clear()
        descent.backward([(w.half().float() * factor).sum()])  # the gradient passes through float16
        descent.step()

    step(1e-8)  # 0 in float16, where the smallest number is 6e-8
    assert w.detach().tolist() == pytest.approx([-0.5e-8] * 3, rel=1e-2)
    step(3.0)  # 3 * 65,536 is above 65,504
    assert w.detach().tolist() == pytest.approx([-0.5e-8] * 3, rel=1e-2)
    step(0.25)
    assert w.detach().tolist() == pytest.approx([-0.125] * 3)


def test_gradients_are_cleared_before_they_are_added_to() -> None:
    w = nn.Parameter(torch.zeros(1))
    w.grad = torch.full((1,), 7.0)
    descent = GradientDescent({"w": w}, 1.0, TrainConfig(momentum=0.0, weight_decay=0.0))
    descent.clear()
    descent.backward([w.sum()])
    descent.step()
    assert float(w.detach()) == -1.0
