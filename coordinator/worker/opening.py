"""Opening a run: its complete manifest, its facts, and the state of its first round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from coordinator.runs import run_facts
from coordinator.runs.exchange import Opened, OpenRequest, Written
from coordinator.storage.records import StoredRun
from coordinator.worker import start_point
from fl_core.errors import ConfigError
from fl_core.methods.personal.local_only import LocalOnly
from fl_core.rounds import capabilities
from fl_core.rounds.manifest import OtherModel, RunManifest
from fl_core.types.values import State
from privacy.compiled_run import CompiledRun
from service_core.storage.object_store import ObjectStore


def opened(asked: OpenRequest, objects: ObjectStore, write: Callable[[State], Written]) -> Opened:
    """Check a run and complete its manifest with its start point.

    write: writes a state into a file
    Raises RefusedError (E-PRIV-01) on an unknown privacy profile; ConfigError (E-CFG-23) on a run to compare with whose
    models do not fit; and as `RunKind.check_start`, `start_point.resolve` and `start_point.last_broadcast`.
    """
    manifest, state, other = RunManifest.from_json(asked.manifest), None, None
    sizes = CompiledRun.of(manifest).updates.known_sizes({name: (train, test) for name, train, test in asked.sizes})
    beside = None if asked.beside is None else _compared(manifest, asked.beside.run(), objects)
    if asked.parent is not None or (manifest.start is not None and manifest.start.weights is not None):
        parent = None if asked.parent is None else asked.parent.run()
        manifest, state = start_point.resolve(parent, manifest, objects)
    manifest.kind.check_start(manifest)
    if beside is not None:
        kept, sent = beside
        other = write(sent)
        named = OtherModel(kept.method, kept.model, kept.seed, other.digest, other.size)
        CompiledRun.of(manifest).for_comparison(named)
        manifest = replace(manifest, evaluation=replace(manifest.evaluation, other=named))
    text = manifest.to_json()
    facts = run_facts.computed(text).to_dict()
    sizes_by_silo = [(name, train, test) for name, (train, test) in sizes.items()]
    return Opened(text, sizes_by_silo, facts, None if state is None else write(state), other)


def _compared(manifest: RunManifest, run: StoredRun, objects: ObjectStore) -> tuple[RunManifest, State] | None:
    """Return the manifest of a run to compare with and its last broadcast; None if hospitals keep its models."""
    other = RunManifest.from_json(run.manifest)
    method = CompiledRun.of(other).method
    if other.schema != manifest.schema or not (method.has_global_model or other.method.name == LocalOnly.name):
        raise ConfigError(
            "E-CFG-23",
            "expected a second model of the same classes and examples, from a run or from each hospital of a run of "
            f"method={LocalOnly.name}, found {run.id} of method {other.method.name}: evaluate each model separately",
        )
    if other.method.name == LocalOnly.name:
        return None
    return other, start_point.last_broadcast(run, objects)


def require_quorum(manifest: RunManifest, quorum: int) -> None:
    """Raise ConfigError (E-CFG-02, E-CFG-08) on a quorum that a run cannot have."""
    compiled, silos = CompiledRun.of(manifest), len(manifest.members)
    compiled.updates.require_quorum(quorum)
    required = capabilities.required_capabilities(manifest.train, silos, manifest.cohort, quorum)
    capabilities.check_supported(compiled.method, required)
