"""Runs on a body from an ONNX file of the lead's: declared beside it, sent once, the same bits as in a simulation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from consilium.model import model_file
from consilium.report.lead import export
from consilium.research.simulate import runner
from coordinator.cli import runs as lead
from coordinator.config import weights
from coordinator.config.hydra_config import compose_simulation, compose_spec, words_of
from coordinator.config.run_spec import RunSpec
from coordinator.lead.client import LeadClient
from fl_core.errors import ConfigError, FederationError, ProtocolError
from fl_core.models import build_model
from fl_core.models.frozen import BodyFacts
from fl_core.rounds.manifest import RunManifest, Weights
from privacy.compiled_run import CompiledRun
from protos.wire import codec
from tests.support import some
from tests.support.coordinator import World
from tests.support.encoders import DECLARED, exported, model_of, node, vit_file, whole
from tests.support.federation import Federation, hospitals
from tests.support.federations import schema

pytestmark = pytest.mark.integration

RUN = ["data=digits", "model=frozen", "threads=1", "train.epochs=1"]


@pytest.fixture
def people(tmp_path: Path) -> Iterator[Federation]:
    with hospitals(tmp_path) as made:
        yield made


@pytest.fixture
def world(people: Federation) -> World:
    return people.world


def words(*files: Path, more: tuple[str, ...] = ()) -> list[str]:
    return [*RUN, *more, f"model.body={','.join(map(str, files))}"]


def finished(world: World, capsys: pytest.CaptureFixture[str], said: list[str]):
    lead.run(said, home=world.home, as_json=True)
    return world.finished(json.loads(capsys.readouterr().out.splitlines()[-1])["run"])


def lite_file(folder: Path, name: str, side: int) -> Path:
    """EfficientNet-Lite with random weights, as anybody's encoder."""
    network = build_model(name, {}, schema((3, side, side)), 0).body.eval()
    file = exported(network, folder / f"secret-{name}.onnx", side)
    images = torch.rand(1, 3, side, side)
    (answer,) = onnxruntime.InferenceSession(file).run(None, {"input": images.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(answer), network(images), atol=1e-4)
    return file


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bodies", ["transformers", "EfficientNet-Lite"])
def test_one_round_on_two_bodies_is_the_same_plain_masked_and_simulated(
    people: Federation, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], bodies: str
) -> None:
    people.join("hospital0", "hospital1", "hospital2", data="digits/p3c4")
    masks = ["off", "on"]
    files = vit_file(tmp_path, "secret-a"), vit_file(tmp_path, "secret-b", side=8, width=12, seed=1)
    if bodies != "transformers":  # a thousand times the arithmetic
        masks = ["off"]
        files = lite_file(tmp_path, "efficientnet_lite0", 32), lite_file(tmp_path, "efficientnet_lite2", 40)
    said = words(*files, more=("method=analytic",))
    runs = [finished(world, capsys, [*said, f"secagg={secagg}"]) for secagg in masks]
    simulated = runner.run(compose_simulation([*said, "federation=p3c4"]))
    assert {run.model_digest for run in runs} == {simulated.model_digest}
    other = runner.run(compose_simulation([*words(files[0], more=("method=analytic",)), "federation=p3c4"]))
    assert other.model_digest != simulated.model_digest
    agreed = RunManifest.from_json(runs[0].manifest)
    assert agreed.train.freeze == "features"
    assert agreed.start == simulated.manifest.start
    assert "secret" not in runs[0].spec + runs[0].manifest
    kept = [file for site in people.hospitals.values() for file in site.home.path.rglob("*.rows")]
    assert kept
    assert all(f"onnxruntime {onnxruntime.__version__} CPUExecutionProvider".encode() in f.read_bytes() for f in kept)
    for file in files:  # a run that goes on needs no file
        file.unlink()
    lead.run(["method=fedavg", "rounds=1"], start_from=runs[0].id, home=world.home, detach=True)
    world.finished(world.server.store.runs.find("latest").id)


@pytest.mark.slow
@pytest.mark.parametrize("more", some(["method=fedavg", "method=fedgela model.adapter=linear"]))
def test_a_head_is_trained_and_the_export_is_body_and_head(
    people: Federation, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    people.join("hospital0", "hospital1", data="digits/p2c5")
    files = vit_file(tmp_path, "a"), vit_file(tmp_path, "b", side=8, width=12, seed=1)
    said = words(*files, more=("rounds=2", *more.split()))
    run = finished(world, capsys, said)
    simulated = runner.run(compose_simulation([*said, "aggregator=norm_clipped", "federation=p2c5"]))
    assert run.model_digest == simulated.model_digest
    folder = tmp_path / "models"
    export(run.id, out=folder, formats=["onnx"], home=world.home)
    with pytest.raises(ConfigError, match="use --format safetensors"):
        export(run.id, out=tmp_path / "program", formats=["torch"], home=world.home)
    loaded = model_file.load(folder / f"{run.id}.safetensors")
    session = onnxruntime.InferenceSession(folder / f"{run.id}.onnx")
    image = np.random.default_rng(0).random((1, 1, 8, 8)).astype(np.float32)
    (logits,) = session.run(["logits"], {"images": image})
    (mean, std) = (
        np.array(json.loads(session.get_modelmeta().custom_metadata_map[f"consilium.{k}"])) for k in ("mean", "std")
    )
    x = torch.from_numpy(image) if not len(mean) else torch.from_numpy((image - mean) / std).float()
    assert torch.allclose(torch.from_numpy(logits), loaded.answers(x)[1], atol=1e-4)
    card = " ".join((folder / f"{run.id}.md").read_text().split())
    digests = [body.sha256 for body in BodyFacts.read(RunManifest.from_json(run.manifest).model.options["body"])]
    assert all(digest in card for digest in digests)
    assert "made in a test, CC0; made in a test, CC0" in card


@pytest.mark.slow
def test_a_private_run_on_a_body_is_that_of_a_simulation(tmp_path: Path) -> None:
    said = words(vit_file(tmp_path), more=("method=fedavg", "privacy=dp_record", "privacy.rng=test", "rounds=1"))
    first, second = (runner.run(compose_simulation([*said, "federation=p2c5"])) for _ in range(2))
    assert first.model_digest == second.model_digest


def test_no_path_is_sent_and_the_configuration_is_a_line_of_words_again(tmp_path: Path) -> None:
    spec = compose_spec(words(vit_file(tmp_path, "secret")))
    sent, taken = weights.take(spec)
    assert "secret" not in sent.to_json()
    assert RunSpec.from_json(sent.to_json()) == sent
    assert sent.weights == taken.named
    assert sent.train.freeze == "features"
    assert sent.weights.source == "made in a test, CC0"
    assert compose_spec(words_of(replace(sent, weights=None))).model == sent.model


def refused(spec: RunSpec) -> str:
    with pytest.raises(ConfigError) as caught:
        weights.take(spec)
    return str(caught.value)


def test_a_body_that_nobody_declared_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    file = vit_file(tmp_path)
    beside = file.with_suffix(".yaml")
    beside.unlink()
    assert "add `mean: [0.485" in refused(compose_spec(words(file)))
    for text, said in (
        ("mean: [0.5, 0.5, 0.5]", "std"),
        ("mean: [0.5]\nstd: [0.5]", "1 channel"),
        (DECLARED + "size: 20\n", "size 20"),
        (DECLARED + "layout: nhwc\n", "layout nhwc"),
        (DECLARED + "stride: 3\n", "there is no 'stride'"),
        ("mean: [a, b, c]\nstd: [1, 1, 1]", "a number"),
        ("mean: [0.5, 0.5, 0.5]\nstd: [0, 1, 1]", "above 0"),
        ("!!python/object/apply:os.system ['true']", "YAML or JSON"),
        ("[" * 50_000, "YAML or JSON"),
        ("- 1", "does not declare"),
    ):
        beside.write_text(text)
        assert said in refused(compose_spec(words(file)))
    beside.unlink()
    file.with_suffix(".json").write_text(
        json.dumps({"mean": [0.5, 0.4, 0.3], "std": [0.25, 0.5, 0.2], "licence": "\ud800"})
    )
    assert "visible characters" in refused(compose_spec(words(file)))


def test_a_graphs_own_metadata_declare_its_input(tmp_path: Path) -> None:
    model = model_of([node("Flatten", "x", "y")], dims=("N", 3, "H", "W"))
    for key, text in (("mean", "[0.5, 0.5, 0.5]"), ("std", "[1, 1, 1]"), ("size", "4"), ("licence", "CC0")):
        model.metadata_props.add(key=f"consilium.{key}", value=text)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    sent, _ = weights.take(compose_spec(words(tmp_path / "m.onnx")))
    (body,) = BodyFacts.read(sent.model["body"])
    assert (body.side, body.width, body.layout, sent.weights.source) == (4, 48, "nchw", "CC0")


def test_a_program_of_torch_is_refused_with_the_call_that_writes_onnx(tmp_path: Path) -> None:
    file = tmp_path / "encoder.pt2"
    program = torch.export.export(torch.nn.Flatten(), (torch.rand(1, 3, 4, 4),))
    torch.export.save(program, file)
    file.with_suffix(".yaml").write_text(DECLARED)
    assert "run code when it is read: use torch.onnx.export" in refused(compose_spec(words(file)))


def test_files_that_are_not_there_or_no_encoders_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "bad.onnx"
    assert "there is no ONNX file" in refused(compose_spec(words(file)))
    file.with_suffix(".yaml").write_text(DECLARED)
    for content, said in (
        (b"\xff" * 100, "not an ONNX model"),
        (model_of([node("Loop", "x", "y")]).SerializeToString(), "'Loop'"),
        (bomb(), "MiB of memory"),
    ):
        file.write_bytes(content)
        assert said in refused(compose_spec(words(file)))


@pytest.mark.parametrize("word", ["train.freeze=none", "model.body=''", "model.body=[]", "model.weights=x.pth"])
def test_words_that_make_no_frozen_run_are_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError):
        runner.run(compose_simulation([*words(vit_file(tmp_path)), "federation=p2c5", word]))


def bomb() -> bytes:
    """A graph of a few hundred bytes that takes 24 GiB."""
    ends = [node("ReduceSum", "b", "r", keepdims=0), node("Add", "x r", "z"), node("Flatten", "z", "y")]
    return model_of([node("ConstantOfShape", "n", "b"), *ends], [whole("n", 6 << 30)]).SerializeToString()


HOSTILE = {
    "a loop": (lambda: model_of([node("Loop", "x", "y")]).SerializeToString(), "'Loop'"),
    "a custom operator": (lambda: model_of([node("F", "x", "y", domain="evil")]).SerializeToString(), "'evil'"),
    "weights elsewhere": (lambda: elsewhere(), "weights in other files"),
    "a bomb": (bomb, "MiB of memory"),
}


def elsewhere() -> bytes:
    stored = numpy_helper.from_array(np.ones((2, 2), np.float32), "w")
    stored.external_data.add(key="location", value="/etc/passwd")
    return model_of([node("Flatten", "x", "y")], [stored]).SerializeToString()


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_lead_sends_past_its_own_checks_is_refused_by_name_by_service_and_hospital(
    people: Federation, world: World, tmp_path: Path, what: str
) -> None:
    people.join("hospital0", "hospital1", data="digits/p2c5")
    make, said = HOSTILE[what]
    graph, taken = make(), weights.take(compose_spec(words(vit_file(tmp_path))))
    spec, (fair,) = taken[0], BodyFacts.read(taken[0].model["body"])

    facts = replace(fair, sha256=hashlib.sha256(graph).hexdigest(), size=len(graph))
    tensors = {"body.encoders.0.graph": torch.frombuffer(bytearray(graph), dtype=torch.uint8)}
    digest, size = codec.write_weights(tensors, tmp_path / "object")
    named = Weights(digest, size, facts.sha256, "", spec.weights.fresh)
    spec = replace(spec, model={**spec.model, "body": BodyFacts.write([facts])}, weights=named)
    run = CompiledRun.of(runner_manifest(spec))
    with pytest.raises(ProtocolError, match=f"E-WIRE-06.*{said}"):  # as a hospital's worker loads it
        run.with_weights(tensors)
    client = LeadClient.open(world.home)
    client.send_weights(digest, tmp_path / "object")
    with pytest.raises(FederationError, match=said):
        client.submit(spec.to_json(), "token")
    client.close()


def runner_manifest(spec: RunSpec) -> RunManifest:
    from coordinator.config.manifest_builder import manifest_from

    return manifest_from(spec, ["a", "b"])
