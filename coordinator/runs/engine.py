"""What computes of a coordinator's runs: how they are opened, their rounds, the checks of their updates.

Only `RunScheduler.engine` imports it, when a run is opened, checked or continued: with it comes torch, 450 MB that an
idle service does without.
"""

from __future__ import annotations

import gc
import re
import secrets
from collections.abc import Callable
from dataclasses import replace

from coordinator.runs import run_facts, start_point
from coordinator.runs.lineage import RunLineage
from coordinator.runs.run import ActiveRun, StoredObject
from coordinator.runs.services import Services
from coordinator.runs.workers import RunWorkers
from coordinator.storage.records import StoredRun
from fl_core.errors import ConfigError
from fl_core.methods.personal.local_only import LocalOnly
from fl_core.rounds import capabilities
from fl_core.rounds.manifest import OtherModel, RunManifest
from fl_core.types.values import State
from privacy.compiled_run import CompiledRun

gc.freeze()  # otherwise each full collection scans all of torch's objects and blocks answers for 0.3 s


class RunEngine:
    """Opens runs and carries them out, for `RunScheduler`, which decides when."""

    def __init__(self, services: Services) -> None:
        self.services, self.store, self.objects = services, services.store, services.objects

    def active_run(self, run_id: str, workers: RunWorkers, delete_unused: Callable[[str], None]) -> ActiveRun:
        return ActiveRun(run_id, self.services, workers, delete_unused)

    def accept(self, manifest: RunManifest, spec: str, request_id: str, start_from: str) -> StoredRun:
        """Store a waiting run with what it starts from; arguments and errors as `RunScheduler.submit`."""
        enrolled = self.store.members.member_names()
        for member in manifest.members:
            if member.name not in enrolled:
                raise ConfigError("E-RUN-05", f"expected members of the consortium, found {member.name!r}: invite it")
        never = self.store.members.validation_only() if manifest.kind.trains else set()
        if refused := sorted(never & {member.name for member in manifest.members}):
            raise ConfigError(
                "E-RUN-05",
                f"expected hospitals that train, found {', '.join(refused)}, which only evaluate: leave "
                "them out of silos=[...], and measure the model there with coordinator evaluate",
            )
        offers = {silo.name: silo.data for silo in self.store.members.silos()}
        sizes = {m.name: (offers[m.name].train_examples, offers[m.name].test_examples) for m in manifest.members}
        sizes = dict(CompiledRun.of(manifest).updates.known_sizes(sizes))
        beside = self._compared_run(manifest) if manifest.evaluation.beside else None
        parent = self.store.runs.get(start_from) if start_from else None
        RunLineage(self.store.runs).require_fits(parent, manifest)
        state: State | None = None
        weights = None if manifest.start is None else manifest.start.weights
        if start_from or weights is not None:
            with self.services.model_lock:
                manifest, state = start_point.resolve(parent, manifest, self.objects)
        manifest.kind.check_start(manifest)
        with self.objects.lock:
            other = None
            if beside is not None:
                kept, sent = beside
                other = StoredObject.stored(sent, self.objects)
                named = OtherModel(kept.method, kept.model, kept.seed, *other)
                CompiledRun.of(manifest).for_comparison(named)
                manifest = replace(manifest, evaluation=replace(manifest.evaluation, other=named))
            text = manifest.to_json().encode()
            filled = None if weights is None else StoredObject(weights.object, weights.size)
            if filled is not None:
                self.objects.path(filled.digest)  # newer uploads may have replaced it
            digest = self.objects.put(text)
            start = None if state is None else StoredObject.stored(state, self.objects)
            new = _new_run(manifest, digest, spec, request_id)
            return self.store.runs.add(new, len(text), sizes, start, filled, other)

    def _compared_run(self, manifest: RunManifest) -> tuple[RunManifest, State] | None:
        """Return the run named in `own` and its last broadcast; None if hospitals keep its models.

        Raises ConfigError: E-RUN-10 on an unknown run, E-CFG-23 on one without such models; as
        `start_point.last_broadcast`.
        """
        run = self.store.runs.get(manifest.evaluation.beside)
        other = RunManifest.from_json(run.manifest)
        method = CompiledRun.of(other).method
        if other.schema != manifest.schema or not (method.has_global_model or other.method.name == LocalOnly.name):
            raise ConfigError(
                "E-CFG-23",
                "expected beside the model one of the same classes and examples, which a run keeps or each hospital of "
                f"a run of method={LocalOnly.name}, found {run.id} of method {run.method}: measure each in an "
                "evaluation of its own",
            )
        if other.method.name == LocalOnly.name:
            return None
        with self.services.model_lock:
            return other, start_point.last_broadcast(run, self.objects)

    def smallest_sum(self, manifest: RunManifest) -> int:
        """Return how many updates are in the smallest sum that is read; 0 where each is read by itself."""
        return CompiledRun(manifest).updates.sums_of

    def require_quorum(self, manifest: RunManifest, quorum: int) -> None:
        """Raise ConfigError (E-CFG-02, E-CFG-08) on a quorum that a run cannot have."""
        compiled, silos = CompiledRun.of(manifest), len(manifest.members)
        compiled.updates.require_quorum(quorum)
        required = capabilities.required_capabilities(manifest.train, silos, manifest.cohort, quorum)
        capabilities.check_supported(compiled.method, required)


def _new_run(manifest: RunManifest, digest: str, spec: str, request_id: str) -> StoredRun:
    slug = re.sub(r"[^a-z0-9]+", "-", manifest.name.lower()).strip("-")[:40] or "run"
    text = manifest.to_json()
    return StoredRun(
        id=f"{slug}-{secrets.token_hex(2)}",
        name=manifest.name,
        request_id=request_id,
        spec=spec,
        manifest=text,
        manifest_digest=digest,
        method=manifest.method.name,
        data=manifest.data,
        rounds=manifest.rounds,
        members=tuple(m.name for m in manifest.members),
        facts=run_facts.computed(text).to_dict(),
    )
