"""The ways to take the same steps: plain, private through the doors, and with Opacus alone.

All see every example at every step (rate 1), so that batches are equal to the last example.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample
from opacus.grad_sample.utils import register_grad_sampler
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.local_step import TURN, Setting
from fl_core.methods.fedavg import FedAvg
from fl_core.training.local_data import PlainData
from fl_core.types.values import Examples
from privacy.accounting.record_config import Terms
from privacy.accounting.release_plan import Course, Spend
from privacy.dp_sgd import per_sample_gradients as gradients
from privacy.dp_sgd import private_data as example
from privacy.dp_sgd.layer_gradients import conv_grad_sample
from privacy.noise.sources import Noise, SecureNoise, SeededNoise

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def course_of(setting: Setting) -> Course:
    """Plan a run of FedAvg over as many units as a batch has, clipped at 1, each physical batch a whole one."""
    terms = Terms(physical_batch=setting.batch)
    return Course.of(terms, setting.train, TURN.fed.rounds, setting.batch, FedAvg(), setting.build(), setting.schema)


class PlainSteps:
    """Steps without privacy, through the same kind of doors."""

    def __init__(self, setting: Setting, examples: Examples) -> None:
        self.model, self._data = setting.build(), PlainData(examples, examples, setting.train, TURN, setting.device)

    def take(self, steps: int) -> None:
        """Take so many steps."""
        self._data.sgd(self.model, FedAvg.loss, steps=steps)


class PrivateSteps:
    """Steps through `PrivateData`; mode: of `gradients.MODES`, the model's own without one."""

    def __init__(
        self, setting: Setting, examples: Examples, course: Course, mode: str | None = None, secure: bool = False
    ) -> None:
        self.model = setting.build()
        self._setting, self._examples, self._course, self._mode, self._secure = setting, examples, course, mode, secure

    def take(self, steps: int) -> None:
        """Take so many steps in one turn, whose releases are planned for it."""
        noise: Noise = SecureNoise() if self._secure else SeededNoise(0, "benchmark")
        doors = example.PrivateData(
            self._examples, self._examples, self._setting.train, TURN, self._course,
            Spend(self._course.training(steps)), noise, self._setting.device,
        )  # fmt: skip
        usual = example.per_unit
        example.per_unit = partial(gradients.per_unit, mode=self._mode)
        try:
            doors.sgd(self.model, FedAvg.loss, steps=steps)
        finally:
            example.per_unit = usual


class OpacusSteps:
    """Steps with Opacus' own module, optimizer and samplers, on batches that are drawn and read as ours are."""

    def __init__(self, setting: Setting, examples: Examples, course: Course) -> None:
        self._examples, self._course, self._setting = examples, course, setting
        self.model = setting.build()
        self._wrapped = GradSampleModule(self.model, loss_reduction="mean")
        config = setting.train
        self._optimizer = DPOptimizer(
            torch.optim.SGD(
                self._wrapped.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
            ),
            noise_multiplier=course.noise, max_grad_norm=course.terms.clip, expected_batch_size=setting.batch,
            loss_reduction="mean",
        )  # fmt: skip

    def take(self, steps: int) -> None:
        """Take so many steps."""
        register_grad_sampler(CONVOLUTIONS)(compute_conv_grad_sample)
        try:
            self._wrapped.train()
            for _ in range(steps):
                drawn = torch.nonzero(torch.rand(len(self._examples)) < self._course.rate).flatten()
                x, y = (v.to(self._setting.device) for v in self._examples.batch(drawn))
                self._optimizer.zero_grad()
                cross_entropy(self._wrapped(x), y).backward()
                self._optimizer.step()
        finally:
            register_grad_sampler(CONVOLUTIONS)(conv_grad_sample)


def arms(setting: Setting) -> dict[str, Callable[[int], None]]:
    """Make every way: plain, Opacus, the doors in each mode that the model allows, and with noise of the system."""
    examples, course = setting.examples(), course_of(setting)
    chosen = gradients.mode_of(setting.build())
    modes = gradients.MODES[gradients.MODES.index(chosen) :]
    ways: dict[str, Callable[[int], None]] = {
        "plain": PlainSteps(setting, examples).take,
        "opacus": OpacusSteps(setting, examples, course).take,
        **{mode: PrivateSteps(setting, examples, course, mode).take for mode in modes},
    }
    return ways | {"secure": PrivateSteps(setting, examples, course, secure=True).take}
