"""A network with one hidden layer for examples of any shape."""

import math
from dataclasses import dataclass

from torch import nn

from consilium.extending import HeadOptions, Schema, SplitModel


@dataclass(frozen=True, slots=True)
class TwoLayers(HeadOptions):
    """Flatten - Linear(pixels, hidden) - ReLU - [projection] - head."""

    hidden: int = 32

    def build(self, schema: Schema) -> SplitModel:
        body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(schema.shape), self.hidden), nn.ReLU())
        return self.complete(body, self.hidden, schema)
