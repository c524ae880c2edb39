"""Bodies in ONNX files: the features of the network that was exported, each image alone, nothing trained."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fl_core.bodies.graph_check import GraphError
from fl_core.datasets.examples import TensorExamples
from fl_core.errors import ConfigError
from fl_core.models import SplitModel, build_model, describe, pretrained
from fl_core.models.frozen import BodyFacts, tried
from fl_core.training.frozen_features import feature_batches, trained_part
from fl_core.types import tensor_maps
from fl_core.types.records import Schema, TrainConfig
from tests.support.encoders import MEAN, STD, exported, made_vit, model_of, node, vit_file, whole
from tests.support.federations import schema

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")


def facts_of(graph: bytes, width: int = 24, side: int = 16, **more: object) -> BodyFacts:
    mean, std = tuple(MEAN.flatten().tolist()), tuple(STD.flatten().tolist())
    facts = BodyFacts(hashlib.sha256(graph).hexdigest(), len(graph), width, side, 3, "nchw", mean, std)
    return replace(facts, **more)


def body_of(*bodies: tuple[bytes, BodyFacts], shape: tuple[int, int, int] = (3, 16, 16)) -> SplitModel:
    """A model whose graphs are there."""
    model = build_model("frozen", {"body": BodyFacts.write([facts for _, facts in bodies])}, schema(shape), 0)
    graphs = {f"body.encoders.{k}.graph": as_tensor(graph) for k, (graph, _) in enumerate(bodies)}
    assert pretrained.problem(graphs, model) == ""
    tensor_maps.load_state(model, graphs)
    return model


def as_tensor(graph: bytes) -> Tensor:
    return torch.frombuffer(bytearray(graph), dtype=torch.uint8)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return vit_file(tmp_path_factory.mktemp("vit")).read_bytes()


def test_features_are_those_of_the_network_that_was_exported(vit: bytes) -> None:
    images = torch.rand(3, 3, 16, 16)
    with torch.no_grad():
        wanted = made_vit()((images - MEAN) / STD)
    assert torch.allclose(body_of((vit, facts_of(vit))).features(images), wanted, atol=1e-5)
    normalised = facts_of(vit, data_mean=(0.1, 0.2, 0.3), data_std=(0.5, 0.6, 0.7))
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    assert torch.allclose(body_of((vit, normalised)).features((images - mean) / std), wanted, atol=1e-5)


def test_images_of_another_side_and_of_one_channel_become_what_the_graph_takes(vit: bytes) -> None:
    grey = torch.rand(2, 1, 24, 24)
    wanted = nn.functional.interpolate(grey.expand(-1, 3, -1, -1), (16, 16), mode="bilinear", antialias=True)
    with torch.no_grad():
        wanted = made_vit()((wanted - MEAN) / STD)
    assert torch.allclose(body_of((vit, facts_of(vit)), shape=(1, 24, 24)).features(grey), wanted, atol=1e-5)


def test_maps_are_averaged_in_both_layouts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, images = nn.Conv2d(3, 5, 3).eval(), torch.rand(2, 3, 16, 16)
    graph = exported(network, tmp_path / "map.onnx").read_bytes()
    with torch.no_grad():
        wanted = network((images - MEAN) / STD).mean((2, 3))
    assert torch.allclose(body_of((graph, facts_of(graph, 5))).features(images), wanted, atol=1e-5)
    swapped = model_of([node("Relu", "x", "y")], dims=(1, 16, 16, 3)).SerializeToString()
    wanted = ((images - MEAN) / STD).relu().mean((2, 3))
    assert torch.allclose(body_of((swapped, facts_of(swapped, 3, layout="nhwc"))).features(images), wanted, atol=1e-6)


def test_bodies_side_by_side_have_their_own_sides_and_their_features_in_a_row(vit: bytes, tmp_path: Path) -> None:
    other = vit_file(tmp_path, side=8, width=16, seed=1).read_bytes()
    both = body_of((vit, facts_of(vit)), (other, facts_of(other, 16, 8)))
    images = torch.rand(2, 3, 16, 16)
    alone = body_of((other, facts_of(other, 16, 8))).features(images)
    assert both.feature_dim == 40
    assert torch.equal(both.features(images), torch.cat([body_of((vit, facts_of(vit))).features(images), alone], 1))


def test_an_image_has_the_same_bits_alone_in_any_batch_and_with_any_number_of_threads(vit: bytes) -> None:
    body, images = body_of((vit, facts_of(vit))).body, torch.rand(9, 3, 16, 16)
    rows, before = body(images), torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for k in range(9):
                assert torch.equal(body(images[k : k + 1])[0], rows[k])
            assert torch.equal(body(images.flip(0)).flip(0), rows)
    finally:
        torch.set_num_threads(before)


def test_a_graph_that_mixes_the_images_of_a_batch_never_sees_two() -> None:
    """Its features of a record would else depend on another record, which no privacy accounting of records bounds."""
    nodes = [node("ReduceSum", "x batch", "s", keepdims=1), node("Flatten", "s", "y")]
    graph = model_of(nodes, [whole("batch", 0)], dims=("N", 3, 16, 16)).SerializeToString()
    rows = body_of((graph, facts_of(graph, 768))).features(torch.stack([torch.zeros(3, 16, 16), torch.ones(3, 16, 16)]))
    assert torch.allclose(rows[0], ((0 - MEAN) / STD).expand(3, 16, 16).flatten())


def test_examples_pass_without_blank_ones_and_lose_only_those_without_numbers() -> None:
    nodes = [node("Log", "x", "l"), node("Flatten", "l", "y")]
    graph = model_of(nodes).SerializeToString()
    facts = facts_of(graph, 768, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    images = torch.rand(40, 3, 16, 16) + 1
    images[5] = -1.0
    examples = TensorExamples(images, torch.zeros(40, dtype=torch.long))
    batches = list(feature_batches(body_of((graph, facts)).body, examples, CPU))
    assert [batch.done for batch in batches] == [32, 40]
    assert torch.cat([batch.positions for batch in batches]).tolist() == [k for k in range(40) if k != 5]


def test_nothing_of_a_body_can_be_trained_and_a_run_that_would_is_refused(vit: bytes) -> None:
    model = body_of((vit, facts_of(vit)))
    assert {name for name, _ in model.named_parameters()} == {"head.weight", "head.bias"}
    assert not model.features(torch.rand(2, 3, 16, 16, requires_grad=True)).requires_grad
    with pytest.raises(ConfigError, match="is never trained"):
        trained_part(model, schema((3, 16, 16)), TrainConfig(freeze="none"), "frozen")
    part = trained_part(model, schema((3, 16, 16)), TrainConfig(freeze="features"), "frozen")
    assert part.schema.shape == (24,)


def test_a_copy_shares_the_graph(vit: bytes) -> None:
    model = body_of((vit, facts_of(vit)))
    twin = copy.deepcopy(model).to("cpu", torch.float64)
    assert twin.body.encoders[0].graph.data_ptr() == model.body.encoders[0].graph.data_ptr()
    assert twin.head.weight.data_ptr() != model.head.weight.data_ptr()


def test_a_body_says_what_computed_its_features(vit: bytes) -> None:
    import onnxruntime

    body = body_of((vit, facts_of(vit))).body
    said = body.runtime((3, 16, 16), CPU)
    assert said.startswith(f"onnxruntime {onnxruntime.__version__} CPUExecutionProvider ")
    assert said == body.runtime((3, 16, 16), CPU)
    assert body.memory(4) == 4 * body.memory(1) > 0


def test_facts_of_a_model_need_no_file(vit: bytes) -> None:
    facts = describe("frozen", schema((3, 16, 16)), {"body": BodyFacts.write([facts_of(vit)])})
    assert (facts.feature_dim, facts.parameters, facts.state_bytes) == (24, 250, len(vit) + 1000)


def test_another_graph_than_the_facts_name_is_refused(vit: bytes) -> None:
    model = build_model("frozen", {"body": BodyFacts.write([facts_of(vit)])}, schema((3, 16, 16)), 0)
    name = "body.encoders.0.graph"
    assert "SHA-256" in pretrained.problem({name: as_tensor(vit[:-1] + b"x")}, model)
    assert "shape" in pretrained.problem({name: as_tensor(vit[:-1])}, model)
    assert pretrained.problem({"head.bias": torch.zeros(10)}, model) == "no graph"
    wide = build_model("frozen", {"body": BodyFacts.write([facts_of(vit, 25)])}, schema((3, 16, 16)), 0)
    assert pretrained.problem({name: as_tensor(vit)}, wide) == "a graph of 24 features, not 25"
    with pytest.raises(GraphError, match="SHA-256"):  # zeros, where nobody fetched it
        model.features(torch.rand(1, 3, 16, 16))


def test_an_output_that_is_no_vector_is_refused(tmp_path: Path) -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2)

    graph = exported(Tokens(), tmp_path / "tokens.onnx").read_bytes()
    with pytest.raises(GraphError, match=r"shape \[1, 3, 256\]"):
        tried(graph, facts_of(graph))


@pytest.mark.parametrize(
    "body",
    ["", "vit.onnx", "[]", "[{}]", "{}", "[1]", "[" * 10_000, '[{"sha256":"a"}]'],
)
def test_options_that_are_no_facts_are_refused(body: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        build_model("frozen", {"body": body}, schema((3, 16, 16)), 0)


@pytest.mark.parametrize(
    "more",
    [
        {"size": 1 << 40},
        {"width": 0},
        {"side": 10**9},
        {"channels": 4},
        {"std": (0.0, 1.0, 1.0)},
        {"mean": (1.0,)},
        {"mean": (float("inf"), 0.0, 0.0)},
        {"data_std": (1.0, 1.0, 1.0)},
    ],
)
def test_impossible_facts_are_refused_before_anything_is_built(more: dict[str, object]) -> None:
    text = BodyFacts.write([facts_of(b"x", **more)])
    with pytest.raises(ConfigError):
        describe("frozen", schema((3, 16, 16)), {"body": text})


def test_colours_are_refused_by_a_body_of_grey_images() -> None:
    facts = replace(facts_of(b"x"), channels=1, mean=(0.5,), std=(0.5,))
    with pytest.raises(ConfigError, match="images of 1 channel"):
        describe("frozen", Schema((3, 16, 16), ("a", "b")), {"body": BodyFacts.write([facts])})
