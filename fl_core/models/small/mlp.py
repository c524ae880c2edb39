"""Fully connected networks: MAP's MLPNet, FedNH's network of the spiral, small ones for digits and for tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import nn

from fl_core.errors import ConfigError
from fl_core.models.split_model import MOST_LAYERS, HeadOptions, SplitModel, image_shape
from fl_core.types.records import Schema

MOST_WIDTH = 4096


@dataclass(frozen=True, slots=True)
class MlpNet(HeadOptions):
    """784-1024-1024-128, ReLU after each; head without bias: 1,985,920 parameters with 10 classes. Source: MAP.

    Hidden weights begin as N(0, 0.01) and hidden biases as 0, as in the paper's family of networks.
    """

    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        image_shape("mlp_net", schema, channels={1}, sizes={28})
        body = nn.Sequential(nn.Flatten(), *_layers((784, 1024, 1024, 128)))
        for module in body:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)
        return self.complete(body, 128, schema)


@dataclass(frozen=True, slots=True)
class DigitsMlp(HeadOptions):
    """64-64-32, ReLU after each, on 8x8 digits: 6,570 parameters with 10 classes."""

    def build(self, schema: Schema) -> SplitModel:
        image_shape("digits_mlp", schema, channels={1}, sizes={8})
        body = nn.Sequential(nn.Flatten(), *_layers((64, 64, 32)))
        return self.complete(body, 32, schema)


@dataclass(frozen=True, slots=True)
class SpiralMlp(HeadOptions):
    """Points of the plane through 8d-4d-2d (ReLU after each) to d, linear; head without bias.

    width: d; 2 lets features be drawn. 240 parameters with width 2 and 5 classes. Source: FedNH's motivating examples.
    """

    width: int = 2
    head_bias: bool = False

    def build(self, schema: Schema) -> SplitModel:
        if self.width < 1:
            raise ConfigError("E-CFG-02", f"spiral_mlp.width: expected at least 1, found {self.width}: raise it")
        if prod(schema.shape) != 2 or len(schema.classes) < 2:
            raise ConfigError(
                "E-CFG-23",
                f"spiral_mlp takes points of 2 numbers in 2 or more classes, found {schema}: use data=spiral",
            )
        d = self.width
        body = nn.Sequential(nn.Flatten(), *_layers((2, 8 * d, 4 * d, 2 * d)), nn.Linear(2 * d, d))
        return self.complete(body, d, schema)


@dataclass(frozen=True, slots=True)
class TableMlp(HeadOptions):
    """Rows of a table, whose numbers lie in [-1, 1], through hidden layers with ReLU after each.

    hidden: their widths; 64 and 32 suit tables of tens of columns and thousands of rows. Without normalisation layers,
    so that every profile trains it: the declared ranges have scaled the inputs.
    """

    hidden: tuple[int, ...] = (64, 32)

    def build(self, schema: Schema) -> SplitModel:
        if not 1 <= len(self.hidden) <= MOST_LAYERS or not all(1 <= w <= MOST_WIDTH for w in self.hidden):
            raise ConfigError(
                "E-CFG-02",
                f"table_mlp.hidden: expected 1 to {MOST_LAYERS} widths from 1 to {MOST_WIDTH}, found "
                f"{list(self.hidden)[:MOST_LAYERS]}: change it",
            )
        if len(schema.shape) != 1 or len(schema.classes) < 2:
            raise ConfigError(
                "E-CFG-23",
                f"table_mlp takes rows of numbers in 2 or more classes, found {schema.shape}: use data=table",
            )
        body = nn.Sequential(*_layers((schema.shape[0], *self.hidden)))
        return self.complete(body, self.hidden[-1], schema)


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    return [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]
