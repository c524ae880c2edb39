"""The common form of all models: body, projection, head. Methods use these parts, never the architecture."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast, get_args

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.tensors import Tensor, nn, torch
from fl_core.types import tensor_maps
from fl_core.types.records import Schema
from fl_core.types.values import Tensors

MAX_LAYERS = 16
"""Most layers of a projection: each is a module, which takes time even without parameters."""
HIDDEN = 256
"""Units between the two layers of `adapter=mlp`."""
Adapter = Literal["none", "linear", "mlp"]


class SplitModel(nn.Module):
    """Classify in two steps: `features` makes z (B, d), the input of the head; the head makes logits (B, C).

    body:       x (B, *shape) -> (B, d0)
    projection: (B, d0) -> (B, d); `nn.Identity` when there is none
    head:       (B, d) -> (B, C)

    Guarantees: `forward` equals head(features); no module works in place on its input, so that hooks which keep
    activations (per-example gradients) can be put on any layer.
    """

    def __init__(
        self, body: nn.Module, projection: nn.Module, head: nn.Module, feature_dim: int, n_classes: int
    ) -> None:
        super().__init__()
        self.body = body
        self.projection = projection
        self.head = head
        self.feature_dim = feature_dim
        self.n_classes = n_classes

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head (B, d)."""
        z: Tensor = self.projection(self.body(x))
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits

    @property
    def has_batch_norm(self) -> bool:
        """Tell whether any layer normalises by batch statistics: such a layer mixes the examples of a batch."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.modules())


def assemble(
    body: nn.Module, body_dim: int, projection: Sequence[int], n_classes: int, *, head_bias: bool
) -> SplitModel:
    """Put a linear projection of these widths (ReLU between, none after) and a linear head on a body.

    No width: no projection. One: FedMR's Linear(1280, 640), FedGELA's Linear(512, 84). Two: FedCD's
    Linear(84, 84)-ReLU-Linear(84, 256).
    """
    if len(projection) > MAX_LAYERS:
        raise ConfigError(
            "E-CFG-02", f"model.projection: expected at most {MAX_LAYERS} widths, found {len(projection)}: use fewer"
        )
    for width in projection:
        validate.at_least("E-CFG-02", "model", 1, projection=width)
    layers: list[nn.Module] = []
    dim = body_dim
    for width in projection:
        layers += [nn.ReLU()] if layers else []
        layers.append(nn.Linear(dim, width))
        dim = width
    between = nn.Sequential(*layers) if layers else nn.Identity()
    return SplitModel(body, between, nn.Linear(dim, n_classes, bias=head_bias), dim, n_classes)


class FrozenBody(nn.Module, ABC):
    """A body from a file: it cannot be trained, and each example passes alone.

    width: d0, of its features (B, d0).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @abstractmethod
    def runtime(self, shape: Sequence[int], device: torch.device) -> str:
        """Name the software that computes features here, with a digest of the features of synthetic examples."""

    @abstractmethod
    def memory(self, threads: int) -> int:
        """Return the bytes outside of torch that `threads` examples at once need."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options of every model: widths of the projection, and whether the head has a bias.

    adapter: a projection that is as wide as the body's output d0: "linear" d0 -> d0, "mlp" d0 -> 256 -> d0 with ReLU.
    """

    projection: tuple[int, ...] = ()
    head_bias: bool = True
    adapter: Adapter = "none"
    omitted_at_default: ClassVar[frozenset[str]] = frozenset({"adapter"})

    def complete(self, body: nn.Module, body_dim: int, schema: Schema) -> SplitModel:
        """Put projection and head on a body (B, body_dim); raises ConfigError (E-CFG-02) on two projections."""
        validate.one_of("E-CFG-02", "model", get_args(Adapter), adapter=self.adapter)
        widths = self.projection
        if self.adapter != "none":
            if widths:
                raise ConfigError(
                    "E-CFG-02",
                    f"model.adapter and model.projection set the same layers, found both {self.adapter} and "
                    f"{list(widths)}: leave one out",
                )
            widths = (body_dim,) if self.adapter == "linear" else (HIDDEN, body_dim)
        return assemble(body, body_dim, widths, len(schema.classes), head_bias=self.head_bias)


def kaiming(body: nn.Module) -> nn.Module:
    """Draw all convolutions' weights by He's rule (fan-out), set their biases to 0, and return `body`."""
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return body


def image_shape(owner: str, schema: Schema, *, channels: Collection[int], sizes: Collection[int]) -> tuple[int, int]:
    """Read (channels, side) off a schema of square images; raises ConfigError E-CFG-23 when the model cannot take it.

    sizes: the sides it takes, in pixels (a `range` for an open choice).
    """
    if len(schema.classes) < 2:
        raise ConfigError("E-CFG-23", f"{owner} needs at least 2 classes, found {schema.classes}: name the label space")
    shape = schema.shape
    if len(shape) == 3 and shape[0] in channels and shape[1] == shape[2] and shape[1] in sizes:
        return shape[0], shape[1]
    sides = f"{min(sizes)} to {max(sizes)}" if isinstance(sizes, range) else " or ".join(map(str, sorted(sizes)))
    wanted = f"{' or '.join(map(str, sorted(channels)))} channel(s) and a square side of {sides} pixels"
    raise ConfigError("E-CFG-23", f"{owner} takes {wanted}, found {shape}: change image_size or the model")


def frozen_copy(model: nn.Module, values: Tensors | None = None) -> SplitModel:
    """Copy a model, with `values` loaded where given, in eval mode and without gradients."""
    twin = copy.deepcopy(model)
    if values is not None:
        tensor_maps.load_state(twin, values)
    twin.requires_grad_(False)
    return cast(SplitModel, twin.eval())


def behind_body(model: SplitModel, owner: str) -> SplitModel:
    """Return projection and head alone: a model of the body's output (B, d0) under the same names, sharing tensors.

    Raises ConfigError (E-CFG-08) on a model that is more than its three parts.
    """
    if type(model).forward is not SplitModel.forward or type(model).features is not SplitModel.features:
        raise ConfigError(
            "E-CFG-08",
            f"expected a model of body, projection and head with train.freeze=features, found {owner}, which has its "
            "own forward pass: leave train.freeze out",
        )
    return SplitModel(nn.Identity(), model.projection, model.head, model.feature_dim, model.n_classes)


def on_body(body: nn.Module, trained: nn.Module) -> nn.Module:
    """Return a classifier of examples: a body, followed by a model of its output."""
    return nn.Sequential(OrderedDict(body=body, classifier=trained))


def body_rows(body: nn.Module, x: Tensor) -> Tensor:
    """Return a body's output (B, d0), in eval mode and without gradients."""
    body.eval()
    with torch.no_grad():
        z: Tensor = body(x)
    return z


class CachedFeatures(nn.Module):
    """A model whose features of one batch are known: `forward` and `features` take that batch and do not look at it.

    A loss that is made of another one then passes the batch through the body once: BatchNorm counts it once.
    """

    def __init__(self, model: nn.Module, z: Tensor) -> None:
        super().__init__()
        self.head = cast(SplitModel, model).head
        self._z = z

    def features(self, x: Tensor) -> Tensor:  # noqa: ARG002
        return self._z

    def forward(self, x: Tensor) -> Tensor:  # noqa: ARG002
        logits: Tensor = self.head(self._z)
        return logits
