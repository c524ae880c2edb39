"""The target of an audit: labelled images, and a network for their shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core import datasets, rng
from fl_core.datasets import SiloDataset
from fl_core.errors import ConfigError
from fl_core.models.split_model import SplitModel, assemble
from fl_core.types.records import Schema
from fl_core.types.values import Examples, Losses

MIN_IMAGES, MAX_IMAGES = 100, 4000
"""Minimum number of images for an audit, and maximum; from more, it takes a random subset."""
_BATCH = 256
_FEATURES = 64


class ListedExamples(Examples):
    """Examples from tensors x (n, ...) and y (n,). groups: one name per example."""

    def __init__(self, x: Tensor, y: Tensor, groups: Sequence[str] | None = None) -> None:
        self.x, self.labels = x, y
        self.groups = None if groups is None else tuple(groups)

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self.x[index], self.labels[index]


@dataclass(frozen=True, slots=True)
class AuditTarget:
    """A pool of labelled images: x (n, c, h, w) float32, y (n,) int64. Each audit draws its training images from it."""

    name: str
    x: Tensor
    y: Tensor
    schema: Schema

    @classmethod
    def of(cls, data: SiloDataset, seed: int = 0) -> AuditTarget:
        """Pool a hospital's training and test images, at most `MAX_IMAGES` of them, in memory.

        Raises ConfigError (E-PRIV-29) on fewer than `MIN_IMAGES`, on other data than images, and on a single class.
        """
        if len(data.schema.shape) != 3:
            raise ConfigError(
                "E-PRIV-29", f"expected images to audit, found examples of shape {data.schema.shape}: audit images"
            )
        sizes = [len(data.train), len(data.test)]
        chosen = torch.randperm(sum(sizes), generator=rng.stream(seed, "audit", "pool"))[:MAX_IMAGES].sort().values
        parts = [
            examples.batch(index)
            for examples, mine in (
                (data.train, chosen[chosen < sizes[0]]),
                (data.test, chosen[chosen >= sizes[0]] - sizes[0]),
            )
            for index in torch.split(mine, _BATCH)
        ]
        target = cls(data.origin, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), data.schema)
        if len(target.y) < MIN_IMAGES or len(target.classes) < 2:
            raise ConfigError(
                "E-PRIV-29",
                f"the audit needs at least {MIN_IMAGES} images of at least two classes; {data.origin} has "
                f"{len(target.y)} images of {len(target.classes)} classes: use more data, since too few guesses cannot "
                "refute anything",
            )
        return target

    @classmethod
    def digits(cls) -> AuditTarget:
        silos = [datasets.load(str(reference)) for reference in datasets.federation("digits", "hospitals6")]
        parts = [split.batch(torch.arange(len(split))) for silo in silos for split in (silo.train, silo.test)]
        return cls("digits", torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), silos[0].schema)

    @property
    def n_classes(self) -> int:
        return len(self.schema.classes)

    @property
    def classes(self) -> list[int]:
        return sorted(int(c) for c in torch.unique(self.y))

    def network(self, seed: int) -> SplitModel:
        """Build two convolutions with group norm, a hidden layer of 64 and a head: about 85,000 weights."""
        channels = self.schema.shape[0]
        with rng.torch_scope(seed, "audit", "network"):
            body = nn.Sequential(
                nn.Conv2d(channels, 32, 3, padding=1),
                nn.GroupNorm(8, 32),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, padding=1, stride=2),
                nn.GroupNorm(8, 64),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(4),
                nn.Flatten(),
                nn.Linear(64 * 16, _FEATURES),
                nn.ReLU(),
            )
            return assemble(body, _FEATURES, (), self.n_classes, head_bias=True)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(cross_entropy(model(x), y, reduction="none"))


def negative_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return minus the loss of each example (n,), float64: high for training examples."""
    model.eval()
    with torch.no_grad():
        index = torch.arange(len(y)).split(_BATCH)  # type: ignore[no-untyped-call]
        return -torch.cat([cross_entropy(model(x[i]), y[i], reduction="none") for i in index]).double()
