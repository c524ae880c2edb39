"""A linear classifier of 8x8 digits, in so few numbers that the noise of differential privacy stays below the signal.

The noise that a private step adds has a length that grows with the root of the number of trained numbers, and hospitals
of a few hundred images cannot average it away (Tramer and Boneh, "Differentially Private Learning Needs Better Features
(or Much More Data)", ICLR 2021). So features are fixed, the pixels themselves, and what is trained is a thin linear
projection, which is the layer that FedMR shapes, and the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fl_core.models.split_model import SplitModel, assemble
from fl_core.models.validation import image_shape
from fl_core.types.records import Schema

PIXELS = 64


@dataclass(frozen=True, slots=True)
class DigitsLinear:
    """Pixels at mean 0 and variance 1 in each image - Linear(64, 16) - head: 1,210 parameters with 10 classes.

    projection: widths of the linear layers before the head, ReLU between them; none is softmax regression.
    """

    projection: tuple[int, ...] = (16,)
    head_bias: bool = True

    def build(self, schema: Schema) -> SplitModel:
        """Make the model; raises ConfigError (E-CFG-23) on anything but 1x8x8."""
        image_shape("digits_linear", schema, channels={1}, sizes={8})
        body = nn.Sequential(nn.Flatten(), nn.LayerNorm(PIXELS, elementwise_affine=False))
        return assemble(body, PIXELS, self.projection, len(schema.classes), head_bias=self.head_bias)
