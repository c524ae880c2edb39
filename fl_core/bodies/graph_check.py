"""Check of ONNX graphs: only floating-point values may depend on the image.

The check reads the bytes of the file, part by part, before any library parses it. The operators are those of image
encoders. No shape, index, axis or whole number may be computed from the image. So memory, time and failure of a graph
are the same for every image: a probe shows them, and no graph can reveal an image by failing.

Field numbers are those of onnx.proto3 (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_BYTES = (2 << 30) - (1 << 20)
"""Protobuf's limit for one message, and room for what stands around it in an object of a run."""
MAX_PARTS = 2_000_000
"""Fields that are read: names, nodes, attributes, tensors. A ViT-L has some 30,000."""
OURS = "consilium."
"""Prefix of the metadata that are read."""
_SHOWN, _MAX_TEXT, _MAX_DIMS = 60, 4096, 64
_FLOAT, _FLOATS, _BOOL = 1, (1, 10, 11, 16), 9
_FREE = 0
_ARCHIVE = b"PK\x03\x04"

_ALL_INPUTS = """
Abs Add And Attention AveragePool BatchNormalization Cast Ceil Celu Clip Concat Conv ConvTranspose Cos DepthToSpace Div
Dropout Einsum Elu Equal Erf Exp Flatten Floor Gelu Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual
GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu
Less LessOrEqual Log LogSoftmax MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mul Neg Not Or PRelu Pow
RMSNormalization Reciprocal Relu RotaryEmbedding Round Selu Shape Sigmoid Sign Sin Size Softmax Softplus Softsign
SpaceToDepth Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Transpose Where Xor
"""
_FIRST_INPUT = """
CumSum Expand Gather GatherElements GatherND Pad ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
ReduceMin ReduceProd ReduceSum ReduceSumSquare Reshape Resize Slice Split Squeeze Tile Trilu Unsqueeze Upsample
"""
_DATA: Mapping[str, tuple[int, ...] | None] = {
    **dict.fromkeys(_ALL_INPUTS.split()),
    **dict.fromkeys(_FIRST_INPUT.split(), (0,)),
    **dict.fromkeys(("Constant", "ConstantOfShape", "DequantizeLinear", "EyeLike", "Mod", "OneHot", "Range"), ()),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
}
"""Operator -> the inputs that may depend on the image; None: all."""


class GraphError(ValueError):
    """A graph is refused; the message, in ASCII, names the reason."""

    def __init__(self, text: str) -> None:
        super().__init__(text.encode("ascii", "backslashreplace").decode())


class ImageGraph(NamedTuple):
    """Names, input dimensions and metadata of a graph.

    input, output: their names   dims: of the input; 0: not fixed   metadata: entries whose names begin with `OURS`,
    without this prefix.
    """

    input: str
    output: str
    dims: tuple[int, ...]
    metadata: Mapping[str, str]


def check(graph: bytes | memoryview) -> ImageGraph:
    """Read a model file; raises GraphError if it breaks a rule."""
    if len(graph) > MAX_BYTES:
        raise GraphError(f"{len(graph)} bytes, more than {MAX_BYTES}")
    if bytes(graph[: len(_ARCHIVE)]) == _ARCHIVE:
        raise GraphError("an archive, such as torch's .pt2, which can run code when it is read: use torch.onnx.export")
    model, metadata = _Reader(), dict[str, str]()
    for number, value in model.fields(memoryview(graph)):
        if number == 7:
            model.graph(value)
        elif number == 14:
            key = _text(_last(model, value, 1))
            if key.startswith(OURS):
                metadata[key.removeprefix(OURS)] = _text(_last(model, value, 2))
        elif number in (20, 25):
            raise GraphError({20: "parts for training", 25: "functions of its own"}[number])
    return model.checked(metadata)


@dataclass(slots=True)
class _Reader:
    """Reads a graph's parts in the order of the file, and tracks the values that depend on the image."""

    parts: int = 0
    initial: set[str] = field(default_factory=set)
    inputs: dict[str, memoryview] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)

    def fields(self, data: object) -> Iterator[tuple[int, memoryview | int]]:
        """Yield the fields of a message: integers, and bytes for all other types."""
        if not isinstance(data, memoryview):
            raise GraphError("a number in place of a message")
        at, end = 0, len(data)
        while at < end:
            self.parts += 1
            if self.parts > MAX_PARTS:
                raise GraphError(f"more than {MAX_PARTS} parts")
            tag, at = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                value, at = _varint(data, at)
                yield number, value
                continue
            if wire == 2:
                size, at = _varint(data, at)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise GraphError("bytes that are not an ONNX model")
            if size > end - at:
                raise GraphError("bytes that are not an ONNX model, or a truncated file")
            yield number, data[at : at + size]
            at += size

    def graph(self, data: object) -> None:
        for number, value in self.fields(data):
            if number == 1:
                self.nodes.append(self.node(value))
            elif number == 5:
                self.initial.add(self.tensor(value))
            elif number == 11:
                assert isinstance(value, memoryview)
                self.inputs[_text(_last(self, value, 1))] = value
            elif number == 12:
                self.outputs.append(_text(_last(self, value, 1)))
            elif number == 15:
                raise GraphError("sparse tensors")

    def node(self, data: object) -> _Node:
        node = _Node()
        for number, value in self.fields(data):
            if number == 1:
                node.inputs.append(_text(value))
            elif number == 2:
                node.outputs.append(_text(value))
            elif number == 4:
                node.kinds.append(_text(value))
            elif number == 5:
                self.attribute(node, value)
            elif number == 7:
                node.domains.append(_text(value))
        for domain in node.domains:
            if domain not in ("", "ai.onnx"):
                raise GraphError(f"the operator {node.kind!r} of the domain {domain[:_SHOWN]!r}")
        for kind in node.kinds or [""]:
            if kind not in _DATA:
                raise GraphError(f"the operator {kind[:_SHOWN]!r}")
        return node

    def attribute(self, node: _Node, data: object) -> None:
        name = ""
        for number, value in self.fields(data):
            if number == 1:
                name = _text(value)
            elif number == 3 and isinstance(value, int):
                node.numbers.setdefault(name, []).append(value)
            elif number in (5, 10):
                self.tensor(value)
            elif number in (6, 11):
                raise GraphError(f"a graph inside the operator {node.kind or name[:_SHOWN]!r}")
            elif number in (22, 23):
                raise GraphError("sparse tensors")
        node.attributes.add(name)

    def tensor(self, data: object) -> str:
        """Check a stored tensor, and return its name."""
        assert isinstance(data, memoryview)
        name, dims = "", list[int]()
        for number, value in self.fields(data):
            if number == 1:
                dims += [value] if isinstance(value, int) else _varints(value)
            elif number == 8:
                name = _text(value)
            elif number == 13 or (number == 14 and value != 0):
                raise GraphError("weights in other files")
            elif number == 6:
                raise GraphError("tensors of text")
        if len(dims) > _MAX_DIMS or any(n >= 1 << 62 for n in dims) or math.prod(dims) > 2 * len(data):
            raise GraphError(f"the tensor {name[:_SHOWN]!r} of {dims[:8]} numbers, which are not in the file")
        return name

    def checked(self, metadata: Mapping[str, str]) -> ImageGraph:
        images = [name for name in self.inputs if name not in self.initial]
        if len(images) != 1 or len(self.outputs) != 1:
            raise GraphError(f"{len(images)} inputs and {len(self.outputs)} outputs, not one image and one output")
        (image,) = images
        self._follow(image)
        return ImageGraph(image, self.outputs[0], self._dims(self.inputs[image]), metadata)

    def _follow(self, image: str) -> None:
        made, tainted = {image, *self.initial}, {image}
        for node in self.nodes:
            if missing := [name for name in node.inputs if name and name not in made]:
                raise GraphError(f"the value {missing[0][:_SHOWN]!r}, which is used before it is computed")
            from_image = [place for place, name in enumerate(node.inputs) if name in tainted]
            self._require_numbers(node, from_image)
            for name in filter(None, node.outputs):
                if name in made:
                    raise GraphError(f"the value {name[:_SHOWN]!r}, which is computed twice")
                made.add(name)
                if from_image and node.kind not in ("Shape", "Size"):
                    tainted.add(name)
        if self.outputs[0] not in tainted:
            raise GraphError("an output that does not depend on the image")

    def _require_numbers(self, node: _Node, from_image: list[int]) -> None:
        """Raise GraphError if a node computes a shape, an index or a whole number from the image."""
        may = _DATA[node.kind]
        wrong = bool(from_image) and may is not None and not set(from_image) <= set(may)
        if node.kind == "Cast" and from_image:
            wrong = any(to not in (*_FLOATS, _BOOL) for to in node.numbers.get("to", []))
        if node.kind == "Pow":
            wrong = from_image == [1]
        if node.kind == "Where":
            wrong = from_image == [0]
        if node.kind == "MaxPool" and len(node.outputs) > 1:
            wrong = bool(from_image)
        if node.kind == "Dropout":
            wrong = len([name for name in node.inputs if name]) > 2
        if wrong:
            raise GraphError(f"the operator {node.kind} with a shape, an index or a choice that depends on the image")

    def _dims(self, value_info: memoryview) -> tuple[int, ...]:
        dims, kinds = list[int](), list[object]()
        for _, kind in self._of(value_info, 2):
            for number, tensor in self.fields(kind):
                if number != 1:
                    raise GraphError("an input that is not a tensor")
                kinds += [value for _, value in self._of(tensor, 1)]
                for _, shape in self._of(tensor, 2):
                    for _, dim in self._of(shape, 1):
                        sizes = [value for _, value in self._of(dim, 1)]
                        dims.append(sizes[-1] if sizes and isinstance(sizes[-1], int) else _FREE)
        if kinds != [_FLOAT] or len(dims) != 4 or any(n >= 1 << 31 for n in dims):
            raise GraphError("an input that is not an image: float32 of four dimensions")
        return tuple(dims)

    def _of(self, data: object, number: int) -> Iterator[tuple[int, memoryview | int]]:
        return ((n, value) for n, value in self.fields(data) if n == number)


@dataclass(slots=True)
class _Node:
    """kinds, domains, numbers: every one that the file has, though a reader takes the last."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    numbers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.kinds[-1][:_SHOWN] if self.kinds else ""


def _last(reader: _Reader, data: object, number: int) -> object:
    values = [value for n, value in reader.fields(data) if n == number]
    return values[-1] if values else memoryview(b"")


def _text(value: object) -> str:
    if not isinstance(value, memoryview) or len(value) > _MAX_TEXT:
        raise GraphError("a name that is not text, or a long one")
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise GraphError("a name that is not text") from error


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise GraphError("bytes that are not an ONNX model, or a truncated file")
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise GraphError("bytes that are not an ONNX model")


def _varints(data: memoryview) -> list[int]:
    values, at = list[int](), 0
    while at < len(data) and len(values) <= _MAX_DIMS:
        value, at = _varint(data, at)
        values.append(value)
    return values
