"""A run's model as ONNX and as a plain torch program (`.pt2`). Both classify without Consilium's code.

Both take RGB images as float32 (N, C, H, W) in [0, 1], with the side that the file names. The graph normalises them by
the mean and standard deviation of training. The caller crops and resizes, because libraries differ there; the file
describes how training did it.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fl_core.bodies.probe import CPU
from fl_core.datasets.preprocessing import Preprocessing, normalisation
from fl_core.errors import ConfigError, extras
from fl_core.models.frozen import NAME as FROZEN
from fl_core.models.frozen import Bodies, BodyFacts, Encoder
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.values import State

ONNX, TORCH = "onnx", "torch"
FORMATS = (ONNX, TORCH)
SUFFIX: Mapping[str, str] = {ONNX: ".onnx", TORCH: ".pt2"}
_LEAST_OPSET = 20
"""The lowest ONNX opset that torch's exporter writes without a conversion."""
TOLERANCE = 1e-4
"""Largest difference, absolute and relative, between logits of the written file and of the model."""


class _FromImages(nn.Module):
    """A classifier of images in [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network((images - self.mean) / self.std)
        return logits


class _Prepared(nn.Module):
    """Prepares an image in [0, 1] for each body."""

    def __init__(self, bodies: Sequence[BodyFacts]) -> None:
        super().__init__()
        self._bodies = bodies

    def forward(self, image: Tensor) -> list[Tensor]:
        return [body.prepared(image) for body in self._bodies]


class _Classified(nn.Module):
    """Computes logits from the bodies' outputs."""

    def __init__(self, bodies: Sequence[BodyFacts], trained: nn.Module) -> None:
        super().__init__()
        self._bodies, self.trained = bodies, trained

    def forward(self, answers: list[Tensor]) -> Tensor:
        features = [body.pooled(answer) for body, answer in zip(self._bodies, answers, strict=True)]
        logits: Tensor = self.trained(torch.cat(features, 1))
        return logits


def classifier(run: RunSetup, server: State) -> nn.Module:
    """Build the model that the run evaluates, for images in [0, 1]; raises ConfigError (E-CFG-08) if it has none."""
    run.method.exported(server)  # raises if the method has no global model
    network = run.classifier(server)
    mean, std = normalisation(run.manifest.data)
    return (_FromImages(network, mean, std) if mean else network).eval()


def facts(manifest: RunManifest, run: str, model_digest: str, licence: str = "") -> dict[str, str]:
    """Describe an exported file, in strings as ONNX metadata requires. licence: text from the lead."""
    mean, std = normalisation(manifest.data)
    facts = {
        "run": run,
        "model_digest": model_digest,
        "manifest_digest": manifest.digest(),
        "architecture": manifest.model.name,
        "classes": json.dumps(list(manifest.schema.classes)),
        "answer": "each label whose logit is above 0"
        if manifest.schema.multi_label
        else "the class of the largest logit",
        "input": json.dumps([1 if manifest.model.name == FROZEN else "N", *manifest.schema.shape]),
        "preprocessing": Preprocessing(manifest.data, manifest.schema).sentence(graph=True),
        "mean": json.dumps(list(mean)),
        "std": json.dumps(list(std)),
        "privacy": manifest.privacy.name,
        "licence": licence or "not stated: this file grants nothing",
    }
    if manifest.start is not None:
        facts["start"] = str(manifest.start)
    return facts


def require(formats: Sequence[str]) -> None:
    """Raise ConfigError before anything is fetched: E-CFG-02 on an unknown format, E-CFG-08 without its packages."""
    for kind in formats:
        if kind not in FORMATS:
            raise ConfigError(
                "E-CFG-02",
                f"--format: expected one of safetensors, {', '.join(FORMATS)}, found {kind!r}: correct it",
            )
    if ONNX in formats:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            _require(name)


def write(kind: str, run: RunSetup, server: State, named: Mapping[str, str], file: Path) -> None:
    """Write a model for batches of any size; with bodies from ONNX files, for one image.

    After writing, compares the file's logits for random images with the model's. Raises ConfigError (E-CFG-08) if they
    differ, the extra is not installed, or the model cannot be written in this format.
    """
    require([kind])
    manifest, network = run.manifest, classifier(run, server)
    images = torch.rand(3, *manifest.schema.shape, generator=torch.Generator().manual_seed(0))
    try:
        with _quiet():
            if kind == ONNX and isinstance(body := run.network.body, Bodies):
                _save_onnx(_with_bodies(run, server, body, images[:1]), named, file)
                _check(kind, network, images[:1], file)
                return
            size = torch.export.Dim("N", min=1)
            program = torch.export.export(network, (images,), dynamic_shapes=({0: size},))
            if kind == TORCH:
                torch.export.save(program, file, extra_files={"consilium.json": json.dumps(named, sort_keys=True)})
            else:
                model = _graph(program, images, input_names=["images"], output_names=["logits"])
                _save_onnx(model, named, file)
    except ConfigError:
        raise
    except Exception as error:  # torch's exporters raise what their passes do
        raise ConfigError(
            "E-CFG-08",
            f"{manifest.model.name} cannot be written as {kind} ({type(error).__name__}): use --format safetensors",
        ) from error
    with _quiet():
        _check(kind, network, images[:1], file)
        _check(kind, network, images, file)


def _graph(made: nn.Module | torch.export.ExportedProgram, inputs: Any, **options: Any) -> Any:  # noqa: ANN401
    """Export to ONNX."""
    program = torch.onnx.export(made, (inputs,), dynamo=True, verbose=False, **options)
    assert program is not None
    return program.model_proto


def _with_bodies(run: RunSetup, server: State, bodies: Bodies, image: Tensor) -> Any:  # noqa: ANN401
    """Join three graphs: image preparation, the bodies as stored in their files, and the trained part."""
    from onnx import compose, load_from_string, version_converter

    encoders = cast(Sequence[Encoder], bodies.encoders)
    graphs = [load_from_string(encoder.graph.numpy().tobytes()) for encoder in encoders]
    opset = max(_LEAST_OPSET, *(max(entry.version for entry in graph.opset_import) for graph in graphs))
    images = _Prepared([replace(encoder.facts, data_mean=(), data_std=()) for encoder in encoders])
    trained = run.method.global_model(run.new_model(), run.method.broadcast(server)).eval()
    answers, ends, places = list[Tensor](), list[str](), [f"prepared{k}" for k in range(len(graphs))]
    whole = _graph(images, image, input_names=["images"], output_names=places, opset_version=opset)
    for k, (encoder, graph, x) in enumerate(zip(encoders, graphs, images(image), strict=True)):
        session, prefix = encoder.session(CPU), f"body{k}_"
        (begin,), (end,) = session.get_inputs(), session.get_outputs()
        answers += map(torch.from_numpy, session.run(None, {begin.name: x.contiguous().numpy()}))
        ends.append(prefix + end.name)
        graph = compose.add_prefix(version_converter.convert_version(graph, opset), prefix)
        graph.ir_version = whole.ir_version
        whole = compose.merge_models(whole, graph, [(places[k], prefix + begin.name)])
    head, places = (
        _Classified([encoder.facts for encoder in encoders], trained),
        [f"answer{k}" for k in range(len(graphs))],
    )
    graph = _graph(head, answers, input_names=places, output_names=["logits"], opset_version=opset)
    graph = compose.add_prefix(graph, "head_")
    whole = compose.merge_models(
        whole, graph, [(end, f"head_{place}") for end, place in zip(ends, places, strict=True)]
    )
    whole.graph.output[0].name = whole.graph.node[-1].output[0] = "logits"
    return whole


def _save_onnx(model: Any, named: Mapping[str, str], file: Path) -> None:  # noqa: ANN401
    import onnx

    for entry in list(model.metadata_props):
        model.metadata_props.remove(entry)
    for key, value in sorted(named.items()):
        model.metadata_props.add(key=f"consilium.{key}", value=value)
    model.producer_name = "consilium"
    onnx.checker.check_model(model)
    onnx.save_model(model, str(file))


def _check(kind: str, network: nn.Module, images: Tensor, file: Path) -> None:
    with torch.no_grad():
        wanted = network(images)
    if kind == TORCH:
        with torch.no_grad():
            values = torch.export.load(file).module()(images)
    else:
        session = _require("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
        (answer,) = session.run(["logits"], {"images": images.numpy()})
        values = torch.from_numpy(answer)
    if not torch.allclose(values, wanted, atol=TOLERANCE, rtol=TOLERANCE):
        file.unlink()
        apart = float((values - wanted).abs().max())
        raise ConfigError(
            "E-CFG-08",
            f"expected a {kind} file with the model's logits, found a difference of {apart:.1e}: use --format "
            "safetensors",
        )


def _require(name: str) -> Any:  # noqa: ANN401
    return extras.require(name, "model", "--format onnx")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' log lines and warnings."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the exporters, about their own internals
            yield
    finally:
        logger.setLevel(before)
