"""`coordinator evaluate`: measure a model at the hospitals, without training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.options import Extensions, Place
from coordinator.cli.runs import detail_lines, follow_submitted
from coordinator.lead.as_json import detail_json, start_json
from coordinator.lead.client import LeadClient
from fl_core.errors import ConfigError
from service_core.command_line import Json, command
from service_core.console import CommandResult

if TYPE_CHECKING:
    from coordinator.config.run_spec import RunSpec
    from coordinator.lead.submission import RunSubmission
    from protos.consilium.v1 import federation_pb2 as pb

_FILES = (".safetensors", ".pt", ".pth", ".bin")
ALL = "all"
OWN = ("folder", "manifest", "table")
"""Data sources that name their classes themselves; other data sets have the classes of the published set."""


@command
def evaluate(
    model: Annotated[str, typer.Argument(help="A run's id or name, `latest`, or a file of weights (./FILE).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="For a file of weights: settings that the file does not contain, such as data=folder model=resnet18."
        ),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", metavar="all|NAMES", help="Hospitals to ask: all, or names separated by commas.")
    ] = ALL,
    by_hospital: Annotated[
        bool,
        typer.Option(
            "--by-hospital",
            help="Ask each hospital to show its own results. This needs a run without secure aggregation.",
        ),
    ] = False,
    beside: Annotated[
        str | None,
        typer.Option(
            "--beside",
            metavar="RUN",
            help="Also evaluate this run's final model on the same images. With method=local, each hospital "
            "evaluates its own local model.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option(help="Submit and return; follow it later with `watch`.")] = False,
    extension: Extensions = None,
    as_json: Json = False,
    *,
    home: Place,
) -> CommandResult:
    """Evaluate a stored or exported model at the hospitals. They send counts and histograms of scores, no update.

    An evaluation is a run without training rounds: each hospital's policy decides about it, and `show`, `compare` and
    the page show its results.
    """
    from fl_core.extensions import loading

    loading.load_distributions(extension)
    silos = named_hospitals(on)
    with closing(LeadClient.open(home)) as client:
        request = evaluation_request(client, model, overrides or [], silos, by_hospital, beside)
        info = request.submit(client)
        followed = follow_submitted(client, info, request.parent_manifest, detach, as_json)
        if detach:
            return followed
        detail = client.show(info.run_id)
        return CommandResult(detail_json(detail), detail_lines(detail), status=followed.status)


def evaluation_request(
    client: LeadClient,
    model: str,
    words: Sequence[str] = (),
    silos: tuple[str, ...] | None = None,
    by_hospital: bool = False,
    beside: str | None = None,
) -> RunSubmission:
    """Make an evaluation. model, words, by_hospital, beside: as in the command   silos: None for all.

    Raises ConfigError as `of_run` and `of_file`; E-CFG-02 on a file in place of another run.
    """
    from coordinator.config.run_spec import SecaggSpec
    from coordinator.lead.submission import RunSubmission

    if beside is not None and _is_file(beside):
        raise ConfigError(
            "E-CFG-02",
            f"--beside needs a run, but {beside} is a file: give the file as the model to evaluate (coordinator "
            f"evaluate {beside} --beside RUN)",
        )
    parent = None if _is_file(model) else _measurable(client, model)
    spec = of_file(Path(model), words) if parent is None else of_run(parent, words)
    other = "" if beside is None else client.show(beside).info.run_id
    spec = replace(spec, silos=silos, by_hospital=by_hospital, own=other)
    if by_hospital and not _sets_group("secagg", words):  # otherwise the request is refused, with both
        spec = replace(spec, secagg=SecaggSpec())
    return RunSubmission.of(spec, parent)


def named_hospitals(on: str) -> tuple[str, ...] | None:
    """Read --on; raises ConfigError (E-CFG-02) on an empty or a repeated name."""
    if on == ALL:
        return None
    names = tuple(name.strip() for name in on.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError("E-CFG-02", f"expected --on all, or names with commas, each once, found {on!r}: correct it")
    return names


def _is_file(model: str) -> bool:
    """Tell whether a word names a file, by its ending or a slash; raises ConfigError (E-CFG-02) on a missing one."""
    named = model.endswith(_FILES) or "/" in model
    if named and not Path(model).is_file():
        raise ConfigError("E-CFG-02", f"there is no file of weights at {model}: correct the path")
    return named


def _measurable(client: LeadClient, run: str) -> pb.RunDetail:
    """Return the run whose model is measured; for an evaluation, the run that it measured.

    Raises ConfigError (E-RUN-10; E-CFG-02 on an evaluation of a file).
    """
    detail = client.show(run)
    if detail.info.rounds:
        return detail
    start = start_json(detail.manifest_json) or {}
    if not start.get("run"):
        raise ConfigError(
            "E-CFG-02",
            f"expected a run with its own model, found {detail.info.run_id}, which evaluated a file: name the file",
        )
    return client.show(str(start["run"]))


def of_run(parent: pb.RunDetail, words: Sequence[str]) -> RunSpec:
    """Return the configuration that measures a run's last model: its method and model, and no rounds.

    Raises ConfigError (E-CFG-08) on a run without a model of the federation's own.
    """
    from coordinator.config.hydra_config import compose_from
    from coordinator.config.run_spec import RunSpec
    from fl_core.rounds.manifest import RunManifest
    from privacy.compiled_run import CompiledRun

    manifest = RunManifest.from_json(parent.manifest_json)
    if not CompiledRun.of(manifest).method.has_global_model:
        raise ConfigError(
            "E-CFG-08",
            f"expected a run with one model for all hospitals, found {parent.info.run_id} by {manifest.method.name}, "
            "in which each hospital keeps its own: choose another run",
        )
    before = RunSpec.from_json(parent.spec_json)
    # As it ran: a private run has the private form of its method.
    as_run = replace(
        before,
        method={"name": manifest.method.name, **manifest.method.options},
        model={"name": manifest.model.name, **manifest.model.options},
        name=f"evaluate-{parent.info.run_id}",
        aggregator={"name": "mean"},
        personal=False,
        cohort=0,
        quorum=0,
    )
    spec = compose_from(as_run, [*words, "rounds=0"])
    spec = replace(spec, prototype_share=1.0)
    return spec if _sets_group("privacy", words) else replace(spec, privacy={"name": "none"})


def _sets_group(group: str, words: Sequence[str] | None) -> bool:
    return any(word.lstrip("+").partition("=")[0].partition(".")[0] == group for word in words or [])


def of_file(file: Path, words: Sequence[str]) -> RunSpec:
    """Return the configuration that measures a file of weights: from its metadata, completed by `words`.

    Raises ConfigError: E-CFG-08 on a file whose tensors are not the whole model of its method; as `compose_spec`.
    """
    from coordinator.config.hydra_config import compose_spec, written
    from fl_core.methods.shared.class_vectors import CLASSIFIER
    from fl_core.models import pretrained

    model = pretrained.read_file(file)
    if CLASSIFIER in model.tensors:
        raise ConfigError(
            "E-CFG-08",
            f"the tensors in {file} do not describe the model completely, because method "
            f"{model.facts.get('method')} classifies by fixed vectors: evaluate its run instead (coordinator "
            "evaluate RUN)",
        )
    keys = {word.partition("=")[0] for word in words}
    settings = [f"{key}={written(value)}" for key, value in _stated(model.facts, keys).items() if key not in keys]
    weights = f"model.weights={written(str(file))}"
    return compose_spec(["method=fedavg", "aggregator=mean", *settings, *words, weights, "rounds=0"])


def _stated(facts: Mapping[str, object], keys: Collection[str]) -> dict[str, object]:
    """Return the configuration keys that an exported file states about its model and data.

    keys: set by words beside it: naming another model also replaces its options.
    """
    stated: dict[str, object] = {key: name for key in ("data", "model") if isinstance(name := facts.get(key), str)}
    if isinstance(options := facts.get("model_options"), Mapping) and "model" not in keys:
        stated |= {f"model.{key}": value for key, value in options.items()}
    if facts.get("data") in OWN and isinstance(classes := facts.get("classes"), list):
        stated["data.classes"] = classes
        shape = facts.get("shape")
        if isinstance(shape, list) and len(shape) == 3 and isinstance(shape[-1], int):
            stated["data.image_size"] = shape[-1]
    return stated
