"""Start models: the last models of other runs, and weights from files; also the models that a run is compared with."""

from __future__ import annotations

from dataclasses import replace

from coordinator.runs.lineage import require_over
from coordinator.storage.records import StoredRun
from fl_core.aggregation import adaptive_guards
from fl_core.errors import ConfigError, ProtocolError, StateError
from fl_core.rounds.manifest import RunManifest, StartPoint, Weights
from fl_core.types import tensor_maps
from fl_core.types.records import FEATURES
from fl_core.types.values import State, Tensors
from privacy.compiled_run import CompiledRun
from protos.wire import codec
from service_core.storage.object_store import ObjectStore


def resolve(parent: StoredRun | None, manifest: RunManifest, objects: ObjectStore) -> tuple[RunManifest, State]:
    """Return the manifest with its start point, and the server state of its first round.

    Without a parent, the model gets the weights that the manifest's start names, an object that is stored here. With a
    parent, the model is the parent's, bit for bit, with the parts that the parent did not train but this method trains.
    If the method is the same, the server's other tensors (prototypes, a momentum, a generator) are taken too, if they
    have the same shapes and no silo keeps a counterpart: silos keep nothing across runs, so control variates begin
    anew. So do the settings of guards, the bound on norms and everything that depends on the number of the round.
    Raises StateError as `require_over`, E-STATE-22, E-STATE-63 if the start is missing or damaged; ConfigError:
    E-CFG-23 on other classes or another architecture, E-CFG-08 on a seed, weights or a method that do not fit;
    ProtocolError: E-WIRE-05 on NaN, E-WIRE-06 on weights that do not fit the model.
    """
    compiled, named = CompiledRun.of(manifest), manifest.start
    if named is not None and named.weights is not None:
        compiled = compiled.with_weights(read_weights(objects, named.weights))
    if parent is not None:
        state, start = _from_parent(parent, compiled, objects)
    else:
        assert named is not None
        state, start = compiled.initial_state(), named
    return replace(manifest, start=compiled.pinned_start(state, start)), state


def last_broadcast(other: StoredRun, objects: ObjectStore) -> State:
    """Return the broadcast of a run's last model, to compare it with another one.

    Raises StateError as `require_over`, E-STATE-22, E-STATE-63 on a model that is missing or damaged; ConfigError
    (E-CFG-23) on one of a frozen body, or if silos rebuild a part of it from a file's weights.
    """
    require_over(other)
    assert other.state_object is not None
    before = RunManifest.from_json(other.manifest)
    run = CompiledRun.of(before)
    state = codec.read_state(objects.verified(other.state_object))
    sent = run.method.broadcast(adaptive_guards.method_state(state, adaptive_guards.groups(run.guards.incoming)))
    filled = before.start is not None and before.start.weights is not None
    if run.frozen or (filled and not set(tensor_maps.copy_state(run.network)) <= set(sent["w"])):
        raise ConfigError(
            "E-CFG-23",
            f"expected a second model that the coordinator has completely, found {before.method.name} in {other.id}, "
            "of which silos take a part from a weights file: evaluate each model separately",
        )
    return sent


def read_weights(objects: ObjectStore, weights: Weights) -> Tensors:
    """Read an object of weights.

    Raises StateError: E-STATE-22 if it is not here, E-STATE-63 if it is damaged; ProtocolError (E-WIRE-06) on another
    object.
    """
    if not objects.has(weights.object):
        raise StateError("E-STATE-22", f"{weights} are not at the coordinator: send them again (coordinator run)")
    file = objects.verified(weights.object)
    if (size := file.stat().st_size) != weights.size:
        raise ProtocolError("E-WIRE-06", f"expected {weights.size} bytes of weights, found {size}: ask the lead")
    return codec.read_weights(file)


def _from_parent(parent: StoredRun, compiled: CompiledRun, objects: ObjectStore) -> tuple[State, StartPoint]:
    require_over(parent)
    assert parent.state_object is not None
    manifest, before = compiled.manifest, RunManifest.from_json(parent.manifest)
    _require_same_model(parent, before, manifest)
    kept, fresh = codec.read_state(objects.verified(parent.state_object)), compiled.initial_state()
    if manifest.train.freeze == FEATURES != before.train.freeze:
        raise ConfigError(
            "E-CFG-08",
            f"expected train.freeze={before.train.freeze}, as in {parent.id}, found {manifest.train.freeze}: leave "
            "it unchanged, or export that run and start from its file (coordinator export; model.weights=FILE)",
        )
    model = dict(kept["w"])
    if _shapes(model) != _shapes(fresh["w"]):  # a method that keeps apart what this method trains
        model = dict(_with_weights(CompiledRun.of(before), objects).exported(kept))
    if _shapes(model) != _shapes(fresh["w"]):
        raise ConfigError(
            "E-CFG-08",
            f"expected a method whose server keeps the tensors of {before.method.name} ({parent.id}), found "
            f"{manifest.method.name}, whose model has others: choose method={before.method.name}",
        )
    if not tensor_maps.all_finite(model):
        raise ProtocolError(
            "E-WIRE-05",
            f"the model of {parent.id} contains NaN or infinity, and all numbers must be finite: start from another "
            "run",
        )
    partial = not set(tensor_maps.copy_state(compiled.network)) <= set(model)
    if partial and manifest.model != before.model:
        raise ConfigError(
            "E-CFG-23",
            f"expected the model options of {parent.id} ({before.model.options}), since silos use them to make what "
            f"{manifest.method.name} does not send, found {manifest.model.options}: leave them unchanged",
        )
    if partial and manifest.seed != before.seed:
        raise ConfigError(
            "E-CFG-08",
            f"expected seed={before.seed}, since silos use it to make what {manifest.method.name} does not send, "
            f"found {manifest.seed}: leave it unchanged",
        )
    same = manifest.method.name == before.method.name and not compiled.method.server_tracks_state
    taken = [g for g in fresh if g != "w" and same and g in kept and _shapes(kept[g]) == _shapes(fresh[g])]
    state = {**fresh, "w": model, **{g: kept[g] for g in taken}}
    private = CompiledRun.of(before).private and (before.start is None or before.start.private)
    weights = None if manifest.start is None else manifest.start.weights
    return state, StartPoint(parent.id, parent.closed, private=private, weights=weights)


def _with_weights(run: CompiledRun, objects: ObjectStore) -> CompiledRun:
    start = run.manifest.start
    named = None if start is None else start.weights
    return run if named is None else run.with_weights(read_weights(objects, named))


def _require_same_model(parent: StoredRun, before: RunManifest, now: RunManifest) -> None:
    for what, then, actual in (
        ("classes", list(before.schema.classes), list(now.schema.classes)),
        ("model", before.model.name, now.model.name),
    ):
        if then != actual:
            raise ConfigError(
                "E-CFG-23",
                f"expected the {what} of {parent.id} ({then}), found {actual}: a run continues with the same "
                "classes, in the same order, and the same model",
            )
    first, second = (None if m.start is None else m.start.weights for m in (before, now))
    if first != second:
        raise ConfigError(
            "E-CFG-08",
            f"expected the weights that {parent.id} began with ({first or 'fresh ones'}), found "
            f"{second or 'fresh ones'}: a run continues with the earlier run's model, leave model.weights out",
        )


def _shapes(values: Tensors) -> dict[str, object]:
    return {name: (tuple(v.shape), v.dtype) for name, v in values.items()}
