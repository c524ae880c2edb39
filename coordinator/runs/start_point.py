"""A run that goes on from another one: what it takes over, and what makes the two unfit for each other."""

from __future__ import annotations

from dataclasses import replace

from coordinator.storage.records import Run
from fl_core.errors import ConfigError, ProtocolError, StateError
from fl_core.rounds.manifest import RunManifest, StartPoint
from fl_core.types import tensor_maps
from fl_core.types.values import State, Tensors
from privacy.compiled_run import CompiledRun
from protos.storage.object_store import ObjectStore
from protos.wire.codec import read_state


def require_over(parent: Run) -> None:
    """Raise StateError (E-RUN-11) unless a run is over, paused or failed, and closed a round."""
    if not parent.state.ended:
        raise StateError(
            "E-RUN-11",
            f"expected {parent.id} to be paused, failed or over, found it {parent.state.value}: abort it first, which "
            "keeps what was trained",
        )
    if not parent.closed or parent.state_object is None:
        raise StateError(
            "E-RUN-11", f"expected a run with a closed round, found none in {parent.id}: start from fresh weights"
        )


def resolve(parent: Run, manifest: RunManifest, objects: ObjectStore) -> tuple[RunManifest, State]:
    """Return the manifest with its start point, and the server state that its first round begins with.

    The model is the parent's, bit for bit. Where the method is the same, the server's other tensors (prototypes, a
    momentum, a generator) are too, if they have the same shapes and no silo keeps a counterpart of its own: silos keep
    nothing across runs, so control variates begin anew. So do the settings of guards, the bound on norms and all that
    depends on the number of the round.
    Raises StateError as `require_over`, E-STATE-63 when the model is damaged; ConfigError: E-CFG-23 on other classes or
    another architecture, E-CFG-08 on a seed or a method that does not fit; ProtocolError (E-WIRE-05) on NaN.
    """
    require_over(parent)
    assert parent.state_object is not None
    before, compiled = RunManifest.from_json(parent.manifest), CompiledRun.of(manifest)
    _require_same_model(parent, before, manifest)
    kept, fresh = read_state(objects.verified(parent.state_object)), compiled.initial_state()
    if _shapes(kept["w"]) != _shapes(fresh["w"]):
        raise ConfigError(
            "E-CFG-08",
            f"expected a method whose server keeps the tensors of {before.method.name} ({parent.id}), found "
            f"{manifest.method.name}, whose model has others: choose method={before.method.name}",
        )
    if not tensor_maps.all_finite(kept["w"]):
        raise ProtocolError("E-WIRE-05", f"expected a model of numbers in {parent.id}, found NaN or infinity")
    partial = not set(tensor_maps.copy_state(compiled.model)) <= set(kept["w"])
    if partial and manifest.seed != before.seed:
        raise ConfigError(
            "E-CFG-08",
            f"expected seed={before.seed}, from which silos make what {manifest.method.name} does not send, found "
            f"{manifest.seed}: leave it as it was in {parent.id}",
        )
    same = manifest.method.name == before.method.name and not compiled.method.server_tracks_state
    taken = [g for g in fresh if g == "w" or (same and g in kept and _shapes(kept[g]) == _shapes(fresh[g]))]
    state = {**fresh, **{g: kept[g] for g in taken}}
    sent = {group: tensor_maps.digest(values) for group, values in compiled.method.broadcast(state).items()}
    private = CompiledRun.of(before).private and (before.start is None or before.start.private)
    start = StartPoint(parent.id, parent.closed, tensor_maps.digest(kept["w"]), sent, private)
    return replace(manifest, start=start), state


def _require_same_model(parent: Run, before: RunManifest, now: RunManifest) -> None:
    for what, then, found in (
        ("classes", list(before.schema.classes), list(now.schema.classes)),
        ("model", before.model.name, now.model.name),
    ):
        if then != found:
            raise ConfigError(
                "E-CFG-23",
                f"expected the {what} of {parent.id} ({then}), found {found}: a run goes on with the same classes, in "
                "the same order, and the same model",
            )


def _shapes(values: Tensors) -> dict[str, object]:
    return {name: (tuple(v.shape), v.dtype) for name, v in values.items()}
