"""MOON's SimpleCNN. Li, He and Song (2021), "Model-Contrastive Federated Learning", section 4.1."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fl_core.models.split_model import SplitModel, assemble
from fl_core.models.validation import image_shape
from fl_core.types.records import Schema

FEATURES = 84


@dataclass(frozen=True, slots=True)
class SimpleCnn:
    """conv5x5(cin,6)-ReLU-pool2-conv5x5(6,16)-ReLU-pool2-FC(400,120)-ReLU-FC(120,84)-ReLU-[projection]-head.

    FC(256,120) instead on 28x28 images. No normalisation. projection (84, 256) is FedCD's extractor.
    """

    projection: tuple[int, ...] = ()
    head_bias: bool = True

    def build(self, schema: Schema) -> SplitModel:
        """Make the model; raises ConfigError (E-CFG-23) unless images are 28x28 or 32x32 with 1 or 3 channels."""
        channels, side = image_shape("simple_cnn", schema, channels={1, 3}, sizes={28, 32})
        left = ((side - 4) // 2 - 4) // 2
        body = nn.Sequential(
            nn.Conv2d(channels, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * left * left, 120),
            nn.ReLU(),
            nn.Linear(120, FEATURES),
            nn.ReLU(),
        )
        return assemble(body, FEATURES, self.projection, len(schema.classes), head_bias=self.head_bias)
