"""Image encoders as ONNX files: a small ViT of torch, and graphs written node by node."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

DECLARED = "mean: [0.5, 0.4, 0.3]\nstd: [0.25, 0.5, 0.2]\nsource: made in a test\nlicence: CC0\n"
MEAN, STD = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.25, 0.5, 0.2]).view(3, 1, 1)


class Vit(nn.Module):
    """A vision transformer: (N, 3, side, side) to the class token (N, width)."""

    def __init__(self, side: int = 16, width: int = 24, patch: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(0.1 * torch.randn(1, (side // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 48, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.place
        answer: Tensor = self.norm(self.layers(tokens))[:, 0]
        return answer


def made_vit(side: int = 16, width: int = 24, seed: int = 0) -> Vit:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Vit(side, width).eval()


def exported(model: nn.Module, file: Path, side: int = 16, declared: str = DECLARED, **options: object) -> Path:
    """Export an encoder as people do, and declare its input beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"dynamo": True, "external_data": False, "verbose": False, **options}
        torch.onnx.export(model, (torch.randn(1, 3, side, side),), str(file), **settings)
    if declared:
        file.with_suffix(".yaml").write_text(declared)
    return file


def vit_file(folder: Path, name: str = "vit", side: int = 16, width: int = 24, seed: int = 0) -> Path:
    return exported(made_vit(side, width, seed), folder / f"{name}.onnx", side)


def whole(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    initial: Sequence[TensorProto] = (),
    dims: Sequence[object] = (1, 3, 16, 16),
    kind: int = TensorProto.FLOAT,
    opset: int = 17,
) -> onnx.ModelProto:
    """Write a model of the image x to the value y."""
    x, y = helper.make_tensor_value_info("x", kind, dims), helper.make_tensor_value_info("y", kind, None)
    graph = helper.make_graph(list(nodes), "graph", [x], [y], list(initial))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def node(kind: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
    """Write an operator; "-": an input that is left out."""
    places = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(kind, places, outputs.split(), **attributes)
