"""Canaries: examples whose traces in a training run are looked for, with the doors that training uses.

White box ("Dirac"): the gradient of canary i is its own coordinate, as long as a clip allows; the attacker sees what
moved. Black box: canaries are images under wrong labels, and the attacker sees losses of the final model. Each canary
is in with probability 1/2. Both train through `PrivateData`, or `PlainData` for the run without privacy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import datasets, rng
from fl_core.local import PlainData
from fl_core.models import build_model
from fl_core.types import Coupling, Examples, Federation, Losses, Schema, TrainConfig, Turn
from privacy.audit.bounds import Floats, Guesses, one_run
from privacy.course import Course, Rates, Spend
from privacy.entropy import Noise, SecureNoise
from privacy.example import PrivateData
from privacy.terms import Terms

PUSH = 1e3
"""How far a Dirac canary pushes before it is clipped."""


class InMemory(Examples):
    """Examples that are given."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.labels = x, y

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Read the examples at `index`."""
        return self.x[index], self.labels[index]


@dataclass(frozen=True, slots=True)
class Training:
    """The training that is audited: expected batch, steps, and epsilon (inf: without privacy) with its clip."""

    epsilon: float
    batch: int = 64
    steps: int = 200
    lr: float = 0.1
    clip: float = 1.0
    delta: float = 1e-5
    momentum: float = 0.0

    def run(
        self, model: nn.Module, data: Examples, loss: object, n_classes: int, noise: Noise | None, seed: int
    ) -> None:
        """Train `model` in place through the doors; noise: None for the operating system's entropy."""
        config = TrainConfig(lr=self.lr, momentum=self.momentum, weight_decay=0.0, batch_size=self.batch, epochs=1)
        turn = Turn(Federation(1, n_classes, 1, 0, 1), 0, seed)
        if self.epsilon == float("inf"):
            PlainData(data, data, config, turn).sgd(model, loss, steps=self.steps)  # type: ignore[arg-type]
            return
        course = self.course(config, len(data))
        spend = Spend(course.training(self.steps))
        doors = PrivateData(data, data, config, turn, course, spend, noise or SecureNoise())
        doors.sgd(model, loss, steps=self.steps)  # type: ignore[arg-type]

    def course(self, config: TrainConfig, units: int) -> Course:
        """Plan the training: its noise is solved for epsilon."""
        terms = Terms(epsilon=self.epsilon, delta=self.delta, clip=self.clip, test_data="public", physical_batch=512)
        return Course(terms, Rates(config, units), 1, Coupling.EXAMPLE, (self.steps,), 0, False)


@dataclass(frozen=True, slots=True)
class Found:
    """Scores of all canaries, which of them were in, and what the best guesses refute."""

    scores: Floats
    present: NDArray[np.bool_]
    guesses: Guesses


def dirac(
    training: Training, canaries: int = 500, records: int = 1000, seed: int = 0, noise: Noise | None = None
) -> Found:
    """Audit with one white-box run; records: in all, of which those that are no canary have no gradient."""
    present = _drawn(canaries, seed)
    x = torch.zeros(records, canaries)
    held = np.flatnonzero(present)
    x[torch.arange(len(held)), torch.from_numpy(held)] = -PUSH  # descent then moves the coordinate up
    model = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:  # noqa: ARG001
        return Losses(model(x).squeeze(1))

    training.run(model, InMemory(x, torch.zeros(records, dtype=torch.long)), loss, 1, noise, seed)
    scores = model.weight.detach().double().numpy().ravel()
    return Found(scores, present, one_run(scores, present, training.delta))


def mislabelled(training: Training, canaries: int = 500, seed: int = 0, noise: Noise | None = None) -> Found:
    """Audit with one black-box run on digits: images under wrong labels, scored by minus the loss at the end."""
    x, y, schema = digits()
    order = torch.randperm(len(y), generator=rng.stream(seed, "canaries", "order"))
    own, rest = order[:canaries], order[canaries:]
    shift = torch.randint(1, len(schema.classes), (canaries,), generator=rng.stream(seed, "canaries", "labels"))
    wrong = (y[own] + shift) % len(schema.classes)
    present = _drawn(canaries, seed)
    kept = torch.from_numpy(present)
    data = InMemory(torch.cat((x[rest], x[own][kept])), torch.cat((y[rest], wrong[kept])))
    model = build_model("digits_mlp", {}, schema, seed)
    training.run(model, data, _cross_entropy, len(schema.classes), noise, seed)
    with torch.no_grad():
        scores = -cross_entropy(model.eval()(x[own]), wrong, reduction="none").double().numpy()
    return Found(scores, present, one_run(scores, present, training.delta))


def members(training: Training, n: int = 400, seed: int = 0, noise: Noise | None = None) -> tuple[Floats, Floats]:
    """Return minus the losses of trained-on and of other digits: what a loss-threshold attack looks at.

    Yeom, Giacomelli, Fredrikson and Jha, "Privacy Risk in Machine Learning", CSF 2018.
    """
    x, y, schema = digits()
    order = torch.randperm(len(y), generator=rng.stream(seed, "members"))
    inside, outside = order[:n], order[n : 2 * n]
    model = build_model("digits_mlp", {}, schema, seed)
    training.run(model, InMemory(x[inside], y[inside]), _cross_entropy, len(schema.classes), noise, seed)
    with torch.no_grad():
        losses = [cross_entropy(model.eval()(x[i]), y[i], reduction="none").double().numpy() for i in (inside, outside)]
    return -losses[0], -losses[1]


def digits() -> tuple[Tensor, Tensor, Schema]:
    """Read all of scikit-learn's digits: x (n, 1, 8, 8), y (n,)."""
    silos = [datasets.load(str(reference)) for reference in datasets.federation("digits", "hospitals6")]
    parts = [split.batch(torch.arange(len(split))) for silo in silos for split in (silo.train, silo.test)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), silos[0].schema


def _cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(cross_entropy(model(x), y, reduction="none"))


def _drawn(n: int, seed: int) -> NDArray[np.bool_]:
    return (torch.rand(n, generator=rng.stream(seed, "canaries", "present")) < 0.5).numpy()
