"""The contracts that others run on their own code find what breaks them, by name, and let sound code pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from consilium.extending import ArrayData, FedAvg, HeadOptions, LocalResult, Losses, Part
from consilium.testing import check_data, check_method, check_model, check_partition
from consilium.testing.methods import CHECKS, MethodCase, run_checks
from fl_core.extensions import loading


def broken_by(check: Callable[[], None]) -> str:
    with pytest.raises(AssertionError) as caught:
        check()
    return str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Sound(FedAvg):
    mu: float = 0.0


@pytest.mark.integration
def test_a_sound_method_passes() -> None:
    check_method(Sound, mu=0.5)


@dataclass(frozen=True, kw_only=True)
class Mixing(FedAvg):
    """Subtracts the batch's mean: under differential privacy one record would be in every entry."""

    def objective(self, model, msg, data, context):
        def loss(model, x, y):
            return Losses(cross_entropy(model(x) - model(x).mean(0), y, reduction="none"))

        return loss


@dataclass(frozen=True, kw_only=True)
class Keeping(FedAvg):
    """Changes the state that it was handed."""

    def merge(self, server, total, context):
        for name, moved in total["delta"].mean().items():
            server["w"][name] += moved
        return server


@dataclass(frozen=True, kw_only=True)
class Drawing(FedAvg):
    """Draws from torch's global generator."""

    def objective(self, model, msg, data, context):
        shift = torch.rand(())
        return lambda model, x, y: Losses(cross_entropy(model(x) * (1 + shift), y, reduction="none"))


@dataclass(frozen=True, kw_only=True)
class Silent(FedAvg):
    """Sends more than it says."""

    def extras(self, model, msg, data, context):
        return {"more": Part.of({"x": torch.ones(2)})}


@dataclass(frozen=True, kw_only=True)
class Sharing(FedAvg):
    """Sends the model's own memory."""

    def local(self, model, msg, silo, data, context):
        data.sgd(model, self.loss, self.sgd_options(model))
        return LocalResult({"delta": Part(dict(model.state_dict()), torch.tensor(1.0))}, silo)


@pytest.mark.parametrize(
    ("method", "promise"),
    [
        (Mixing, "the loss mixes examples only where the method says so"),
        (Keeping, "merge mutates neither the state nor the sum"),
        (Drawing, "equal inputs give equal bytes"),
        (Silent, "a method names what it sends"),
        (Sharing, "bundles do not share memory with the model"),
    ],
)
def test_a_method_that_breaks_a_promise_is_told_which(method: type[FedAvg], promise: str) -> None:
    (check,) = [check for check in CHECKS if check.__name__ == promise.replace(" ", "_")]
    with loading.registered("method", method) as name:
        said = broken_by(lambda: run_checks([check], MethodCase(name, {}), method.__name__))
    assert said.startswith(f"{method.__name__} fails 1 of 1 checks:\n  {promise}: ")


@dataclass(frozen=True, kw_only=True)
class Both(Keeping, Silent):
    """Breaks two."""


@pytest.mark.integration
def test_all_broken_promises_are_named_at_once() -> None:
    said = broken_by(lambda: check_method(Both))
    assert f"of {len(CHECKS)} checks:" in said
    assert "a method names what it sends" in said
    assert "merge mutates neither the state nor the sum" in said


@dataclass(frozen=True, slots=True)
class Plain(HeadOptions):
    def build(self, schema):
        return self.complete(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), 4, schema)


@dataclass(frozen=True, slots=True)
class InPlace(HeadOptions):
    def build(self, schema):
        return self.complete(
            nn.Sequential(nn.ReLU6(inplace=True), nn.Hardtanh(0, 0.5, inplace=True), nn.Flatten(), nn.Linear(12, 4)),
            4,
            schema,
        )


@dataclass(frozen=True, slots=True)
class Idle(HeadOptions):
    def build(self, schema):
        made = self.complete(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), 4, schema)
        made.idle = nn.Linear(2, 2)
        return made


def test_models() -> None:
    check_model(Plain, (3, 2, 2), projection=[3])
    assert "no module changes its input" in broken_by(lambda: check_model(InPlace, (3, 2, 2)))
    assert "gets a finite gradient: AssertionError: idle" in broken_by(lambda: check_model(Idle, (3, 2, 2)))


class Data(ArrayData):
    shape: ClassVar[tuple[int, ...]] = (2,)
    classes: ClassVar[tuple[str, ...]] = ("a", "b")

    def read(self, root: Path | None):
        x = np.arange(16, dtype=np.float32).reshape(8, 2)
        return (x, np.arange(8) % 2), (x[:2] + 0.5, np.arange(2))


class Leaking(Data):
    def read(self, root: Path | None):
        train, _ = super().read(root)
        return train, (train[0][:2], train[1][:2])


class OneClass(Data):
    def read(self, root: Path | None):
        (x, y), test = super().read(root)
        return (x, y * 0), test


def test_data_sets() -> None:
    check_data(Data)
    assert "2 test examples are training examples, too" in broken_by(lambda: check_data(Leaking))
    assert "no training example of ['b']" in broken_by(lambda: check_data(OneClass))


@dataclass(frozen=True)
class Turns:
    silos: int = 3
    overlap: int = 0

    def partition(self, train, test, n_classes, seed):
        return [np.arange(max(0, k - self.overlap), len(train), self.silos) for k in range(self.silos)]


@dataclass(frozen=True)
class Luck:
    silos: int = 2

    def partition(self, train, test, n_classes, seed):
        return np.array_split(np.random.permutation(len(train)), self.silos)


def test_partitions() -> None:
    check_partition(Turns, silos=4)
    assert "some train examples are in two silos" in broken_by(lambda: check_partition(Turns, overlap=1))
    assert "equal labels are divided equally" in broken_by(lambda: check_partition(Luck))
