"""The file of an exported model: safetensors with a header from which the model is rebuilt.

Loading runs no code from the file. The model card names the SHA-256 of the file, so a different file under the same
name is refused. If both are replaced, only the card's signature shows it, and only if the card is signed.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_core.converter import ConversionError, Option, structure
from fl_core.datasets.preprocessing import Preprocessing
from fl_core.errors import ConfigError, StateError
from fl_core.extensions import registry
from fl_core.extensions.registry import Extension
from fl_core.methods import build_written
from fl_core.models import build_model, pretrained
from fl_core.models.split_model import SplitModel, behind_body, on_body
from fl_core.rounds.manifest import RunManifest
from fl_core.types import tensor_maps
from fl_core.types.columns import Column, check_columns, width
from fl_core.types.records import FEATURES, Schema
from fl_core.types.values import RoundContext, Tensors

FORMAT = 1
KEY = "consilium"
"""Key in the header's metadata; its value is the facts as JSON."""
CARD_SUFFIX = ".md"
_MAX_CARD_BYTES = 16 << 20
_MAX_CLASSES, _MAX_NUMBERS, _MAX_NAME_CHARS = 10_000, 1 << 26, 200
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-4, 1e4
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFileFacts:
    """Facts in the header of a model file.

    run: the run's id, empty for a simulation   data: name of the training data set, which determines how images are
    prepared   frozen: whether the body was not trained   multi_label: whether an example may have several of the
    classes   temperature: logits are divided by it; estimated at export from the hospitals' counts, None without an
    estimate   untaught: classes without training examples, as far as the run knows.
    Raises ConfigError (E-CFG-02) on values that no model can have.
    """

    method: str
    model: str
    data: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    manifest_digest: str
    model_digest: str
    run: str = ""
    method_options: Mapping[str, Option] = field(default_factory=dict)
    model_options: Mapping[str, Option] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    window: tuple[float, float] | None = None
    frozen: bool = False
    multi_label: bool = False
    extensions: tuple[Extension, ...] = ()
    temperature: float | None = None
    untaught: tuple[str, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(
                "E-CFG-02", f"expected model format {FORMAT}, found {self.format}: use the version that wrote the file"
            )
        names = self.classes
        if not 2 <= len(names) <= _MAX_CLASSES or len(set(names)) != len(names) or not all(map(_is_name, names)):
            raise ConfigError(
                "E-CFG-02",
                f"expected 2 to {_MAX_CLASSES} classes with different names of 1 to {_MAX_NAME_CHARS} characters, "
                f"found {len(names)} classes ({len(set(names))} different names): export again",
            )
        if not self.shape or not all(n > 0 for n in self.shape) or math.prod(self.shape) > _MAX_NUMBERS:
            raise ConfigError(
                "E-CFG-02",
                f"expected an example shape of positive sizes with at most {_MAX_NUMBERS} numbers, found "
                f"{self.shape[:8]}: export again",
            )
        if others := sorted(set(self.untaught) - set(names)):
            raise ConfigError(
                "E-CFG-02", f"expected untaught classes to be classes of the model, found {others[:3]}: export again"
            )
        if self.columns:
            check_columns(self.columns)
            if self.shape != (width(self.columns),):
                raise ConfigError(
                    "E-CFG-02",
                    f"expected the example shape ({width(self.columns)},) of the columns, found {self.shape[:8]}: "
                    "export again",
                )
        if self.temperature is not None and not _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE:
            raise ConfigError(
                "E-CFG-02",
                f"expected a temperature from {_MIN_TEMPERATURE:g} to {_MAX_TEMPERATURE:g}, found {self.temperature}: "
                "export again",
            )

    @property
    def schema(self) -> Schema:
        return Schema(self.shape, self.classes, self.columns, self.window, self.multi_label)

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing(self.data, self.schema)

    @classmethod
    def of(cls, manifest: RunManifest, model_digest: str, run: str = "") -> ModelFileFacts:
        schema = manifest.schema
        return cls(
            run=run,
            method=manifest.method.name,
            method_options=manifest.method.options,
            model=manifest.model.name,
            model_options=manifest.model.options,
            data=manifest.data,
            shape=tuple(schema.shape),
            classes=tuple(schema.classes),
            columns=schema.columns,
            window=schema.window,
            frozen=manifest.train.freeze == FEATURES,
            multi_label=schema.multi_label,
            extensions=manifest.extensions,
            manifest_digest=manifest.digest(),
            model_digest=model_digest,
        )

    def metadata(self) -> dict[str, str]:
        """Return the metadata for a safetensors header."""
        raw = asdict(self)
        if not self.untaught:  # 0.1.0 does not know this field
            del raw["untaught"]
        return {KEY: json.dumps(raw, sort_keys=True)}


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _MAX_NAME_CHARS


@dataclass(frozen=True, eq=False, slots=True)
class LoadedModel:
    """A model rebuilt from its file, in evaluation mode. sha256: of its file.

    body, head: the two parts, so that features and logits need one pass. If the model cannot be split, body is an
    identity and head the whole model.
    """

    facts: ModelFileFacts
    sha256: str
    body: nn.Module
    head: nn.Module

    def answers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (B, d) and logits (B, C) of examples (B, *shape); without features, the logits twice."""
        with torch.no_grad():
            z = self.body(x)
            logits: Tensor = self.head(z)
            features = getattr(self.head, "features", None)
            values: Tensor = logits if features is None else features(z)
        return values, logits


def card_beside(file: Path) -> Path:
    return file.with_suffix(CARD_SUFFIX)


def load(file: Path, card: Path | None = None, sha256: str | None = None) -> LoadedModel:
    """Read a model file. card: defaults to the one in the file's folder   sha256: of the file, instead of a card.

    Raises StateError (E-STATE-22) if the card does not name the file, or the file is no model of this version;
    ConfigError (E-CFG-01, E-CFG-08) if its method, model or extension is not installed; RefusedError (E-RUN-38) if it
    does not fit into memory.
    """
    if file.suffix != ".safetensors" or not file.is_file():
        raise ConfigError(
            "E-CFG-02", f"expected the .safetensors file that `coordinator export` wrote, found {file}: check the path"
        )
    content = pretrained.read_file(file)
    if sha256 is None:
        _require_named(content.sha256, file, card or card_beside(file))
    elif content.sha256 != sha256.lower():
        raise StateError(
            "E-STATE-22", f"expected SHA-256 {sha256[:16]} of {file}, found {content.sha256[:16]}: download it again"
        )
    try:
        facts = structure(ModelFileFacts, content.facts, "")
    except (ConversionError, ConfigError) as error:
        message = error.message if isinstance(error, ConfigError) else str(error)
        raise StateError(
            "E-STATE-22", f"expected a model file of this version at {file}, found: {message}. Export it again"
        ) from error
    return assembled(facts, content.tensors, content.sha256)


def assembled(facts: ModelFileFacts, tensors: Tensors, sha256: str) -> LoadedModel:
    """Rebuild a model. sha256: of its file. Raises as `build`."""
    return LoadedModel(facts, sha256, *_in_parts(build(facts, tensors)))


def _require_named(sha256: str, file: Path, card: Path) -> None:
    try:
        if (size := card.stat().st_size) > _MAX_CARD_BYTES:
            raise StateError(
                "E-STATE-22",
                f"expected a model card of at most {_MAX_CARD_BYTES} bytes at {card}, found {size}: name the right "
                "card with --card",
            )
        text = card.read_bytes()
    except OSError as error:
        raise StateError(
            "E-STATE-22",
            f"expected the card of {file.name} at {card}, found {error.strerror}: keep both files together, or name "
            "the card with --card",
        ) from error
    if sha256.encode() not in _DIGEST.findall(text):
        raise StateError(
            "E-STATE-22",
            f"{card} does not name the SHA-256 of {file} ({sha256[:16]}...): this card belongs to another file; "
            "download both again, or export again",
        )


def build(facts: ModelFileFacts, tensors: Tensors) -> nn.Module:
    """Build the evaluated model from the tensors that `RunSetup.exported` returns.

    Creates the method's global model as before round 1, then overwrites every tensor.
    Raises StateError (E-STATE-22) unless names, shapes and values of the tensors fit the model.
    """
    registry.require_same(facts.method, facts.model, facts.extensions)
    model = build_model(facts.model, facts.model_options, facts.schema, 0)
    method, context = build_written(facts.method, facts.method_options), RoundContext(1, len(facts.classes), cohort=1)
    body = copy.deepcopy(model.body) if facts.frozen else None
    trained = behind_body(model, facts.model) if facts.frozen else model
    empty = method.broadcast(method.init_server(copy.deepcopy(trained), context))
    network = method.global_model(trained, empty)
    if body is not None:
        _fill(body, {n.removeprefix("body."): v for n, v in tensors.items() if n.startswith("body.")})
        tensors = tensor_maps.select(tensors, lambda name: not name.startswith("body."))
        network = on_body(body, network)
        _fill(network.classifier, tensors)  # type: ignore[arg-type]
    else:
        _fill(network, tensors)
    return network.eval().requires_grad_(False)


def _in_parts(network: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split a model into its body and the rest. Changes the model: its body becomes an identity."""
    if isinstance(network, nn.Sequential):  # on a frozen body
        return network.body, network.classifier  # type: ignore[return-value]
    own_pass = isinstance(network, SplitModel) and (
        type(network).forward is not SplitModel.forward or type(network).features is not SplitModel.features
    )
    body = getattr(network, "body", None)
    if own_pass or not isinstance(body, nn.Module):
        return nn.Identity(), network
    network.body = nn.Identity()
    return body, network


def _fill(module: nn.Module, tensors: Tensors) -> None:
    wanted = tensor_maps.stored_state(module)
    missing = [name for name in wanted if name not in tensors]
    unfit = f"none for {missing[0]}" if missing else pretrained.problem(tensors, module) if wanted or tensors else ""
    if unfit:
        raise StateError(
            "E-STATE-22", f"expected the tensors of the model that the file names, found {unfit}: export again"
        )
    tensor_maps.load_state(module, tensors)
