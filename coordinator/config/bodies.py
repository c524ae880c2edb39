"""`model.body=FILE.onnx,...`: files of the lead with graphs become objects that a run starts from, by digest.

The input of a graph is declared next to it, in FILE.yaml or FILE.json, or in its own metadata under `consilium.`:
`mean` and `std` of each channel for values in [0, 1], `size` in pixels if the graph leaves it open, `layout` (nchw
or nhwc) if its shape leaves it open, `source` and `licence` as texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import nn

from coordinator.config.manifest_builder import schema_of
from coordinator.config.run_spec import RunSpec
from fl_core.bodies import graph_check
from fl_core.bodies.graph_check import GraphError, ImageGraph
from fl_core.converter import read_options
from fl_core.datasets.preprocessing import normalisation
from fl_core.errors import ConfigError
from fl_core.models import build_model
from fl_core.models.frozen import MAX_BODIES, NAME, BodyFacts, tried
from fl_core.types.values import Tensors

_BESIDE = (".yaml", ".yml", ".json")
_MAX_DECLARED = 64 << 10


class Taken(NamedTuple):
    """Bodies read from files: a configuration that describes them, their bytes, and the manifest's facts about them."""

    spec: RunSpec
    tensors: Tensors
    sha256: str
    source: str
    model: nn.Module


@dataclass(frozen=True, slots=True)
class _Declared:
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int = 0
    layout: str = ""
    source: str = ""
    licence: str = ""


def names_files(spec: RunSpec) -> bool:
    """Tell whether a configuration names files of bodies."""
    body = spec.model.get("body", "")
    return spec.model["name"] == NAME and bool(body) and not str(body).startswith("[{")


def take(spec: RunSpec) -> Taken:
    """Read the bodies of a configuration, check them and try each with one image.

    Raises ConfigError: E-CFG-02 on a file that is refused or not declared, E-CFG-08 without onnxruntime.
    """
    if spec.weights_file:
        raise ConfigError("E-CFG-08", "model.weights and model.body cannot be used together: leave one out")
    named = spec.model["body"]
    files = [Path(str(n)).expanduser() for n in named] if isinstance(named, list | tuple) else _split(str(named))
    if not 0 < len(files) <= MAX_BODIES:
        raise ConfigError("E-CFG-02", f"expected 1 to {MAX_BODIES} files in model.body, found {len(files)}: correct it")
    bodies, tensors, sources = list[BodyFacts](), dict[str, torch.Tensor](), list[str]()
    for place, file in enumerate(files):
        graph = _read(file)
        try:
            facts, source = _described(file, graph, graph_check.check(graph), str(spec.data["name"]))
            bodies.append(replace(facts, width=tried(graph, facts).width))
        except GraphError as error:
            raise ConfigError(
                "E-CFG-02",
                f"model.body: {file} is not an accepted image encoder ({error}): see docs/models.md for what is "
                "refused",
            ) from error
        tensors[f"body.encoders.{place}.graph"] = torch.frombuffer(bytearray(graph), dtype=torch.uint8)
        sources.append(source)
    spec = replace(spec, model={**spec.model, "body": BodyFacts.write(bodies)})
    options = {key: value for key, value in spec.model.items() if key != "name"}
    digests = [body.sha256 for body in bodies]
    sha256 = digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return Taken(
        spec, tensors, sha256, "; ".join(filter(None, sources)), build_model(NAME, options, schema_of(spec), 0)
    )


def _split(named: str) -> list[Path]:
    return [Path(name).expanduser() for name in named.split(",")]


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise ConfigError("E-CFG-02", f"there is no ONNX file at {file}: model.body must be a local path")
    if (size := file.stat().st_size) > graph_check.MAX_BYTES:
        raise ConfigError("E-CFG-02", f"{file} has {size} bytes, more than the limit of {graph_check.MAX_BYTES}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError("E-CFG-02", f"cannot read {file}: {error.strerror}") from error


def _described(file: Path, graph: bytes, stated: ImageGraph, data: str) -> tuple[BodyFacts, str]:
    declared = read_options(_Declared, f"model.body of {file.name}", _declared(file, stated.metadata))
    mean, std = normalisation(data)
    layout, (channels, side) = _image(file, stated.dims, declared)
    facts = BodyFacts(
        sha256=hashlib.sha256(graph).hexdigest(),
        size=len(graph),
        width=1,
        side=side,
        channels=channels,
        layout="nhwc" if layout == "nhwc" else "nchw",
        mean=declared.mean,
        std=declared.std,
        data_mean=tuple(mean),
        data_std=tuple(std),
    )
    facts.require_possible()
    return facts, ", ".join(filter(None, (declared.source, declared.licence)))


def _declared(file: Path, metadata: Mapping[str, str]) -> Mapping[str, object]:
    """Read the declarations in a graph's metadata and in the file next to it, which takes precedence."""
    try:
        raw: dict[str, object] = {
            key: text if key in ("source", "licence", "layout") else yaml.safe_load(text)
            for key, text in metadata.items()
            if key in _Declared.__dataclass_fields__
        }
        for beside in (file.with_suffix(suffix) for suffix in _BESIDE):
            if beside.is_file() and beside.stat().st_size <= _MAX_DECLARED:
                more = yaml.safe_load(beside.read_text(encoding="utf-8"))
                raw |= more if isinstance(more, Mapping) else {str(more): None}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            "E-CFG-02", f"the file next to {file} must be YAML or JSON, but cannot be read: {error}"
        ) from error
    if "mean" not in raw or "std" not in raw:
        raise ConfigError(
            "E-CFG-02",
            f"{file.with_suffix('.yaml')} does not declare the mean and std of {file.name}'s images: add `mean: "
            "[0.485, 0.456, 0.406]` and `std: [0.229, 0.224, 0.225]`, or the values used in training",
        )
    return raw


def _image(file: Path, dims: Sequence[int], declared: _Declared) -> tuple[str, tuple[int, int]]:
    """Choose the layout and size of a graph's images: those of its input; if it leaves them open, the declared ones."""
    channels = len(declared.mean)
    for layout, of, sides in (("nchw", dims[1], dims[2:]), ("nhwc", dims[3], dims[1:3])):
        size = declared.size or max(sides)
        fits = of in (0, channels) and all(n in (0, size) for n in sides) and dims[0] in (0, 1)
        if size and fits and declared.layout in (layout, ""):
            return layout, (channels, size)
    raise ConfigError(
        "E-CFG-02",
        f"expected one square image of {channels} channel(s) as the input of {file.name}, of one size and layout "
        f"(nchw, nhwc), found the shape {list(dims)} (0: open), the size {declared.size or 'open'} and the layout "
        f"{declared.layout[:20] or 'open'}: correct {file.with_suffix('.yaml').name}, or export it again",
    )
