"""Weights from a file: what may be in it, and how its names become those of our models.

Our own names are known, as `coordinator export` writes them, and those of publishers, whose heads are left out:
torchvision's, and those that a model says of itself (`published_names`). No code in a file is ever run: a state dict is
read by torch's `weights_only` loader.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from safetensors import SafetensorError

from fl_core.errors import ConfigError
from fl_core.tensors import Tensor, nn, torch
from fl_core.types import tensor_maps
from fl_core.types.values import Tensors

MAX_BYTES = 2 << 30
MAX_VALUE = 2.0**24
"""Of a weight: beyond it the grid on which updates are summed clips."""
_MAX_HEADER_BYTES = 16 << 20
_COUNTER = "num_batches_tracked"
_NAMED = 3
"""Tensors that a message names."""


@dataclass(frozen=True, slots=True)
class PublishedNames:
    """How a publisher names the tensors of a model.

    prefixes: the publisher's -> ours   left_out: the publisher's prefixes that are not taken   fresh: our prefixes that
    therefore begin anew. Each ends with a dot.
    """

    prefixes: Mapping[str, str]
    left_out: tuple[str, ...]
    fresh: tuple[str, ...] = ()


@runtime_checkable
class HasPublishedNames(Protocol):
    """Options of a model of which others publish weights."""

    def published_names(self) -> Sequence[PublishedNames]:
        """Return each publisher's names; empty if no publisher has this form of the model."""
        ...


@runtime_checkable
class ChecksTensors(Protocol):
    """A module that says itself whether tensors are its own."""

    def unfit(self, tensors: Tensors, prefix: str) -> str:
        """Say why the tensors whose names begin with `prefix` are not this module's; empty where they are."""
        ...


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """What was read from a file of weights. sha256: of its bytes; classes: of its head, where the file names them.

    facts: what `coordinator export` wrote beside them; as untrusted as the file.
    """

    tensors: Tensors
    sha256: str
    classes: tuple[str, ...] | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


def read_file(path: Path) -> WeightsFile:
    """Read a safetensors file or a state dict that `torch.save` wrote.

    Raises ConfigError (E-CFG-02) on anything else: no file, more than 2 GiB, pickled objects beside tensors, compressed
    parts, a damaged file.
    """
    if not path.is_file():
        raise ConfigError(
            "E-CFG-02", f"expected a file of weights at {path}, found none: model.weights is a local path"
        )
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ConfigError("E-CFG-02", f"expected at most {MAX_BYTES} bytes of weights in {path}, found {size}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError("E-CFG-02", f"expected a readable file at {path}, found {error.strerror}") from error
    facts: Mapping[str, object] = {}
    try:
        if path.suffix == ".safetensors":
            tensors, facts = _from_safetensors(raw)
        else:
            tensors = _from_torch(raw)
    except _UnsoundError as error:
        raise ConfigError("E-CFG-02", f"expected a state dict in {path}, found {error}") from error
    classes = facts.get("classes")
    named = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    stored_classes = tuple(cast(list[str], classes)) if named else None
    return WeightsFile(tensors, hashlib.sha256(raw).hexdigest(), stored_classes, facts)


class _UnsoundError(ValueError):
    pass


def _from_safetensors(raw: bytes) -> tuple[Tensors, Mapping[str, object]]:
    from safetensors.torch import load  # of a lead, who has torch

    length = int.from_bytes(raw[:8], "little")
    if length > _MAX_HEADER_BYTES:  # to parse one takes many times its length in memory
        raise _UnsoundError(f"a header of {length} bytes, more than any model needs: write it again")
    try:
        tensors = load(raw)
        header = json.loads(raw[8 : 8 + length])
        facts = json.loads(header.get("__metadata__", {}).get("consilium", "{}"))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, RecursionError, AttributeError) as error:
        raise _UnsoundError(f"a damaged safetensors file ({error}): write it again") from error
    return tensors, facts if isinstance(facts, Mapping) else {}


def _from_torch(raw: bytes) -> Tensors:
    if zipfile.is_zipfile(io.BytesIO(raw)):
        try:
            with zipfile.ZipFile(io.BytesIO(raw)) as parts:
                packed = any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist())
                size = sum(part.file_size for part in parts.infolist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:  # the last: of a newer ZIP than it reads
            raise _UnsoundError(f"a damaged file ({error}): copy or write it again") from error
        if packed or size > MAX_BYTES:
            raise _UnsoundError("compressed parts (torch.save writes none): save it again")
    try:
        tensors = torch.load(io.BytesIO(raw), "cpu", weights_only=True)
    except Exception as error:  # torch raises what its readers do
        if type(error).__name__ != "UnpicklingError":
            raise _UnsoundError(f"a damaged file ({type(error).__name__}): copy or write it again") from error
        raise _UnsoundError(
            "objects other than tensors, or a file that torch.save did not write. It can run code: save "
            "model.state_dict() alone, or convert it to safetensors"
        ) from error
    if not isinstance(tensors, dict):
        raise _UnsoundError(f"{type(tensors).__name__}, not name -> tensor: save model.state_dict()")
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise _UnsoundError(
                f"{type(value).__name__} under {str(name)[:60]!r}, which is not a tensor: save model.state_dict()"
            )
    return tensors


@dataclass(slots=True)
class _Fitting:
    """What of a file fits a model, and what does not."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def fit(file: WeightsFile, options: object, model: nn.Module, classes: Sequence[str], owner: str) -> Tensors:
    """Return what of a file's weights a model takes, as float32 under the model's names.

    The features must be there whole. A projection or a head of other shapes begins anew, and so does a head of other
    classes. options: of the model, which know torchvision's names; owner: the model's name, for messages.
    Raises ConfigError (E-CFG-02) that says which tensors are missing, unknown or of another shape, or are no numbers
    that a model can have.
    """
    wanted = tensor_maps.stored_state(model)
    own_names = any(name.startswith(("body.", "head.", "projection.")) for name in file.tensors)
    names = PublishedNames({"": ""}, (), ()) if own_names else _published(file.tensors, options, owner)
    match = _rename(file.tensors, names)
    for name in [n for n in match.tensors if n not in wanted]:
        if not name.startswith(("head.", "projection.")):
            match.wrong.append(f"{name[:80]!r} unknown")
        del match.tensors[name]
    for part in ("projection.", "head."):
        fits = all(
            n in match.tensors and match.tensors[n].shape == v.shape for n, v in wanted.items() if n.startswith(part)
        )
        if not fits or (part == "head." and file.classes != tuple(classes)):
            match.tensors = {n: v for n, v in match.tensors.items() if not n.startswith(part)}
    for name, value in wanted.items():
        if name.startswith(("projection.", "head.", *names.fresh)):
            continue
        if (tensor := match.tensors.get(name)) is None:
            match.wrong.append(f"{name} missing")
        elif tensor.shape != value.shape:
            match.wrong.append(f"{name} of shape {_short(tensor.shape)} for {_short(value.shape)}")
    if match.wrong:
        what = "the model's own names" if own_names else "published weights of it"
        raise ConfigError(
            "E-CFG-02",
            f"{owner}.weights: expected {what}, found {len(match.wrong)} tensors missing, unknown or of another "
            f"shape ({'; '.join(match.wrong[:_NAMED])}): use the file of this architecture with these options",
        )
    taken = {n: value.detach().to(wanted[n].dtype).contiguous().clone() for n, value in match.tensors.items()}
    if unfit := problem(taken, model):
        raise ConfigError("E-CFG-02", f"{owner}.weights: expected weights of a trained model, found {unfit}")
    return taken


def _published(tensors: Tensors, options: object, owner: str) -> PublishedNames:
    """Choose the publisher most of whose prefixes a file has."""
    namings = options.published_names() if isinstance(options, HasPublishedNames) else ()
    if not namings:
        raise ConfigError(
            "E-CFG-02",
            f"{owner}.weights: expected tensors under the model's own names (body..., head...), as `coordinator "
            "export` writes them, found other names: published names are supported for efficientnet_b0, "
            "efficientnet_lite0, efficientnet_lite2, resnet18 and resnet50",
        )
    if getattr(options, "norm", None) == "group":
        raise ConfigError(
            "E-CFG-02",
            f"{owner}: expected pretrained weights without norm=group, which discards the pretrained features, "
            "found both: use norm=frozen (efficientnet_b0 in private runs) or norm=batch, or weights=none",
        )
    return max(namings, key=lambda names: sum(name.startswith(tuple(names.prefixes)) for name in tensors))


def _rename(tensors: Tensors, names: PublishedNames) -> _Fitting:
    match = _Fitting()
    for name, value in tensors.items():
        if name.endswith(_COUNTER) or name.startswith(names.left_out):  # a counter is read by no forward pass
            continue
        prefix = next((p for p in names.prefixes if name.startswith(p)), None)
        if prefix is None or not (value.is_floating_point() or tensor_maps.is_graph(name, value)):
            match.wrong.append(f"{name[:80]!r} unknown")
        else:
            match.tensors[names.prefixes[prefix] + name.removeprefix(prefix)] = value
    return match


def problem(weights: Tensors, model: nn.Module) -> str:
    """Explain why weights do not fit a model; empty if they do. Names, shapes, kinds and ranges are checked.

    They may be a part of the model's, never none.
    """
    wanted = tensor_maps.stored_state(model)
    if not weights:
        return "none"
    for name, value in weights.items():
        place = wanted.get(name)
        if place is None or (place.shape, place.dtype) != (value.shape, value.dtype):
            have = "no such tensor" if place is None else f"{_short(place.shape)} of {place.dtype}"
            return f"{name[:80]!r} of shape {_short(value.shape)} and {value.dtype}, where the model has {have}"
        if tensor_maps.is_graph(name, value):
            continue
        if not bool(torch.isfinite(value).all()):
            return f"NaN or infinity in {name}"
        if value.numel() and float(value.abs().max()) > MAX_VALUE:
            return f"numbers above {MAX_VALUE:.0f} in {name}"
        if name.endswith("running_var") and value.numel() and float(value.min()) < 0:
            return f"a negative variance in {name}"
    checked = ((name, module) for name, module in model.named_modules() if isinstance(module, ChecksTensors))
    return next(filter(None, (module.unfit(weights, f"{name}." if name else "") for name, module in checked)), "")


def fresh_modules(weights: Tensors, model: nn.Module) -> tuple[str, ...]:
    """Name the modules of a model for which the weights lack some tensor."""
    missing = (name for name in tensor_maps.stored_state(model) if name not in weights)
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in missing))


def answers_numbers(model: nn.Module, shape: Sequence[int]) -> bool:
    """Tell whether a model answers random images (of other shapes: zeros) with finite numbers when it is evaluated."""
    draw: Callable[[int], Tensor] = lambda n: torch.zeros(n, *shape)  # noqa: E731
    if len(shape) == 3:
        draw = lambda n: torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))  # noqa: E731
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            return bool(torch.isfinite(model(draw(2))).all())
    finally:
        model.train(was)


def _short(shape: Sequence[int]) -> str:
    text = "x".join(map(str, shape[:8])) or "a single number"
    return f"{text}..." if len(shape) > 8 else text
