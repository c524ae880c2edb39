"""A frozen random layer under a linear head: a non-linear model whose features need no training.

Of tables, random projections: Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NIPS 2007, Algorithm
1. With rows of W from N(0, I / l^2) and phases b from [0, 2 pi), inner products of sqrt(2 / D) cos(W x + b) approach
exp(-|x - x'|^2 / 2 l^2).

Of images, random patch filters: Coates, Lee and Ng, "An Analysis of Single-Layer Networks in Unsupervised Feature
Learning", AISTATS 2011, with filters that are drawn and not learnt. K filters w of p x p pixels and all channels are
normal numbers, averaged once over 3 x 3 neighbours, with mean 0 and length 1. Of a patch x with variance v

    r = w . x / sqrt(v + 0.01),   a = 2 relu(r - 1/2), 2 relu(-r - 1/2)

and each a is averaged over g x g parts of the image: 2 K g^2 features of about mean square 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.models.split_model import HeadOptions, SplitModel
from fl_core.types.records import Schema
from fl_core.validate import Positive

MAX_WIDTH = 1 << 16
SIDE = 32
"""Approximate number of pixels of the shorter side that larger images are averaged down to."""
_THRESHOLD, _FLOOR, _SCALE = 0.5, 0.01, 2.0
_AT_ONCE = 1 << 21
"""Filter responses that are computed at once, so that they stay in the processor's cache."""
_ROWS = 32
"""Images of a group at most: a batch of fewer is filled up to one."""


class PatchFilters(nn.Module):
    """Images (B, channels, height, width) -> (B, 2 K g^2); its filters are a buffer, which no optimizer moves.

    shrink: the side of the blocks of pixels that are averaged first   patch: p   grid: g

    Guarantees: an image has the same features in every batch, whatever its size and its memory format, since images
    pass in groups of one size, filled up with zeros.
    """

    weight: Tensor

    def __init__(self, shape: tuple[int, int, int], filters: int, shrink: int, patch: int, grid: int) -> None:
        super().__init__()
        channels, *sides = shape
        self.shrink, self.grid = shrink, grid
        places = prod(side // shrink - patch + 1 for side in sides)
        self.rows = min(_ROWS, max(1, _AT_ONCE // (2 * filters * places)))
        weight = nn.init.normal_(torch.empty(filters, channels, patch, patch))
        # On the meta device, where numbers are only counted, these calls import the compiler, which takes a second.
        self.register_buffer("weight", weight if weight.is_meta else _smoothed(weight))

    def forward(self, x: Tensor) -> Tensor:
        whole = x.new_zeros(len(x) + -len(x) % self.rows, *x.shape[1:])
        whole[: len(x)] = x
        parts = [self._features(part) for part in torch.split(whole, self.rows)]
        return torch.cat(parts)[: len(x)] if parts else self._features(whole)

    def _features(self, x: Tensor) -> Tensor:
        patch = self.weight.shape[-1]
        if self.shrink > 1:
            x = functional.avg_pool2d(x, self.shrink)
        mean, square = (functional.avg_pool2d(v.mean(1, keepdim=True), patch, stride=1) for v in (x, x.square()))
        variance = (square - mean.square()).clamp(min=0.0)
        response = functional.conv2d(x, self.weight) * torch.rsqrt(variance + _FLOOR)
        both = torch.cat((response, -response), dim=1)
        pooled = functional.adaptive_avg_pool2d(torch.relu(both - _THRESHOLD), self.grid)
        return _SCALE * pooled.flatten(1)


def _smoothed(weight: Tensor) -> Tensor:
    """Average filters (K, channels, p, p) over 3 x 3 neighbours, reflected at the edge; then mean 0 and length 1."""
    weight = functional.avg_pool2d(functional.pad(weight, (1, 1, 1, 1), mode="reflect"), 3, stride=1)
    weight = weight - weight.mean((1, 2, 3), keepdim=True)
    return weight / weight.square().sum((1, 2, 3), keepdim=True).sqrt()


class RandomLayer(nn.Module):
    """x (B, ...) -> (B, D) with entries of mean square 1 at most; its numbers are buffers, which no optimizer moves."""

    weight: Tensor
    phase: Tensor

    def __init__(self, inputs: int, width: int, length: float, kind: str) -> None:
        super().__init__()
        self.kind = kind
        weight = nn.init.normal_(torch.empty(width, inputs)).div_(length)  # in place: a quotient imports the compiler
        self.register_buffer("weight", weight)
        self.register_buffer("phase", nn.init.uniform_(torch.empty(width), 0.0, 2.0 * math.pi))

    def forward(self, x: Tensor) -> Tensor:
        z = functional.linear(x.flatten(1), self.weight)
        if self.kind == "relu":
            return torch.relu(z)
        return math.sqrt(2.0) * torch.cos(z + self.phase)


@dataclass(frozen=True, slots=True)
class RandomFeatures(HeadOptions):
    """Random features of an image or of the columns of a table, and a linear head: the layer is never trained.

    kind: "patches" of images; of any numbers "cosine", or "relu" of W x; a run takes patches of images and cosines of
    tables unless it says otherwise
    width: D, the number of features; of patches at most, K = width / (2 g^2) rounded down
    length: l as a multiple of sqrt(numbers of an example), so that it follows from the example's shape and from no data
    patch: p   grid: g   shrink: the side of the blocks of pixels that are averaged first; 0 of these three follows from
    the shorter side: shrink makes it about 32 pixels, p is a quarter of what it is then, from 3 to 6, and g is 3 or
    what fits.
    """

    omitted_at_default: ClassVar[frozenset[str]] = HeadOptions.omitted_at_default | {"patch", "grid", "shrink"}
    width: int = 1024
    length: Positive = 0.5
    kind: Literal["cosine", "relu", "patches"] = "cosine"
    patch: int = 0
    grid: int = 0
    shrink: int = 0

    def build(self, schema: Schema) -> SplitModel:
        if not 1 <= self.width <= MAX_WIDTH or not 0 < self.length < math.inf:
            raise ConfigError(
                "E-CFG-02",
                f"random_features: expected a width from 1 to {MAX_WIDTH} and a length above 0, found {self.width} and "
                f"{self.length:g}: change it",
            )
        validate.one_of("E-CFG-02", "model", ("cosine", "relu", "patches"), kind=self.kind)
        inputs = prod(schema.shape)
        if not inputs or len(schema.classes) < 2:
            raise ConfigError("E-CFG-23", f"random_features needs numbers and at least 2 classes, found {schema}")
        if self.kind == "patches":
            body = self._filters(schema)
            return self.complete(body, 2 * len(body.weight) * body.grid**2, schema)
        return self.complete(
            RandomLayer(inputs, self.width, self.length * math.sqrt(inputs), self.kind), self.width, schema
        )

    def _filters(self, schema: Schema) -> PatchFilters:
        if len(schema.shape) != 3:
            raise ConfigError(
                "E-CFG-23",
                f"random_features: expected images (channels, height, width) for kind=patches, found {schema.shape}: "
                "set model.kind=cosine",
            )
        validate.at_least("E-CFG-02", "model", 0, patch=self.patch, grid=self.grid, shrink=self.shrink)
        channels, height, width = schema.shape
        shorter = min(height, width)
        shrink = self.shrink or max(1, round(shorter / SIDE))
        patch = self.patch or min(max(shorter // shrink // 4, 3), 6)
        places = shorter // shrink - patch + 1
        grid = self.grid or min(3, max(places, 1))
        if patch < 2 or places < grid:
            raise ConfigError(
                "E-CFG-23",
                f"random_features: expected images of at least {max(patch, 2) + grid - 1} pixels a side for patches of "
                f"{max(patch, 2)} x {max(patch, 2)} in {grid} x {grid} parts, found {height} x {width} pixels averaged "
                f"over blocks of {shrink}, and patches of {patch}: change model.patch, model.grid or model.shrink, or "
                "set model.kind=cosine",
            )
        if not (filters := self.width // (2 * grid**2)):
            raise ConfigError(
                "E-CFG-02",
                f"random_features: expected a model.width of at least {2 * grid**2}, which is one filter and its "
                f"opposite over {grid} x {grid} parts, found {self.width}: raise it, or lower model.grid",
            )
        return PatchFilters((channels, height, width), filters, shrink, patch, grid)
