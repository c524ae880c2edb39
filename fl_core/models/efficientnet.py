"""EfficientNet-B0 on any input size. Tan and Le (2019), built from torchvision's blocks.

FedMR on skin lesions: features 1280 - dropout - Linear(1280, 640) - Linear(640, 8); FedGELA: projection (84,).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fl_core import validate
from fl_core.models.efficientnet_lite import STAGES
from fl_core.models.pretrained import PublishedNames
from fl_core.models.split_model import HeadOptions, SplitModel, image_shape
from fl_core.types.records import Schema

FEATURES = 1280


@dataclass(frozen=True, slots=True)
class EfficientNetB0(HeadOptions):
    """torchvision's EfficientNet-B0 features, dropout, a projection and a linear head.

    weights:    "none": the weights that a run begins with are no option of its model, but in the manifest's start.
    norm:       "batch"; "group" (gcd(groups, channels) groups), to train from scratch without mixing examples;
                "frozen": BatchNorm with fixed statistics and scale, for pretrained weights without mixing examples.
    dropout:    before the projection.   stochastic_depth: of the last block, rising linearly from 0.
    """

    weights: str = "none"
    norm: str = "batch"
    groups: int = 32
    projection: tuple[int, ...] = (640,)
    dropout: float = 0.2
    stochastic_depth: float = 0.2

    def build(self, schema: Schema) -> SplitModel:
        validate.one_of("E-CFG-02", "efficientnet_b0", ("none",), weights=self.weights)
        validate.one_of("E-CFG-02", "efficientnet_b0", ("batch", "group", "frozen"), norm=self.norm)
        validate.between("E-CFG-02", "efficientnet_b0", 1, 320, groups=self.groups)
        validate.between("E-CFG-02", "efficientnet_b0", 0, 0.99, dropout=self.dropout)
        validate.between("E-CFG-02", "efficientnet_b0", 0, 0.99, stochastic_depth=self.stochastic_depth)
        image_shape("efficientnet_b0", schema, channels={3}, sizes=range(32, 2049))
        from fl_core.models.mbconv import b0_features  # torchvision takes seconds to import: only for those who use it

        features = b0_features(self.norm, self.groups, self.stochastic_depth)
        body = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(self.dropout))
        return self.complete(body, FEATURES, schema)

    def published_names(self) -> tuple[PublishedNames, ...]:
        """Return torchvision's names, and timm's of efficientnet_b0.

        timm's tf_efficientnet_b0 has the same names, but pads and normalises otherwise: its features would be wrong.
        """
        timm = {"conv_stem.": "0.0.", "bn1.": "0.1.", "conv_head.": "8.0.", "bn2.": "8.1."}
        for stage, (*_, layers) in enumerate(STAGES):
            parts = ("conv_pw", "conv_dw", "se", "conv_pwl") if stage else ("conv_dw", "se", "conv_pw")
            convolutions = [part for part in parts if part != "se"]
            for layer in range(layers):
                theirs, ours = f"blocks.{stage}.{layer}", f"{stage + 1}.{layer}.block"
                for k, part in enumerate(convolutions, start=1):
                    place = f"{ours}.{parts.index(part)}"
                    timm |= {f"{theirs}.{part}.": f"{place}.0.", f"{theirs}.bn{k}.": f"{place}.1."}
                squeeze = f"{ours}.{parts.index('se')}"
                timm |= {f"{theirs}.se.conv_reduce.": f"{squeeze}.fc1.", f"{theirs}.se.conv_expand.": f"{squeeze}.fc2."}
        prefixes = {theirs: f"body.0.{ours}" for theirs, ours in timm.items()}
        return tuple(PublishedNames(names, ("classifier.",)) for names in ({"features.": "body.0."}, prefixes))
