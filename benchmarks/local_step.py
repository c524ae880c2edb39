"""Local steps of a method through the hospital's own doors, and the same steps as a bare PyTorch loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fl_core import rng
from fl_core.datasets.examples import TensorExamples
from fl_core.methods import build_method
from fl_core.methods.fedavg import FedAvg
from fl_core.models import build_model
from fl_core.training import devices, optimizers
from fl_core.training.local_data import PlainData
from fl_core.types.values import Examples, Federation, LossFn, Schema, State, TrainConfig, Turn

TURN = Turn(Federation(n_silos=10, n_classes=10, rounds=100, round=1, cohort=10), silo=0, seed=0)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step is taken with: random images of all classes in equal shares, on the device.

    batch: examples of a step   batches: batches of an epoch; with one, every step sees all classes
    """

    model: str = "resnet18"
    options: Mapping[str, object] = field(default_factory=dict)
    shape: tuple[int, ...] = (3, 32, 32)
    n_classes: int = 10
    batch: int = 64
    batches: int = 1
    schedule: TrainConfig = TrainConfig()  # noqa: RUF009
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def train(self) -> TrainConfig:
        """Return the schedule with the batch of this setting."""
        return replace(self.schedule, batch_size=self.batch)

    @property
    def schema(self) -> Schema:
        """Return the schema of the examples."""
        return Schema(self.shape, tuple(f"class{k}" for k in range(self.n_classes)))

    def on(self, device: torch.device) -> Setting:
        """Return the same setting on another device."""
        return replace(self, device=device)

    def build(self) -> nn.Module:
        """Make the model on the device, the same at every call."""
        return build_model(self.model, self.options, self.schema, 0).to(self.device)

    def examples(self) -> Examples:
        """Draw the examples; they lie on a GPU where one trains."""
        n, g = self.batch * self.batches, torch.Generator().manual_seed(0)
        made = TensorExamples(torch.rand(n, *self.shape, generator=g), torch.arange(n) % self.n_classes)
        return devices.placed(made, self.device, devices.room_on(self.device))[0]


def method_of(name: str, options: Mapping[str, object] | None = None) -> FedAvg:
    """Build a method whose objective can be asked for."""
    method = build_method(name, options or {})
    assert isinstance(method, FedAvg)
    return method


def message(method: FedAvg, model: nn.Module) -> State:
    """Make what a silo receives in the second round: FedMR's prototypes are known, around the origin."""
    sent = {group: dict(values) for group, values in method.broadcast(method.init_server(model, TURN.fed)).items()}
    if "prototypes" in sent:
        g = sent["prototypes"]["g"]
        sent["prototypes"] = {
            "g": torch.randn(g.shape, generator=torch.Generator().manual_seed(1)),
            "known": torch.ones_like(sent["prototypes"]["known"]),
        }
    return sent


class Steps:
    """Steps of one method through `PlainData.sgd`, as `Method.local` takes them."""

    def __init__(self, setting: Setting, examples: Examples, method: FedAvg) -> None:
        self.model = setting.build()
        self._data = PlainData(examples, examples, setting.train, TURN, setting.device)
        self._loss = method.objective(self.model, message(method, self.model), self._data, TURN)

    def take(self, steps: int) -> None:
        """Take so many steps in one call."""
        self._data.sgd(self.model, self._loss, steps=steps)


class BareSteps:
    """The same steps, written down as one would without a federation: same batches, same loss, same optimizer."""

    def __init__(self, setting: Setting, examples: Examples, method: FedAvg) -> None:
        self.model = setting.build()
        data = PlainData(examples, examples, setting.train, TURN, setting.device)
        self._loss: LossFn = method.objective(self.model, message(method, self.model), data, TURN)
        self._setting, self._examples, self._calls = setting, examples, 0

    def take(self, steps: int) -> None:
        """Take so many steps."""
        setting, config = self._setting, self._setting.train
        order = rng.stream(TURN.seed, "round", 1, "silo", 0, "sgd", self._calls, "order")
        self._calls += 1
        batches: list[Tensor] = []
        while len(batches) < steps:
            batches += torch.split(torch.randperm(len(self._examples), generator=order), setting.batch)
        optimizer = torch.optim.SGD(
            self.model.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        scaler = torch.amp.grad_scaler.GradScaler(setting.device.type, enabled=config.amp == "fp16")
        self.model.train()
        if config.channels_last:
            self.model.to(memory_format=torch.channels_last)
        for index in batches[:steps]:
            x, y = self._examples.batch(index)
            x = x.contiguous(memory_format=torch.channels_last) if config.channels_last else x
            optimizer.zero_grad()
            with torch.autocast(setting.device.type, optimizers.AMP[config.amp], enabled=config.amp != "off"):
                found = self._loss(self.model, x, y)
                loss = found.per_example.mean() + (0.0 if found.coupled is None else found.coupled)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
