"""Withdrawal of a hospital: the models with its updates, the exact removal of its sums if possible, a signed record.

Sums of `analytic` without privacy are exact integers: the state minus the hospital's part is the state of a run that
never had it, to the last bit. The coordinator keeps no single hospital's sums, so the hospital sends them once more, in
a separate run (method.withdraws) that continues the first; both sides compare them with the fingerprint that was
recorded when they were added. At the end of that run the state that contained them is deleted. Models trained by
gradients, or whose sums have weights or noise inside, cannot lose one hospital exactly: no run continues from them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.runs import lineage
from coordinator.runs.lineage import ContributedModel, RunLineage
from coordinator.runs.run_facts import CANDIDATES
from coordinator.storage.records import RunState, StoredRun
from coordinator.storage.runs import FETCHED, WITHDRAWN
from coordinator.storage.store import CoordinatorStore
from fl_core.aggregation import options as aggregators
from fl_core.errors import ConfigError
from fl_core.rounds.manifest import MAX_NAME_CHARS, NamedOptions, RunManifest, StartPoint
from fl_core.types.clinical import BASIC
from fl_core.types.metric_parts import METRIC_PARTS, METRICS
from fl_core.types.values import PartSpec
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki import certificates
from service_core.storage.private_files import Credentials
from service_core.version import version

CONTEXT = "consilium withdrawal v1"
_OVER = (RunState.FINISHED, RunState.ABORTED)
Submit = Callable[[RunManifest, str, str, str], StoredRun]
"""As `RunScheduler.submit`."""


@dataclass(frozen=True, slots=True)
class AffectedRun:
    """A run that a hospital has withdrawn from, or would.

    updates: its updates in the model   by: the run that takes its sums out   reason: why they cannot be taken out
    left: the other hospitals with updates in the model   fetched: the leads that read the model, and when
    at: when it withdrew; 0 if no withdrawal is recorded.
    """

    silo: str
    run: StoredRun
    at: float
    updates: Sequence[ContributedModel]
    by: StoredRun | None
    reason: str
    left: Sequence[str]
    fetched: Sequence[str]

    def statement(self) -> str:
        """Return the signed text: canonical JSON."""
        about: dict[str, object] = {"silo": self.silo, "run": self.run.id, "manifest": self.run.manifest_digest}
        about |= {"at": int(self.at), "updates": [[g.run, g.round + 1] for g in self.updates]}
        if self.by is None:
            about |= {"taken_out": False, "why": self.reason}
        else:
            done = self.by.state is RunState.FINISHED
            about |= {"taken_out": done, "by": self.by.id, "model": self.by.model_digest if done else ""}
        return json.dumps(about, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def message(self, credentials: Credentials) -> pb.Withdrawal:
        """Convert it for a lead, signed by the coordinator if it is recorded."""
        withdrawal = pb.Withdrawal(
            silo=self.silo,
            run_id=self.run.id,
            run_name=self.run.name,
            run_state=self.run.state.value,
            at_unix=self.at,
            given=[pb.GivenUpdate(run_id=g.run, round=g.round) for g in self.updates],
            by="" if self.by is None else self.by.id,
            by_state="" if self.by is None else self.by.state.value,
            reason=self.reason,
            left=self.left,
            fetched=self.fetched,
            spec_json=self.run.spec,
        )
        if self.at:
            key = certificates.load_key(credentials.key_pem, "the key in force")
            withdrawal.statement = self.statement()
            withdrawal.signature = certificates.sign(key, CONTEXT, withdrawal.statement.encode())
            withdrawal.certificate = credentials.cert_pem
        return withdrawal


@dataclass(slots=True)
class Withdrawals:
    """Withdrawals from the runs of a store.

    submit: starts a run   delete_unused: deletes the objects that a run no longer needs.
    """

    store: CoordinatorStore
    submit: Submit
    delete_unused: Callable[[str], None]

    @property
    def _line(self) -> RunLineage:
        return RunLineage(self.store.runs)

    def withdraw(self, silo: str, lead: str, preview: bool = False) -> list[AffectedRun]:
        """Record a hospital's withdrawal from every run whose model has its updates, and start the removal runs.

        preview: do neither. Repeated calls are harmless, and start removals that were not possible before. Raises
        ConfigError (E-RUN-05) on a hospital without an update in any model, or as `RunScheduler.submit`.
        """
        affected = self._affected(silo)
        if not affected:
            raise ConfigError(
                "E-RUN-05",
                f"no run contains an update of {silo[:60]!r}: correct the name (coordinator silos)",
            )
        if preview:
            return affected
        for one in affected:
            self.store.runs.withdraw(one.run.id, silo, f"{silo} has withdrawn, as {lead} ordered")
        self._drop_incomplete(silo)
        for one in affected:
            if not one.reason and one.by is None:
                self._begin(one, lead)
        return self._affected(silo)

    def of(self, run: StoredRun) -> list[AffectedRun]:
        """Return the withdrawals from a run and its ancestors."""
        line = self._line
        return [
            self._about(one, event.silo, line.updates_in(one).get(event.silo, []))
            for one in (run, *line.before(run))
            for event in self.store.runs.events_of(one.id, WITHDRAWN)
        ]

    def _drop_incomplete(self, silo: str) -> None:
        """Delete sums that no run can continue, since their run was aborted before they were complete."""
        for run in self.store.runs.all():
            if _is_incomplete(run) and run.state_object is not None and silo in self._line.updates_in(run):
                self.store.runs.drop_state(run.id, silo, "the run was aborted before its sums were complete: deleted")
                self.delete_unused(run.id)

    def _affected(self, silo: str) -> list[AffectedRun]:
        line, affected = self._line, list[AffectedRun]()
        for run in reversed(self.store.runs.all()):
            if _is_incomplete(run) or (lineage.removes_sums(run) and silo in run.members):
                continue
            updates = line.updates_in(run).get(silo, [])
            if updates or (silo in run.members and not run.state.ended):
                affected.append(self._about(run, silo, updates))
        return affected

    def _about(self, run: StoredRun, silo: str, updates: Sequence[ContributedModel]) -> AffectedRun:
        read = self.store.runs.events_of(run.id, FETCHED)
        noted = next((e for e in self.store.runs.events_of(run.id, WITHDRAWN) if e.silo == silo), None)
        others = sorted(set(self._line.updates_in(run)) - {silo})
        by = self._removal_run(run, silo)
        reason = "" if by is not None else self._obstacle(run, silo, updates, others)
        fetched = [f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(e.at))} UTC {e.text}" for e in read]
        return AffectedRun(silo, run, 0.0 if noted is None else noted.at, updates, by, reason, others, fetched)

    def _removal_run(self, run: StoredRun, silo: str = "") -> StoredRun | None:
        """Return the run, not aborted, that takes a hospital's sums out of a run's; by default any hospital's."""
        others = (o for o in self.store.runs.all() if lineage.parent_of(o) == run.id and lineage.removes_sums(o))
        return next((o for o in others if o.state is not RunState.ABORTED and silo in ("", *o.members)), None)

    def _obstacle(self, run: StoredRun, silo: str, updates: Sequence[ContributedModel], others: Sequence[str]) -> str:
        """Return why a hospital's updates cannot be taken out of a model exactly; empty if they can."""
        if not lineage.adds(run):
            return "trained by gradients or on class means only: one hospital's share cannot be separated"
        manifest = RunManifest.from_json(run.manifest)
        if manifest.secagg is not None:
            return (
                "its sums were added under masks, so the hospital's part is unknown: train again without this hospital"
            )
        if manifest.privacy.name != "none" or manifest.method.options.get("release", "exact") != "exact":
            return "its sums contain noise, which the hospital cannot send again"
        if manifest.method.options.get("class_weights", "none") != "none":
            return "its sums depend on the class counts of all hospitals"
        if run.state_object is None and run.closed:
            return "its model was deleted when another hospital's sums were taken out"
        if run.state not in _OVER or not lineage.is_complete(run):
            return f"it is {run.state.value} after {run.closed} of {run.rounds} rounds: abort it or let it end"
        if not all(g.fingerprint for g in updates):
            return "the hospital's contribution was not recorded: it was clipped, or an older version ran"
        if not others:
            return "no other hospital is in its sums, so no model remains without it"
        if silo not in self.store.members.member_names():
            return "the hospital is no longer a member and cannot send its sums again"
        if (other := self._removal_run(run)) is not None:
            return f"{other.id} is taking out another hospital's sums: once it has ended, ask again"
        return ""

    def _begin(self, affected: AffectedRun, lead: str) -> None:
        manifest, spec = self._manifest(affected, lead), affected.run.spec
        attempt = 0
        while True:
            request = f"withdraw {affected.silo} from {affected.run.id}, attempt {attempt}"
            existing = self.store.runs.of_request(request)
            if existing is None:
                self.submit(manifest, spec, request, affected.run.id)
                return
            if existing.state is not RunState.ABORTED:
                return
            attempt += 1

    def _manifest(self, affected: AffectedRun, lead: str) -> RunManifest:
        """Describe the run that takes a hospital's sums out: they are sent alone, on the grid of the original sum."""
        manifest = RunManifest.from_json(affected.run.manifest)
        origin = RunManifest.from_json(self.store.runs.get(affected.updates[0].run).manifest)
        options = dict(manifest.method.options)
        options |= {"withdraws": ",".join(g.fingerprint for g in affected.updates), "personal_head": False}
        weights = None if manifest.start is None else manifest.start.weights
        return replace(
            manifest,
            name=f"withdraw-{affected.silo}-{manifest.name}"[:MAX_NAME_CHARS],
            method=NamedOptions(manifest.method.name, options),
            members=(origin.members[origin.index(affected.silo)],),
            layout={n: _of_sums(spec) for n, spec in manifest.layout.items() if n == METRICS or n not in METRIC_PARTS},
            grid=origin.grid,
            rounds=len(affected.updates),
            cohort=0,
            quorum=0,
            personal=False,
            evaluation=replace(manifest.evaluation, metrics=BASIC),
            aggregator=NamedOptions(aggregators.Mean.name),
            start=None if weights is None else StartPoint(weights=weights),
            lead=lead,
            software=version(),
        )


def _of_sums(spec: PartSpec) -> PartSpec:
    """Leave out the right answers of lambdas, which runs of version 0.1.0 sent together with sums."""
    return replace(spec, shapes={name: shape for name, shape in spec.shapes.items() if name != CANDIDATES})


def _is_incomplete(run: StoredRun) -> bool:
    return run.state is RunState.ABORTED and lineage.adds(run) and not lineage.is_complete(run)
