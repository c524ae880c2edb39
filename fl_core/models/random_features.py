"""A frozen random layer under a linear head: a non-linear model whose features nobody has to train.

Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NIPS 2007, Algorithm 1. With rows of W from
N(0, I / l^2) and phases b from [0, 2 pi), inner products of sqrt(2 / D) cos(W x + b) approach exp(-|x - x'|^2 / 2 l^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from fl_core.errors import ConfigError
from fl_core.models.split_model import HeadOptions, SplitModel
from fl_core.types.records import Schema
from fl_core.validate import Positive

MAX_WIDTH = 1 << 16


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
        z = nn.functional.linear(x.flatten(1), self.weight)
        if self.kind == "relu":
            return torch.relu(z)
        return math.sqrt(2.0) * torch.cos(z + self.phase)


@dataclass(frozen=True, slots=True)
class RandomFeatures(HeadOptions):
    """Random features of the pixels, or of the columns of a table, and a linear head: the layer is never trained.

    width: D, the number of features   length: l as a multiple of sqrt(numbers of an example), so that it follows from
    the example's shape and from no data   kind: "cosine", or "relu" of W x.
    """

    width: int = 1024
    length: Positive = 0.5
    kind: Literal["cosine", "relu"] = "cosine"

    def build(self, schema: Schema) -> SplitModel:
        if not 1 <= self.width <= MAX_WIDTH or self.kind not in ("cosine", "relu") or not 0 < self.length < math.inf:
            raise ConfigError(
                "E-CFG-02",
                f"random_features: expected a width from 1 to {MAX_WIDTH}, a length above 0 and the kind cosine or "
                f"relu, found {self.width}, {self.length:g} and {self.kind[:20]!r}: change it",
            )
        inputs = prod(schema.shape)
        if not inputs or len(schema.classes) < 2:
            raise ConfigError("E-CFG-23", f"random_features needs numbers and at least 2 classes, found {schema}")
        return self.complete(
            RandomLayer(inputs, self.width, self.length * math.sqrt(inputs), self.kind), self.width, schema
        )
