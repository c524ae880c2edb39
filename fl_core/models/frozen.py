"""Frozen bodies in ONNX files, one or several side by side: DINOv2, PanDerm, any encoder.

The graph is an object of the run's start, like pretrained weights, and the model's options describe it (`BodyFacts`).
Each process that loads it checks and probes it once (`fl_core.bodies`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import numpy as np

from fl_core import validate
from fl_core.bodies import graph_check
from fl_core.bodies import probe as probing
from fl_core.bodies.graph_check import GraphError
from fl_core.converter import ConversionError, parse_json, structure
from fl_core.errors import ConfigError
from fl_core.models.split_model import FrozenBody, HeadOptions, SplitModel, image_shape
from fl_core.tensors import Tensor, nn, torch
from fl_core.training import memory
from fl_core.types.records import Schema
from fl_core.types.values import Tensors

NAME = "frozen"
MAX_BODIES, MAX_WIDTH, MAX_SIDE = 8, 1 << 16, 2048
MAX_ACTIVATIONS = 4 << 30
"""Bytes that an image may take in a graph, beyond four times the graph's own."""
Layout = Literal["nchw", "nhwc"]


@dataclass(frozen=True, slots=True)
class BodyFacts:
    """Facts about a graph and its input.

    sha256, size: of the file   width: of its features   side, channels, layout: of its images
    mean, std: per channel, taken from values in [0, 1]   data_mean, data_std: with which the run's own images were
    normalised, which is undone first; none where they were not.
    """

    sha256: str
    size: int
    width: int
    side: int
    channels: int
    layout: Layout
    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_mean: tuple[float, ...] = ()
    data_std: tuple[float, ...] = ()

    @classmethod
    def read(cls, text: str) -> tuple[Self, ...]:
        """Read what `write` wrote; raises ConfigError (E-CFG-02) on anything else."""
        try:
            bodies = structure(_Bodies, {"bodies": parse_json(text)}, "model.body").bodies
        except ConversionError as error:
            raise ConfigError(
                "E-CFG-02", f"{error}: write model.body=FILE.onnx, which `coordinator run` and `simulate` read"
            ) from error
        validate.between("E-CFG-02", "model.body", 1, MAX_BODIES, bodies=len(bodies))
        for body in bodies:
            body.require_possible()
        return cast(tuple[Self, ...], bodies)

    @staticmethod
    def write(bodies: Sequence[BodyFacts]) -> str:
        return json.dumps([asdict(body) for body in bodies], sort_keys=True, separators=(",", ":"))

    def require_possible(self) -> None:
        """Raise ConfigError (E-CFG-02) on facts that no body has."""
        validate.between("E-CFG-02", "model.body", 1, graph_check.MAX_BYTES, size=self.size)
        validate.between("E-CFG-02", "model.body", 1, MAX_WIDTH, width=self.width)
        validate.between("E-CFG-02", "model.body", 1, MAX_SIDE, side=self.side)
        numbers = (*self.mean, *self.std, *self.data_mean, *self.data_std)
        if (
            self.channels not in (1, 3)
            or len(self.mean) != self.channels
            or len(self.std) != self.channels
            or len(self.data_mean) != len(self.data_std)
            or not all(abs(n) <= 1e6 for n in numbers)
            or not all(n >= 1e-6 for n in (*self.std, *self.data_std))
        ):
            raise ConfigError(
                "E-CFG-02",
                "model.body: expected 1 or 3 channels, and a mean and a deviation above 0 for each, found "
                f"{self.channels}, {self.mean[:4]} and {self.std[:4]}: correct the description next to the file",
            )

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """The shape of one image as the graph takes it."""
        n, c = self.side, self.channels
        return (1, c, n, n) if self.layout == "nchw" else (1, n, n, c)

    def prepared(self, image: Tensor) -> Tensor:
        """Return an image (1, C, S, S) of the run as the graph takes it."""
        if self.data_mean:
            image = image * _per_channel(self.data_std) + _per_channel(self.data_mean)
        if image.shape[1] < self.channels:
            image = image.expand(-1, self.channels, -1, -1)
        if image.shape[-1] != self.side:
            size = (self.side, self.side)
            image = nn.functional.interpolate(image, size, mode="bilinear", antialias=True, align_corners=False)
        image = (image - _per_channel(self.mean)) / _per_channel(self.std)
        return image if self.layout == "nchw" else image.permute(0, 2, 3, 1)

    def pooled(self, answer: Tensor) -> Tensor:
        """Return the features (1, d) of a graph's answer (1, d), or of its map, averaged over its places."""
        if answer.dim() == 4:
            answer = answer.mean((2, 3) if self.layout == "nchw" else (1, 2))
        return answer.float()


@dataclass(frozen=True, slots=True)
class _Bodies:
    bodies: tuple[BodyFacts, ...]


class Tried(NamedTuple):
    """The result of a graph's probe. memory: bytes that an image needs in it."""

    width: int
    memory: int


def tried(graph: bytes, facts: BodyFacts) -> Tried:
    """Check and try a graph that is said to be `facts`, of any width; once in a process.

    Raises GraphError on one that is refused, ConfigError (E-CFG-08) without onnxruntime.
    """
    digest = hashlib.sha256(graph).hexdigest()
    if digest != facts.sha256 or len(graph) != facts.size:
        raise GraphError(f"a graph with the SHA-256 {digest[:16]}, not {facts.sha256[:16]}")
    if (key := (digest, facts.dims, facts.layout)) not in _TRIED:
        stated = graph_check.check(graph)
        if any(size not in (0, wanted) for size, wanted in zip(stated.dims, facts.dims, strict=True)):
            raise GraphError(f"an input of shape {list(stated.dims)}, not {list(facts.dims)}")
        allowed, free = MAX_ACTIVATIONS + 4 * len(graph), memory.free_memory(memory.CPU)
        shape, used = probing.probe(graph, facts.dims, allowed if free is None else min(allowed, free))
        if len(shape) not in (2, 4) or shape[0] != 1 or math.prod(shape) > MAX_ACTIVATIONS // 4:
            raise GraphError(
                f"an output of shape {list(shape)[:8]}, not (1, features) or a map of features: export the vector alone"
            )
        width = shape[1] if len(shape) == 2 or facts.layout == "nchw" else shape[3]
        if len(_TRIED) >= MAX_BODIES:
            del _TRIED[next(iter(_TRIED))]
        _TRIED[key] = Tried(width, used)
    return _TRIED[key]


_TRIED: dict[tuple[object, ...], Tried] = {}


class Encoder(nn.Module):
    """A graph as a function of the run's images (B, C, S, S): zeros until its bytes are there.

    Its bytes follow from its facts, so that a copy is the same object.
    """

    graph: Tensor

    def __init__(self, facts: BodyFacts) -> None:
        super().__init__()
        self.facts = facts
        self.register_buffer("graph", torch.zeros(facts.size, dtype=torch.uint8))
        self._sessions: dict[str, Any] = {}

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def _apply(self, fn: object, recurse: bool = True) -> Self:  # noqa: ARG002
        return self  # bytes have no device and no other type

    def unfit(self, tensors: Tensors, prefix: str) -> str:
        """Explain why tensors are not this graph; empty if they are."""
        graph = tensors.get(f"{prefix}graph")
        try:
            if graph is None:
                return "no graph"
            if (width := tried(_bytes(graph), self.facts).width) != self.facts.width:
                return f"a graph of {width} features, not {self.facts.width}"
        except GraphError as error:
            return str(error)
        return ""

    def session(self, provider: str) -> Any:  # noqa: ANN401
        if provider not in self._sessions:
            graph = _bytes(self.graph)
            tried(graph, self.facts)
            free = memory.free_memory(torch.device("cuda")) if provider == probing.CUDA else None
            self._sessions[provider] = probing.open_session(graph, provider, (free or 0) // 2)
        return self._sessions[provider]

    def forward(self, x: Tensor) -> Tensor:
        session = self.session(_provider(x.device))
        (place,) = session.get_inputs()
        images = x.detach().float().cpu()

        def features(image: Tensor) -> Tensor:
            with torch.no_grad():
                (answer,) = session.run(None, {place.name: self.facts.prepared(image).contiguous().numpy()})
                return self.facts.pooled(torch.from_numpy(np.asarray(answer)))

        with ThreadPoolExecutor(max(1, min(len(images), torch.get_num_threads()))) as pool:
            rows = list(pool.map(features, torch.split(images, 1)))
        return torch.cat(rows).to(x.device) if rows else x.new_zeros(0, self.facts.width)


class Bodies(FrozenBody):
    """Encoders side by side: their features (B, d0), one behind the other."""

    def __init__(self, bodies: Sequence[BodyFacts]) -> None:
        super().__init__(sum(body.width for body in bodies))
        self.encoders = nn.ModuleList(map(Encoder, bodies))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([encoder(x) for encoder in self.encoders], 1)

    def runtime(self, shape: Sequence[int], device: torch.device) -> str:
        provider, version = _provider(device), probing.runtime().__version__
        x = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
        with torch.no_grad():
            answer = self(torch.from_numpy(x).to(device)).cpu().contiguous().numpy()
        return f"onnxruntime {version} {provider} {hashlib.sha256(answer.tobytes()).hexdigest()}"

    def memory(self, threads: int) -> int:
        encoders = cast(Sequence[Encoder], self.encoders)
        return threads * sum(tried(_bytes(encoder.graph), encoder.facts).memory for encoder in encoders)


def _bytes(graph: Tensor) -> bytes:
    return graph.contiguous().numpy().tobytes()


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def _provider(device: torch.device) -> str:
    """Choose the device for graphs: the run's GPU if it has one and the installed onnxruntime supports it."""
    cuda = device.type == "cuda" and probing.CUDA in probing.runtime().get_available_providers()
    return probing.CUDA if cuda else probing.CPU


@dataclass(frozen=True, slots=True)
class Frozen(HeadOptions):
    """Features of ONNX files under a linear head. body: files for the lead, `BodyFacts` in a manifest."""

    body: str = ""
    freezes: ClassVar[bool] = True

    def build(self, schema: Schema) -> SplitModel:
        bodies = BodyFacts.read(self.body)
        channels, _ = image_shape(NAME, schema, channels={1, 3}, sizes=range(1, MAX_SIDE + 1))
        for body in bodies:
            if channels > body.channels or len(body.data_mean) not in (0, channels):
                raise ConfigError(
                    "E-CFG-23",
                    f"{NAME}: expected images of {body.channels} channel(s), which its body takes, found {channels}: "
                    "use another body or other images",
                )
        made = Bodies(bodies)
        return self.complete(made, made.width, schema)
