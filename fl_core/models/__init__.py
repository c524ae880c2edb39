"""The registry of models: frozen dataclasses of options, built from the schema of the run's examples.

Every model is features and a head (`split_model.py`). One file per family; `small.py` has the papers' small networks.
`pretrained.py` reads weights from files, under our names and publishers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

from fl_core import rng
from fl_core.converter import Option, read_options, shown, stated
from fl_core.errors import ConfigError
from fl_core.extensions import registry
from fl_core.models.split_model import SplitModel
from fl_core.on_demand import OnDemand
from fl_core.tensors import Tensor, nn, torch
from fl_core.training import memory
from fl_core.types.records import Schema

__all__ = [
    "MODELS",
    "ModelFacts",
    "ModelOptions",
    "SplitModel",
    "build_model",
    "describe",
    "model_options",
    "stated_options",
]


_ALWAYS_FREE = 16 << 20
"""Smaller models are built without checking the free memory."""


class ModelOptions(Protocol):
    """A frozen dataclass of one architecture's options."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def build(self, schema: Schema) -> SplitModel:
        """Make the model with fresh weights from torch's global generator."""
        ...


MODELS: Mapping[str, type[ModelOptions]] = OnDemand(
    {
        "digits_cnn": "fl_core.models.small:DigitsCnn",
        "digits_mlp": "fl_core.models.small:DigitsMlp",
        "digits_linear": "fl_core.models.small:DigitsLinear",
        "simple_cnn": "fl_core.models.small:SimpleCnn",
        "conv2_cifar": "fl_core.models.small:Conv2Cifar",
        "tfcnn": "fl_core.models.small:TfCnn",
        "lenet": "fl_core.models.small:LeNet",
        "mlp_net": "fl_core.models.small:MlpNet",
        "table_mlp": "fl_core.models.small:TableMlp",
        "vgg8": "fl_core.models.small:Vgg8",
        "vgg11": "fl_core.models.small:Vgg11",
        "vgg16": "fl_core.models.small:Vgg16",
        "resnet18": "fl_core.models.resnet:ResNet18",
        "resnet50": "fl_core.models.resnet:ResNet50",
        "resnet20": "fl_core.models.resnet:ResNet20",
        "resnet56": "fl_core.models.resnet:ResNet56",
        "wrn28_10": "fl_core.models.resnet:WideResNet2810",
        "efficientnet_b0": "fl_core.models.efficientnet:EfficientNetB0",
        "efficientnet_lite0": "fl_core.models.efficientnet_lite:EfficientNetLite0",
        "efficientnet_lite2": "fl_core.models.efficientnet_lite:EfficientNetLite2",
        "char_lstm": "fl_core.models.small:CharLstm",
        "spiral_mlp": "fl_core.models.small:SpiralMlp",
        "frozen": "fl_core.models.frozen:Frozen",
        "random_features": "fl_core.models.random_features:RandomFeatures",
    }
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Numbers about a model, shown before a run.

    parameters counts trainable numbers; total_with_buffers adds every buffer, BatchNorm's counters included;
    state_bytes: what all of these take.
    """

    name: str
    feature_dim: int
    parameters: int
    total_with_buffers: int
    state_bytes: int


def model_options(name: str, options: Mapping[str, object]) -> ModelOptions:
    """Check a model's name and options; raises ConfigError (E-CFG-01, E-CFG-02) with the nearest name."""
    options_class = MODELS.get(name) or registry.loaded("model", name)
    if not isinstance(options_class, type):
        raise registry.unknown("model", name, list(MODELS))
    options_: ModelOptions = read_options(options_class, name, options)
    return options_


def stated_options(name: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Omit options that were added later and have their default, so that digests of manifests stay the same.

    Raises ConfigError as `model_options`.
    """
    return stated(type(model_options(name, options)), options)


def build_model(name: str, options: Mapping[str, object], schema: Schema, seed: int) -> SplitModel:
    """Build a model with the initial weights of this seed.

    Raises as `describe`; RefusedError (E-RUN-38), before allocating memory, if the model is larger than the free
    memory; ConfigError (E-CFG-02) on weights that cannot be read.
    Guarantees: equal seeds give equal weights; torch's global generator is not changed.
    """
    chosen = model_options(name, options)
    need = describe(name, schema, options).state_bytes
    if need > _ALWAYS_FREE:
        memory.require(need, memory.CPU, f"the model {name}", "choose a smaller one, or smaller options of it")
    with rng.torch_scope(seed, "model"):
        return chosen.build(schema)


def describe(name: str, schema: Schema, options: Mapping[str, object] | None = None) -> ModelFacts:
    """Count a model's numbers without allocating memory for them or reading files.

    Raises ConfigError: E-CFG-01, E-CFG-02 on options, E-CFG-23 on examples that it cannot take.
    """
    settings = {key: value for key, value in (options or {}).items() if key != "weights"}
    chosen = model_options(name, settings)
    try:
        # Only our own models are known to be what their options say, whenever they are built.
        count = _facts if name in MODELS else _facts.__wrapped__
        return count(name, chosen, schema, torch.get_default_dtype())  # type: ignore[arg-type]  # our own are hashable
    except ConfigError as error:
        if error.code != "E-CFG-23" or not (fitting := _fitting(schema)):
            raise
        raise ConfigError(error.code, f"{error.message}; models for these examples: {', '.join(fitting)}") from error
    except (RuntimeError, OverflowError, TypeError) as error:  # a tensor of more than 2^63 bytes
        raise ConfigError(
            "E-CFG-02", f"expected sizes that a tensor can have in {name}, found {shown(chosen)}: make them smaller"
        ) from error


def _fitting(schema: Schema) -> list[str]:
    """Name the models that take examples of a schema, with the options that they have by default."""
    fitting = []
    for name, kind in MODELS.items():
        with suppress(ConfigError):
            _facts(name, kind(), schema, torch.get_default_dtype())  # type: ignore[arg-type]  # our own are hashable
            fitting.append(name)
    return fitting


@lru_cache(maxsize=64)
def _facts(name: str, chosen: ModelOptions, schema: Schema, dtype: torch.dtype) -> ModelFacts:
    del dtype  # of the key alone: a model takes torch's own, and its bytes follow
    with torch.device("meta"), _Undrawn():
        model = chosen.build(schema)
    return ModelFacts(name, model.feature_dim, *_counts(model))


class _Undrawn(torch.overrides.TorchFunctionMode):
    """Draw no numbers: a tensor on the meta device has none, and torch imports its compiler to draw some there.

    That takes nearly as long as importing torch.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        named = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_, Tensor.uniform_, nn.init.uniform_):
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def _counts(model: nn.Module) -> tuple[int, int, int]:
    parameters, state = sum(p.numel() for p in model.parameters() if p.requires_grad), model.state_dict().values()
    return parameters, sum(v.numel() for v in state), sum(v.numel() * v.element_size() for v in state)
