"""The ways to take steps on the same batches: FedAvg's, FedMR's, private ones, and those of Opacus alone.

All see every example at every step (rate 1), so that batches are equal to the last example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample
from opacus.grad_sample.utils import register_grad_sampler
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn.functional import cross_entropy

from fl_core.datasets.examples import TensorExamples
from fl_core.methods.disjoint.fedmr import FedMR
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training import devices
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import Examples, RoundContext, SgdOptions, State
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan
from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise, SeededNoise
from privacy.mechanisms.record import per_sample_gradients, private_data
from privacy.mechanisms.record.per_sample_gradients import conv_grad_sample

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TURN = RoundContext(n_silos=10, n_classes=10, rounds=100, round=1, cohort=10).for_silo(silo=0, seed=0)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step is taken with: one batch of random images of ten classes in equal shares, on the device."""

    model: str
    options: Mapping[str, object]
    shape: tuple[int, ...]
    batch: int
    schedule: TrainConfig = TrainConfig()  # noqa: RUF009
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def train(self) -> TrainConfig:
        return replace(self.schedule, batch_size=self.batch)

    @property
    def schema(self) -> Schema:
        return Schema(self.shape, tuple(f"class{k}" for k in range(TURN.n_classes)))

    def on(self, device: torch.device) -> Setting:
        return replace(self, device=device)

    def build(self) -> nn.Module:
        """Make the model on the device, the same at every call."""
        return build_model(self.model, self.options, self.schema, 0).to(self.device)

    def examples(self) -> Examples:
        """Draw the examples; they lie on a GPU where one trains."""
        images = torch.rand(self.batch, *self.shape, generator=torch.Generator().manual_seed(0))
        made = TensorExamples(images, torch.arange(self.batch) % TURN.n_classes)
        return devices.move_to_device(made, self.device, devices.memory_for_examples(self.device))[0]


def message(method: FedAvg, model: nn.Module) -> State:
    """Make what a silo receives in the second round: FedMR's prototypes are known, so both its losses are computed."""
    sent = {group: dict(values) for group, values in method.broadcast(method.init_server(model, TURN)).items()}
    if "prototypes" in sent:
        g = sent["prototypes"]["g"]
        sent["prototypes"] = {
            "g": torch.randn(g.shape, generator=torch.Generator().manual_seed(1)),
            "known": torch.ones_like(sent["prototypes"]["known"]),
        }
    return sent


def plan_of(setting: Setting) -> ReleasePlan:
    """Plan a run of FedAvg over as many units as a batch has, clipped at 1, each physical batch a whole one."""
    terms = RecordDpConfig(physical_batch=setting.batch)
    return ReleasePlan.of(terms, setting.train, TURN.rounds, setting.batch, FedAvg(), setting.build(), setting.schema)


class PlainSteps:
    """Steps without privacy, with the method's own objective, as `Method.local` takes them."""

    def __init__(self, setting: Setting, examples: Examples, method: FedAvg) -> None:
        self.model = setting.build()
        self._data = PlainLocalData(RoundData(examples, examples, setting.train, TURN, setting.device))
        self._loss = method.objective(self.model, message(method, self.model), self._data, TURN)

    def take(self, steps: int) -> None:
        self._data.sgd(self.model, self._loss, SgdOptions(steps=steps))


class PrivateSteps:
    """Steps through `DpSgdLocalData`; mode: of `gradients.MODES`, the model's own without one."""

    def __init__(
        self, setting: Setting, examples: Examples, plan: ReleasePlan, mode: str | None = None, secure: bool = False
    ) -> None:
        self.model = setting.build()
        self._setting, self._examples, self._plan, self._mode, self._secure = setting, examples, plan, mode, secure

    def take(self, steps: int) -> None:
        """Take so many steps in one turn, whose releases are planned for it."""
        noise: NoiseSource = SecureNoise() if self._secure else SeededNoise(0, "benchmark")
        data = private_data.DpSgdLocalData(
            RoundData(self._examples, self._examples, self._setting.train, TURN, self._setting.device),
            self._plan,
            ReleaseAllowance(self._plan.training(steps)),
            noise,
        )
        usual = private_data.per_unit
        private_data.per_unit = partial(per_sample_gradients.per_unit, mode=self._mode)
        try:
            data.sgd(self.model, FedAvg.loss, SgdOptions(steps=steps))
        finally:
            private_data.per_unit = usual


class OpacusSteps:
    """Steps with Opacus' own module, optimizer and samplers, on batches that are drawn and read as ours are."""

    def __init__(self, setting: Setting, examples: Examples, plan: ReleasePlan) -> None:
        self._examples, self._plan, self._setting = examples, plan, setting
        self.model = setting.build()
        self._wrapped = GradSampleModule(self.model, loss_reduction="mean")
        config = setting.train
        self._optimizer = DPOptimizer(
            torch.optim.SGD(
                self._wrapped.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
            ),
            noise_multiplier=plan.noise,
            max_grad_norm=plan.terms.clip,
            expected_batch_size=setting.batch,
            loss_reduction="mean",
        )

    def take(self, steps: int) -> None:
        register_grad_sampler(CONVOLUTIONS)(compute_conv_grad_sample)
        try:
            self._wrapped.train()
            for _ in range(steps):
                drawn = torch.nonzero(torch.rand(len(self._examples)) < self._plan.rate).flatten()
                x, y = (v.to(self._setting.device) for v in self._examples.batch(drawn))
                self._optimizer.zero_grad()
                cross_entropy(self._wrapped(x), y).backward()
                self._optimizer.step()
        finally:
            register_grad_sampler(CONVOLUTIONS)(conv_grad_sample)


def ways(setting: Setting) -> dict[str, Callable[[int], None]]:
    """Make every way: FedAvg (plain), FedMR, Opacus, each gradient mode that the model allows, secure noise."""
    examples, plan = setting.examples(), plan_of(setting)
    chosen = per_sample_gradients.mode_of(setting.build())
    modes = per_sample_gradients.MODES[per_sample_gradients.MODES.index(chosen) :]
    return {
        "plain": PlainSteps(setting, examples, FedAvg()).take,
        "fedmr": PlainSteps(setting, examples, FedMR()).take,
        "opacus": OpacusSteps(setting, examples, plan).take,
        **{mode: PrivateSteps(setting, examples, plan, mode).take for mode in modes},
        "secure": PrivateSteps(setting, examples, plan, secure=True).take,
    }
