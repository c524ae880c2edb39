"""EfficientNet-B0 on any input size. Tan and Le (2019), built from torchvision's blocks.

FedMR on skin lesions: features 1280 - dropout - Linear(1280, 640) - Linear(640, 8); FedGELA: projection (84,).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.models.split_model import HeadOptions, SplitModel, image_shape
from fl_core.types.records import Schema
from fl_core.types.values import Tensors

FEATURES = 1280


@dataclass(frozen=True, slots=True)
class EfficientNetB0(HeadOptions):
    """torchvision's EfficientNet-B0 features, dropout, a projection and a linear head.

    weights:    "none", or a local file with torchvision's state dict (.pth or .safetensors), whose classifier is
                left out. A silo needs no file: the first broadcast overwrites every parameter and buffer.
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
        validate.one_of("E-CFG-02", "efficientnet_b0", norm=(self.norm, ("batch", "group", "frozen")))
        validate.between("E-CFG-02", "efficientnet_b0", 1, 320, groups=self.groups)
        validate.between("E-CFG-02", "efficientnet_b0", 0, 0.99, dropout=self.dropout)
        validate.between("E-CFG-02", "efficientnet_b0", 0, 0.99, stochastic_depth=self.stochastic_depth)
        image_shape("efficientnet_b0", schema, channels={3}, sizes=range(32, 2049))
        from fl_core.models.mbconv import b0_features  # torchvision takes seconds to import: only for those who use it

        features = b0_features(self.norm, self.groups, self.stochastic_depth)
        if self.weights != "none":
            self._load(features)
        body = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(self.dropout))
        return self.complete(body, FEATURES, schema)

    def _load(self, features: nn.Module) -> None:
        """Overwrite the features by a local state dict; all of its names and shapes must fit."""
        if self.norm == "group":
            raise ConfigError(
                "E-CFG-02",
                "efficientnet_b0: pretrained weights were found together with norm=group, which throws the pretrained "
                "features away: use norm=frozen (private runs) or norm=batch, or weights=none",
            )
        given = _read_state(Path(self.weights))
        wanted = {f"features.{k}": v for k, v in features.state_dict().items()}
        wrong = [k for k, v in wanted.items() if k not in given or given[k].shape != v.shape]
        # A frozen layer counts no batches, a pretrained file does.
        extra = {k for k in given if not k.startswith("classifier.") and not k.endswith("num_batches_tracked")}
        wrong += sorted(extra - set(wanted))
        if wrong:
            raise ConfigError(
                "E-CFG-02",
                f"efficientnet_b0.weights: expected torchvision's EfficientNet-B0 in {self.weights}, found "
                f"{len(wrong)} tensors missing, unknown or of another shape ({', '.join(wrong[:3])}): give that file",
            )
        features.load_state_dict({k.removeprefix("features."): given[k] for k in wanted})


def _read_state(path: Path) -> Tensors:
    """Read a state dict of tensors without running any code it may hold."""
    if not path.is_file():
        raise ConfigError("E-CFG-02", f"expected a file of weights at {path}, found none: weights is a local path")
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # unpickling and safetensors raise types of their own; the cause is kept
        raise ConfigError("E-CFG-02", f"expected a state dict in {path}, found {error}: export it again") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ConfigError("E-CFG-02", f"expected name -> tensor in {path}, found {type(state).__name__}: export it")
    return state
