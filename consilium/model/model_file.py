"""A file of an exported model: safetensors, whose header has all that it takes to build the model again.

No code in a file is run. It is checked against its card, which names the SHA-256 of its bytes: another file under the
same name is refused. Whoever replaces both is found by the card's own signature alone, where it has one.
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
"""Of the header's metadata, under which the facts stand as JSON."""
CARD_SUFFIX = ".md"
_MAX_CARD_BYTES = 16 << 20
_MAX_CLASSES, _MAX_NUMBERS, _MAX_NAME_CHARS = 10_000, 1 << 26, 200
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-4, 1e4
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFileFacts:
    """What a model's file says of itself.

    run: its id, empty in a simulation   data: the name of the data set that it was trained on, which decides how images
    are prepared   frozen: whether a body was left as the run began with it   multi_label: whether classes are labels,
    of which an example may have several   temperature: what logits are divided by before they become probabilities, as
    the hospitals' counts suggested it at export; None where nothing did   untaught: classes that nothing taught
    it, as far as the run knows.
    Raises ConfigError (E-CFG-02) on what no model has.
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
                "E-CFG-02", f"expected a model of format {FORMAT}, found {self.format}: use the version that wrote it"
            )
        names = self.classes
        if not 2 <= len(names) <= _MAX_CLASSES or len(set(names)) != len(names) or not all(map(_is_name, names)):
            raise ConfigError(
                "E-CFG-02", f"expected 2 to {_MAX_CLASSES} classes of different names, found {len(names)}: export again"
            )
        if not self.shape or not all(n > 0 for n in self.shape) or math.prod(self.shape) > _MAX_NUMBERS:
            raise ConfigError("E-CFG-02", f"expected the shape of an example, found {self.shape[:8]}: export again")
        if not set(self.untaught) <= set(names):
            raise ConfigError("E-CFG-02", "expected untaught classes among the classes, found others: export again")
        if self.columns:
            check_columns(self.columns)
            if self.shape != (width(self.columns),):
                raise ConfigError("E-CFG-02", "expected examples as wide as their columns, found others: export again")
        if self.temperature is not None and not _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE:
            raise ConfigError("E-CFG-02", f"expected a temperature above 0, found {self.temperature}: export again")

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
        """Return the metadata of a safetensors file."""
        raw = asdict(self)
        if not self.untaught:  # 0.1.0 reads such files
            del raw["untaught"]
        return {KEY: json.dumps(raw, sort_keys=True)}


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _MAX_NAME_CHARS


@dataclass(frozen=True, eq=False, slots=True)
class LoadedModel:
    """A model that was built again, in evaluation mode. sha256: of its file.

    body, head: what it is made of, so that features cost nothing beside logits; of a model that is not in these parts
    the body does nothing.
    """

    facts: ModelFileFacts
    sha256: str
    body: nn.Module
    head: nn.Module

    def answers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (B, d) and logits (B, C) of examples (B, *shape); logits for features where it has none."""
        with torch.no_grad():
            z = self.body(x)
            logits: Tensor = self.head(z)
            features = getattr(self.head, "features", None)
            values: Tensor = logits if features is None else features(z)
        return values, logits


def card_beside(file: Path) -> Path:
    return file.with_suffix(CARD_SUFFIX)


def load(file: Path, card: Path | None = None, sha256: str | None = None) -> LoadedModel:
    """Read a model; card: that names it, by default the one beside it   sha256: of the file, in place of a card.

    Raises StateError (E-STATE-22) on a file that its card does not name, or that is no model of an export by this
    version; ConfigError on one whose method, model or extension is not here (E-CFG-01, E-CFG-08), or that the memory
    does not hold (RefusedError, E-RUN-38).
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
            "E-STATE-22", f"expected SHA-256 {sha256[:16]} of {file}, found {content.sha256[:16]}: fetch it again"
        )
    try:
        facts = structure(ModelFileFacts, content.facts, "")
    except (ConversionError, ConfigError) as error:
        message = error.message if isinstance(error, ConfigError) else str(error)
        raise StateError(
            "E-STATE-22", f"expected a model file of this version in {file}, found: {message}. Export it again"
        ) from error
    return assembled(facts, content.tensors, content.sha256)


def assembled(facts: ModelFileFacts, tensors: Tensors, sha256: str) -> LoadedModel:
    """Build a model again; sha256: of its file. Raises as `build`."""
    return LoadedModel(facts, sha256, *_in_parts(build(facts, tensors)))


def _require_named(sha256: str, file: Path, card: Path) -> None:
    try:
        if card.stat().st_size > _MAX_CARD_BYTES:
            raise StateError("E-STATE-22", f"expected a model card of at most {_MAX_CARD_BYTES} bytes in {card}")
        text = card.read_bytes()
    except OSError as error:
        raise StateError(
            "E-STATE-22",
            f"expected the card of {file.name} at {card}, found {error.strerror}: keep both together, or name it with "
            "--card",
        ) from error
    if sha256.encode() not in _DIGEST.findall(text):
        raise StateError(
            "E-STATE-22",
            f"expected {card} to name the SHA-256 of {file} ({sha256[:16]}...), found that it does not: this card "
            "is of another file; fetch both again, or export again",
        )


def build(facts: ModelFileFacts, tensors: Tensors) -> nn.Module:
    """Build the evaluated model from what `RunSetup.exported` chose.

    It is built as the method's global model before round 1; then every tensor is overwritten.
    Raises StateError (E-STATE-22) unless tensors are exactly those of the model, and numbers that one can have.
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
    """Divide a model into its body and the rest, which it then is of the body's output."""
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
        raise StateError("E-STATE-22", f"expected the tensors of the model that the file names, found {unfit}")
    tensor_maps.load_state(module, tensors)
