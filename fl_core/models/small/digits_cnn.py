"""A small CNN for 8x8 digits: fast on one CPU core, no BatchNorm unless asked for.

GroupNorm is the default because it leaves the starting plateau soonest: after one epoch over 1,437 digits (SGD 0.01,
momentum 0.9, batches of 64) test accuracy is 0.73 and 0.69 (two seeds), against 0.09 and 0.10 without a norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fl_core import validate
from fl_core.models.split_model import SplitModel, assemble
from fl_core.models.validation import image_shape
from fl_core.types.records import Schema

FEATURES = 64


@dataclass(frozen=True, slots=True)
class DigitsCnn:
    """conv3x3(1,16)-norm-ReLU-conv3x3(16,32)-norm-ReLU-pool2-FC(512,64)-ReLU-[projection]-head, 1x8x8 images.

    norm: "group" (8 groups), "none" or "batch" after each convolution. 38,378 parameters with 10 classes and "group".
    """

    norm: str = "group"
    projection: tuple[int, ...] = ()
    head_bias: bool = True

    def build(self, schema: Schema) -> SplitModel:
        """Make the model; raises ConfigError (E-CFG-23) on anything but 1x8x8."""
        validate.one_of("E-CFG-02", "digits_cnn", norm=(self.norm, ("group", "none", "batch")))
        image_shape("digits_cnn", schema, channels={1}, sizes={8})
        body = nn.Sequential(
            *self._block(1, 16),
            *self._block(16, 32),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, FEATURES),
            nn.ReLU(),
        )
        return assemble(body, FEATURES, self.projection, len(schema.classes), head_bias=self.head_bias)

    def _block(self, before: int, after: int) -> list[nn.Module]:
        norm: list[nn.Module] = []
        if self.norm == "batch":
            norm = [nn.BatchNorm2d(after)]
        elif self.norm == "group":
            norm = [nn.GroupNorm(8, after)]
        return [nn.Conv2d(before, after, 3, padding=1), *norm, nn.ReLU()]
