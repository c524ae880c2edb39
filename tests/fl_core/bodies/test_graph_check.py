"""Which graphs are run: refused by name, from the bytes of the file, before any library parses it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from fl_core.bodies import graph_check
from fl_core.bodies.graph_check import GraphError, check
from tests.support.encoders import exported, made_vit, model_of, node, whole

FLAT = node("Flatten", "x", "y")


def plain() -> onnx.ModelProto:
    return model_of([FLAT])


def refused(model: onnx.ModelProto | bytes) -> str:
    with pytest.raises(GraphError) as caught:
        check(model if isinstance(model, bytes) else model.SerializeToString())
    assert str(caught.value).isascii()
    return str(caught.value)


@pytest.mark.integration
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_vit_that_torch_exports_is_taken(tmp_path: Path, dynamo: bool) -> None:
    open_batch = {} if dynamo else {"dynamic_axes": {"x": {0: "N"}}}
    file = exported(made_vit(), tmp_path / "vit.onnx", dynamo=dynamo, input_names=["x"], **open_batch)
    graph = check(file.read_bytes())
    assert (graph.input, graph.dims) == ("x", (1 if dynamo else 0, 3, 16, 16))


def test_metadata_of_ours_are_read_and_no_others() -> None:
    model = plain()
    model.metadata_props.add(key="consilium.mean", value="[0.5]")
    model.metadata_props.add(key="other", value="x" * 100_000)
    assert check(model.SerializeToString()).metadata == {"mean": "[0.5]"}


def branch() -> onnx.GraphProto:
    return helper.make_graph([], "branch", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)])


@pytest.mark.parametrize("kind", ["If", "Loop", "Scan", "SequenceMap"])
def test_control_flow_is_refused_by_name(kind: str) -> None:
    text = refused(model_of([node("Greater", "x x", "b"), node(kind, "b", "y", then_branch=branch())]))
    assert kind in text


def test_a_graph_inside_an_operator_is_refused() -> None:
    assert "a graph inside the operator 'Relu'" in refused(model_of([node("Relu", "x", "y", hidden=branch())]))
    nested = model_of([node("Relu", "x", "y", hidden=[branch()])])
    assert "a graph inside the operator 'Relu'" in refused(nested)


@pytest.mark.parametrize("domain", ["com.microsoft", "org.pytorch.aten", "ai.onnx.ml", "AI.ONNX"])
def test_operators_of_other_domains_are_refused_by_name(domain: str) -> None:
    assert domain in refused(model_of([node("Gelu", "x", "y", domain=domain)]))


@pytest.mark.parametrize("kind", ["RandomNormal", "NonZero", "ArgMax", "TopK", "StringConcat", "Multinomial", "", "é"])
def test_operators_that_no_encoder_needs_are_refused_by_name(kind: str) -> None:
    assert ascii(kind)[1:-1] in refused(model_of([node(kind, "x", "y")]))


def test_functions_parts_for_training_and_sparse_tensors_are_refused() -> None:
    model = plain()
    model.functions.append(helper.make_function("d", "f", ["a"], ["b"], [node("Relu", "a", "b")], model.opset_import))
    assert "functions of its own" in refused(model)
    model = plain()
    model.training_info.add()
    assert "parts for training" in refused(model)
    model = plain()
    model.graph.sparse_initializer.add()
    assert "sparse tensors" in refused(model)


@pytest.mark.parametrize("by_location", [True, False])
def test_weights_in_other_files_are_refused(by_location: bool) -> None:
    """Also those that only have entries, as onnxruntime's own addresses in memory are written."""
    stored = numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    if by_location:
        stored.data_location = TensorProto.EXTERNAL
    else:
        stored.external_data.add(key="location", value="*/_ORT_MEM_ADDR_/*")
    assert "weights in other files" in refused(model_of([FLAT], [stored]))
    assert "weights in other files" in refused(model_of([node("Constant", "", "c", value=stored), FLAT]))


def test_a_tensor_whose_numbers_are_not_in_the_file_is_refused() -> None:
    stored = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 20, 1 << 20])
    assert "not in the file" in refused(model_of([FLAT], [stored]))
    stored = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[-1])
    assert "not in the file" in refused(model_of([FLAT], [stored]))
    stored = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1] * 65)
    assert "not in the file" in refused(model_of([FLAT], [stored]))


def test_more_than_two_gibibytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graph_check.MAX_BYTES < 2 << 30
    monkeypatch.setattr(graph_check, "MAX_BYTES", 10)
    assert "more than 10" in refused(plain())


def test_a_graph_of_millions_of_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_check, "MAX_PARTS", 20)
    assert "more than 20 parts" in refused(plain())


def test_anything_but_one_image_and_one_output_is_refused() -> None:
    two = plain()
    two.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, (1,)))
    assert "2 inputs and 1 outputs" in refused(two)
    two = plain()
    two.graph.output.append(two.graph.input[0])
    assert "1 inputs and 2 outputs" in refused(two)
    assert "not an image" in refused(model_of([FLAT], dims=(1, 768)))
    assert "not an image" in refused(model_of([FLAT], kind=TensorProto.INT64))
    assert "0 inputs" in refused(b"")
    constant = model_of([node("Constant", "", "y", value_floats=[1.0])])
    assert "does not depend on the image" in refused(constant)


FROM_IMAGE = {
    "a shape": [node("ReduceMax", "x", "m", keepdims=0), node("Cast", "m", "n", to=TensorProto.INT64)],
    "an index": [node("Cast", "x", "i", to=TensorProto.INT32), node("Gather", "x i", "y")],
    "a size": [node("Resize", "x - s", "y"), FLAT],
    "an expanded shape": [node("Reshape", "x x", "y")],
    "a division of whole numbers": [node("Where", "b one two", "n")],
    "an exponent": [node("Pow", "one x", "y")],
    "places of a maximum": [node("MaxPool", "x", "p i", kernel_shape=[2, 2])],
    "training": [node("Dropout", "x r t", "y")],
}


@pytest.mark.parametrize("what", FROM_IMAGE)
def test_no_shape_index_or_whole_number_may_follow_from_the_image(what: str) -> None:
    """So memory, time and failure are the same for every image: no graph asks whether a record is like this."""
    before = [node("Greater", "x x", "b"), node("Neg", "x", "s")]
    initial = [whole("one", 1), whole("two", 2), whole("r", 1), whole("t", 1)]
    assert "depends on the image" in refused(model_of([*before, *FROM_IMAGE[what]], initial))


def test_shapes_may_follow_from_the_shape_of_the_image() -> None:
    nodes = [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "n all", "t", axis=0)]
    check(model_of([*nodes, node("Reshape", "x t", "y")], [whole("zero", 0), whole("all", -1)]).SerializeToString())


def test_values_are_made_once_and_before_they_are_read() -> None:
    late = [node("Relu", "a", "y"), node("Relu", "x", "a")]
    assert "'a', which is used before it is computed" in refused(model_of(late))
    assert "'y', which is computed twice" in refused(model_of([FLAT, FLAT]))
    assert "'x', which is computed twice" in refused(model_of([node("Relu", "x", "x"), FLAT]))


def test_names_that_are_no_text_are_refused() -> None:
    raw = model_of([node("Flatten", "x", "y", axis=1)]).SerializeToString()
    assert "not text" in refused(raw.replace(b"Flatten", b"\xed\xa0\x80tten"))  # a surrogate
    assert "not text" in refused(model_of([node("Relu", "x", "a" * 5000), FLAT]))


def test_of_a_field_that_stands_twice_both_are_read() -> None:
    """Protobuf merges them: nothing hides behind the second."""
    bad = model_of([node("If", "x", "z")]).SerializeToString()
    assert "'If'" in refused(bad + plain().SerializeToString())
    assert "'If'" in refused(plain().SerializeToString() + bad)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damaged_files_are_refused_or_read_and_raise_nothing_else(data: st.DataObject) -> None:
    raw = bytearray(plain().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    with suppress(GraphError):
        check(bytes(raw))
