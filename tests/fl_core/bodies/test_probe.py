"""A graph is tried in a process of its own: memory, time and crashes end there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fl_core.bodies import probe as probing
from fl_core.bodies.graph_check import GraphError, check
from fl_core.bodies.probe import probe
from fl_core.errors import ConfigError
from tests.support.encoders import model_of, node, vit_file, whole

pytestmark = pytest.mark.integration
MIB = 1 << 20
DIMS = (1, 3, 16, 16)


def flat(*nodes: onnx.NodeProto, initial: Sequence[onnx.TensorProto] = ()) -> bytes:
    """A graph that adds the sum of a value b to the image."""
    end = [node("ReduceSum", "b", "r", keepdims=0), node("Add", "x r", "z"), node("Flatten", "z", "y")]
    return model_of([*nodes, *end], initial).SerializeToString()


def bombs() -> dict[str, bytes]:
    big = whole("n", 1 << 36)
    image = whole("n", 1, 3, 1 << 14, 1 << 16)
    return {
        "ConstantOfShape": flat(node("ConstantOfShape", "n", "b"), initial=[big]),
        "Expand": flat(node("ReduceMax", "x", "m", keepdims=0), node("Expand", "m n", "b"), initial=[big]),
        "Tile": flat(node("Tile", "x n", "b"), initial=[whole("n", 1, 1, 1 << 10, 1 << 10)]),
        "Resize": flat(node("Resize", "x - - n", "b", mode="nearest"), initial=[image]),
        "Pad": flat(node("Pad", "x n", "b"), initial=[whole("n", 0, 0, 1 << 15, 0, 0, 0, 1 << 15, 1 << 14)]),
    }


def refused(graph: bytes, memory: int = 256 * MIB, seconds: float = 60.0) -> str:
    with pytest.raises(GraphError) as caught:
        probe(graph, DIMS, memory, seconds)
    assert str(caught.value).isascii()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["ConstantOfShape", "Expand", "Tile", "Resize", "Pad"])
def test_a_small_graph_that_asks_for_huge_tensors_ends_in_a_refusal(kind: str) -> None:
    graph = bombs()[kind]
    assert len(graph) < 1000
    check(graph)
    assert "more than 256 MiB" in refused(graph)


def test_what_a_library_would_fold_while_it_loads_is_bounded_too() -> None:
    values = [numpy_helper.from_array(np.array([k], np.float32)) for k in range(40)]
    makes = [node("ConstantOfShape", "n", f"c{k}", value=value) for k, value in enumerate(values)]
    sums = [node("Sum", " ".join(f"c{k}" for k in range(40)), "b")]
    assert "more than 256 MiB" in refused(flat(*makes, *sums, initial=[whole("n", 8 << 20)]))


def test_time_is_bounded_also_inside_one_operator() -> None:
    nodes = [node("ConstantOfShape", "n", "c"), *(node("MatMul", f"c{k or ''} c", f"c{k + 1}") for k in range(30))]
    graph = flat(*nodes, node("Identity", "c30", "b"), initial=[whole("n", 1, 3000, 3000)])
    assert "more than 2 s" in refused(graph, 1024 * MIB, 2.0)


def test_a_graph_that_does_not_fit_itself_is_refused_by_onnxruntime() -> None:
    text = refused(model_of([node("Reshape", "x n", "y")], [whole("n", 7, 7)]).SerializeToString())
    assert "onnxruntime refuses it" in text or "onnxruntime refuses" in text


def test_other_formats_of_onnxruntime_are_not_read() -> None:
    """It would take a flatbuffer for a model of its own format, which nobody checked."""
    assert "onnxruntime refuses" in refused(b"\x00\x00\x00\x00ORTM" + bytes(100))


def test_a_probe_tells_the_shape_and_the_memory(tmp_path: Path) -> None:
    shape, memory = probe(vit_file(tmp_path).read_bytes(), DIMS, 1024 * MIB)
    assert shape == (1, 24)
    assert 0 < memory < 512 * MIB
    taken = flat(node("ConstantOfShape", "n", "b"), initial=[whole("n", 32 << 20)])
    assert 128 * MIB < probe(taken, DIMS, 1024 * MIB).memory < 512 * MIB


def test_the_probe_loads_no_torch() -> None:
    code = "import fl_core.bodies.probe, sys; print('torch' in sys.modules, 'onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


def test_without_onnxruntime_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"consilium-fl\[body\]"):
        probing.probe(b"", DIMS, MIB)
