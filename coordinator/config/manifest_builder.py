"""From the lead's configuration to the frozen manifest; invalid combinations are refused here, before round 0."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from coordinator.config.run_spec import AUTO, OFF, ON, RunSpec, SecaggSpec
from fl_core import datasets
from fl_core.aggregation import options as aggregators
from fl_core.aggregation.fixed_point import FixedPointFormat, Ring
from fl_core.aggregation.grid_bounds import bounded_grid
from fl_core.aggregation.update_check import DeclaredSize
from fl_core.converter import ConversionError, Option, shown, structure
from fl_core.datasets import DataRequest
from fl_core.errors import ConfigError
from fl_core.extensions import registry
from fl_core.extensions.registry import Extension
from fl_core.methods import all_options, build_method
from fl_core.methods.shared.prototypes import features_of
from fl_core.models import build_model, stated_options
from fl_core.rounds import capabilities
from fl_core.rounds.layout import closing_layout, derive_layout
from fl_core.rounds.manifest import (
    Dictionary,
    EvaluationTerms,
    NamedOptions,
    RunManifest,
    RunMember,
    StartPoint,
    make_members,
)
from fl_core.rounds.memory_need import require_memory
from fl_core.training.frozen_features import check_shared, trained_part
from fl_core.types.clinical import BASIC, CLINICAL, SUGGESTED_CLASSES
from fl_core.types.columns import Column
from fl_core.types.interfaces import Method
from fl_core.types.records import Schema
from fl_core.types.secagg import MIN_MASKED, Secagg
from privacy import profiles
from privacy.accounting.record_config import round_to_two_digits
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from service_core.version import version

IMAGES = {"folder", "manifest"}
"""Two layouts of a hospital's own images: silos of both kinds fit one run."""
OWN = IMAGES | {"table"}
"""Data that hospitals bring themselves; a simulation needs their path."""
_MAX_INTEGER = 2**53
_OF_SPEC = (
    "train",
    "rounds",
    "seed",
    "cohort",
    "quorum",
    "deadline_s",
    "patience_s",
    "threads",
    "personal",
    "lost_state",
)


def schema_of(spec: RunSpec) -> Schema:
    several = spec.data.get("multi_label") is True
    return datasets.schema_of(str(spec.data["name"]), request_of(spec), declared_columns(spec), several)


def request_of(spec: RunSpec) -> DataRequest:
    """Read a run's data options; raises ConfigError (E-CFG-02)."""
    size, classes = spec.data.get("image_size"), spec.data.get("classes")
    if size is not None and not isinstance(size, int):
        raise ConfigError("E-CFG-02", f"expected data.image_size in pixels, found {size!r}")
    if classes is not None and not isinstance(classes, list | tuple):
        raise ConfigError("E-CFG-02", f"expected data.classes=[name,name,...], found {classes!r}")
    names, window = None if classes is None else [str(c) for c in classes], spec.data.get("window")
    if window is None:
        return DataRequest(names, size)
    if not isinstance(window, list | tuple) or not all(isinstance(v, int | float) for v in window) or len(window) != 2:
        raise ConfigError("E-CFG-02", f"expected data.window=[centre,width], found {shown(window)}")
    return DataRequest(names, size, (float(window[0]), float(window[1])))


def declared_columns(spec: RunSpec) -> tuple[Column, ...]:
    """Return the columns of data.schema; `hydra_config.with_schema` has read them from the file."""
    try:
        return structure(_Columns, {"schema": spec.data.get("schema") or []}, "data").schema
    except ConversionError as error:
        raise ConfigError("E-CFG-02", f"{error}: give data.schema=FILE.toml") from error


@dataclass(frozen=True, slots=True)
class _Columns:
    schema: tuple[Column, ...]


def manifest_from(
    spec: RunSpec,
    names: Sequence[str],
    sizes: Sequence[float] | None = None,
    basic_only: Sequence[str] = (),
    examples: Sequence[DeclaredSize] = (),
    dictionaries: Mapping[str, Dictionary] | None = None,
) -> RunManifest:
    """Freeze a run over the silos `names`, in this order.

    sizes: their declared sizes, for private runs   basic_only: silos whose version has no clinical metrics
    examples: their declared numbers of examples, for masked runs; 0 if not declared
    dictionaries: their declared label dictionaries, by name.

    A run with record-level privacy uses the private form of its method, and the manifest states it.
    Raises ConfigError if the method, the model, the data and the privacy profile do not fit together; RefusedError
    (E-PRIV-01) on an unknown privacy profile, (E-PRIV-20) on a number outside its range, (E-RUN-38) on a model that
    cannot be trained in the free memory of this machine: the check of the layout trains it once. A start has only the
    digest of its weights; the process that has the weights completes it (`weights.begin`, `start_point.resolve`).
    """
    schema = schema_of(spec)
    privacy, method = _choice(spec.privacy), _method_choice(spec, names, schema)
    privacy = replace(privacy, options=profiles.stated_options(privacy.name, privacy.options))
    method, was = profiles.private_form(method, privacy)
    built = build_method(method.name, method.options)
    _require_rounds(spec, built)
    model = _model_choice(spec)
    require_memory(method, model, schema, spec.train, disclose=True)
    network = build_model(model.name, model.options, schema, spec.seed)
    trained = trained_part(network, schema, spec.train, model.name)
    capabilities.check_batches(built, trained.model, spec.train)
    metrics = _metrics(spec, schema, built, privacy, basic_only)
    terms = _secagg(spec, len(names))
    masked = terms is not None
    if terms is not None:
        terms.require_quorum(spec.quorum, spec.cohort or len(names))
    evaluation = EvaluationTerms(metrics, spec.by_hospital, spec.own)
    closing = closing_layout(len(schema.classes), evaluation, masked)
    layout = derive_layout(built, *trained, spec.personal, metrics, updates=spec.kind.updates, closing=closing)
    check_shared(built, layout, spec.train)
    if max(spec.cohort, spec.quorum) > len(names):
        raise ConfigError(
            "E-CFG-02",
            f"expected cohort and quorum of at most {len(names)} silos, found {spec.cohort} and {spec.quorum}",
        )
    manifest = RunManifest(
        name=spec.name or f"{method.name}-{spec.data['name']}",
        method=method,
        model=model,
        data=str(spec.data["name"]),
        schema=schema,
        members=_members(spec, names, sizes, examples, dictionaries),
        layout={**layout, **profiles.extra_parts(privacy)},
        grid=FixedPointFormat("ring64", len(names)),
        privacy=privacy,
        image_size=request_of(spec).image_size,
        software=version(),
        private_form=was,
        start=None if spec.weights is None else StartPoint(weights=spec.weights),
        aggregator=_aggregator(spec),
        evaluation=evaluation,
        extensions=_extensions(method, model),
        secagg=terms,
        **{name: getattr(spec, name) for name in _OF_SPEC},
    )
    if spec.kind.trains:
        chosen = profiles.form_for_noise(manifest, features_of(trained.model).feature_dim)
        built = build_method(chosen.name, chosen.options)
        layout = derive_layout(built, *trained, spec.personal, metrics, updates=spec.kind.updates, closing=closing)
        manifest = replace(manifest, method=chosen, layout={**layout, **profiles.extra_parts(privacy)})
    compiled = CompiledRun.of(manifest)
    if compiled.masked:
        manifest = _with_grid(compiled, spec.secagg, examples)
        CompiledRun.of(manifest)
    return RunManifest.from_json(manifest.to_json())


def _secagg(spec: RunSpec, silos: int) -> Secagg | None:
    """Return the terms of masks, None without; raises ConfigError (E-CFG-02) on an invalid combination."""
    terms = spec.secagg
    if terms.name == OFF:
        if terms != SecaggSpec():
            raise ConfigError(
                "E-CFG-02",
                (
                    "expected secagg=on with options of secure aggregation, found secagg=off: set secagg=on, or "
                    "leave the options out"
                ),
            )
        return None
    if silos < MIN_MASKED:
        if terms.name != ON:
            return None
        raise ConfigError(
            "E-CFG-02",
            f"expected {MIN_MASKED} hospitals or more with secagg=on, since each of two could compute what the other "
            f"sent, found {silos}: add hospitals, or set secagg=off",
        )
    private = profiles.is_private(_choice(spec.privacy))
    if private and terms.min_contributors > 1:
        raise ConfigError(
            "E-CFG-08",
            "expected secagg.min_contributors=1 in a private run, in which no census counts the hospitals of a "
            f"class, found {terms.min_contributors}: leave it out; the noise protects a class of a single hospital",
        )
    census = spec.kind.trains and not private
    return Secagg(max(1, terms.min_contributors), terms.class_sums, terms.collusion, terms.min_sum, census)


def _with_grid(run: CompiledRun, terms: SecaggSpec, examples: Sequence[DeclaredSize]) -> RunManifest:
    """Complete a masked run with its guards' messages and the grid of its sums.

    Raises ConfigError (E-CFG-08) on a part without a bound.
    """
    manifest = replace(run.manifest, layout={**run.manifest.layout, **run.guard_parts})
    run = CompiledRun(manifest)
    exact = run.method.exact
    if terms.ring == "ring32" and exact:
        raise ConfigError(
            "E-CFG-08",
            f"expected secagg.ring=ring64 with method {run.method.name}, whose sums are exact only in words of 64 "
            "bits, found ring32: leave it out",
        )
    declared = [m.units for m in manifest.members] + [int(e.train) for e in examples]
    largest = DeclaredSize(_largest(declared), _largest([int(e.test) for e in examples]))
    ring: Ring = terms.ring if terms.ring != "auto" else "ring64" if exact else "ring32"
    grid = bounded_grid(ring, len(manifest.members), run.update_check(), largest, run.profile.clipped)
    return replace(manifest, grid=grid)


def _largest(declared: Sequence[int]) -> float:
    return float(max(declared)) if any(declared) else math.inf


def _method_choice(spec: RunSpec, names: Sequence[str], schema: Schema) -> NamedOptions:
    """Return the method with all its options; prototypes are off if no silo submits them.

    A run with several labels at once uses the method's form for them.

    Raises ConfigError (E-CFG-08; E-CFG-01 and E-CFG-02 on options).
    """
    choice = _choice(spec.method)
    choice = NamedOptions(choice.name, all_options(choice.name, choice.options))
    if schema.multi_label:
        form = getattr(build_method(choice.name, choice.options), "multi_label_form", {})
        choice = NamedOptions(choice.name, {**choice.options, **form})
    method = build_method(choice.name, choice.options)
    if schema.multi_label:
        capabilities.check_multi_label(method)
    capabilities.check_supported(
        method, capabilities.required_capabilities(spec.train, len(names), spec.cohort, spec.quorum)
    )
    _require_rounds(spec, method)
    if method.without_prototypes and not any(m.prototypes for m in _members(spec, names)):
        return NamedOptions(choice.name, {**choice.options, **method.without_prototypes})
    return choice


def _require_rounds(spec: RunSpec, method: Method) -> None:
    if 0 < spec.rounds < method.exchanges:
        raise ConfigError(
            "E-CFG-08",
            f"method {method.name} takes {method.exchanges} rounds with these options, found rounds={spec.rounds}: "
            "leave rounds out",
        )


def _metrics(spec: RunSpec, schema: Schema, method: Method, privacy: NamedOptions, basic_only: Sequence[str]) -> str:
    """Choose the metrics of evaluations; raises ConfigError (E-RUN-05) if silos cannot provide those requested."""
    if spec.metrics == CLINICAL and basic_only:
        raise ConfigError(
            "E-RUN-05",
            f"expected silos whose version supports metrics={CLINICAL}, found {', '.join(basic_only)}: upgrade them, "
            "or set metrics=auto",
        )
    if spec.metrics != AUTO:
        return spec.metrics
    exact = method.has_global_model and not profiles.hides_evaluations(privacy)
    return CLINICAL if exact and not basic_only and len(schema.classes) <= SUGGESTED_CLASSES else BASIC


def _extensions(method: NamedOptions, model: NamedOptions) -> tuple[Extension, ...]:
    """List the run's extensions; each hospital decides about them."""
    identities = (registry.identity("method", method.name), registry.identity("model", model.name))
    return tuple(extension for extension in identities if extension is not None)


def _model_choice(spec: RunSpec) -> NamedOptions:
    """Return the model; raises ConfigError (E-CFG-02) if its weights are still a file."""
    choice = _choice(spec.model)
    if spec.weights_file:
        raise ConfigError(
            "E-CFG-02",
            f"expected weights by their digest, found model.weights={spec.weights_file!r}: only `coordinator run` "
            "and `coordinator simulate` read such a file",
        )
    return NamedOptions(choice.name, stated_options(choice.name, choice.options))


def _aggregator(spec: RunSpec) -> NamedOptions:
    """Return the aggregator with the options that a manifest must state."""
    chosen = _choice(spec.aggregator)
    meant, unsaid = aggregators.read(chosen.name, chosen.options), aggregators.read_written(chosen.name, {})
    options = {f.name: getattr(meant, f.name) for f in fields(meant)}
    return NamedOptions(chosen.name, {key: value for key, value in options.items() if value != getattr(unsaid, key)})


def _members(
    spec: RunSpec,
    names: Sequence[str],
    sizes: Sequence[float] | None = None,
    examples: Sequence[DeclaredSize] = (),
    dictionaries: Mapping[str, Dictionary] | None = None,
) -> tuple[RunMember, ...]:
    """Draw the silos that submit prototypes. Only private and masked runs store declared sizes; 0: unusable or none."""
    declared = None
    if sizes is not None and profiles.is_private(_choice(spec.privacy)):
        declared = [_units(n) for n in sizes]
    elif examples and _secagg(spec, len(names)) is not None:
        declared = [round_to_two_digits(_units(e.train)) if _units(e.train) else 0 for e in examples]
    return make_members(names, spec.seed, spec.prototype_share, declared, dictionaries)


def _units(declared: float) -> int:
    return int(declared) if 0 < declared < _MAX_INTEGER else 0


def _choice(group: Mapping[str, object]) -> NamedOptions:
    options: dict[str, Option] = {}
    for key, option in group.items():
        if key == "name":
            continue
        value = list(option) if isinstance(option, tuple) else option
        if not isinstance(value, str | int | float | bool | list | None):
            raise ConfigError("E-CFG-02", f"expected a plain value for {group['name']}.{key}, found {value!r}")
        options[key] = value
    return NamedOptions(str(group["name"]), options)


def build_manifest(spec_json: str, silos: Sequence[pb.SiloInfo]) -> RunManifest:
    """Freeze a lead's configuration over the silos that fit; called by `Lead.Submit`."""
    spec = RunSpec.from_json(spec_json)
    names, data = select_silos(spec, silos), {s.name: s.data for s in silos}
    older = [name for name in names if CLINICAL not in data[name].metrics]
    bare = [name for name in names if not data[name].masks]
    if bare and _secagg(spec, len(names)) is not None:
        raise ConfigError(
            "E-RUN-05",
            f"expected silos whose version supports masks with secagg={spec.secagg.name}, found {', '.join(bare)}: "
            "upgrade them, leave them out, or set secagg=off",
        )
    sizes = [data[name].nominal_size for name in names]
    examples = [DeclaredSize(data[n].train_examples or data[n].nominal_size, data[n].test_examples) for n in names]
    dictionaries = {n: Dictionary(data[n].labels_digest, data[n].coarse_labels) for n in names if data[n].labels_digest}
    return manifest_from(spec, names, sizes, older, examples, dictionaries)


def select_silos(spec: RunSpec, silos: Sequence[pb.SiloInfo]) -> list[str]:
    """Return the silos that the spec names (online or not), or all online ones with fitting data, in natural order.

    Validation-only silos are included if the run trains nothing: an evaluation or a survey.

    Raises ConfigError (E-RUN-05) for a name that is not enrolled or serves other data, and if none is left.
    """
    kind = str(spec.data["name"])
    fitting = {s.name: s.state for s in silos if s.data.name == kind or {s.data.name, kind} == IMAGES}
    fit = {s.name for s in silos if not (spec.kind.trains and s.data.validation_only)}
    here = [name for name, state in fitting.items() if state == "online" and name in fit]
    chosen = here if spec.silos is None else list(spec.silos)
    if strangers := sorted(set(chosen) - set(fitting)):
        raise ConfigError(
            "E-RUN-05",
            f"expected enrolled hospitals that serve {kind!r} data ({', '.join(sorted(fitting)) or 'none does'}), "
            f"found {', '.join(strangers)}: start them with such data, or leave them out",
        )
    if not chosen:
        raise ConfigError(
            "E-RUN-05",
            f"no hospital that serves {kind!r} data is online, and a run needs at least one: invite some "
            "(coordinator invite NAME) and start them (silo serve --data ...); `coordinator silos` shows who is "
            "here",
        )
    return sorted(chosen, key=natural_sort_key)


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Order names naturally: hospital2 before hospital10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
