"""A lineage of runs: the hospitals whose updates are in its newest model, and those that have withdrawn.

Runs that add to one exact sum (`analytic`) count each hospital once: a run that continues the sums does not ask a
hospital again that is in them. A hospital that has withdrawn from a run is in no later run of its lineage. A separate
run takes its updates out, and later runs continue from that one. If they cannot be taken out, no run continues from
the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from coordinator.runs.run_facts import DerivedFacts
from coordinator.storage.records import StoredRun
from coordinator.storage.runs import WITHDRAWN, RunStore
from fl_core.errors import ConfigError, StateError
from fl_core.rounds.manifest import RunManifest

SUMS = "analytic"
"""The method whose runs keep sums; named here, since its class needs torch."""
_NAMED = 5


class ContributedModel(NamedTuple):
    """An update that is in a model: its run and training round, and its fingerprint, if any."""

    run: str
    round: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class RunLineage:
    """A run's ancestors and what follows from them."""

    runs: RunStore

    def before(self, run: StoredRun) -> Iterator[StoredRun]:
        """Yield a run's ancestors, the nearest first."""
        while parent := parent_of(run):
            run = self.runs.get(parent)
            yield run

    def updates_in(self, run: StoredRun) -> dict[str, list[ContributedModel]]:
        """Return the updates in a run's model, by silo; a silo whose sums were taken out is absent."""
        updates: dict[str, list[ContributedModel]] = {}
        summed = False
        for one in reversed([run, *self.before(run)]):
            if adds(one) and not summed:
                updates = {}  # sums start empty, whatever the model was
            summed = adds(one)
            rows = [row.record for row in self.runs.rounds(one.id) if row.record.kind.trains]
            if removes_sums(one):
                if is_complete(one):
                    for name in one.members:
                        updates.pop(name, None)
                continue
            most = exchanges(one) if adds(one) else len(rows)
            for record in rows[:most]:  # the sums are complete: later updates add nothing
                for name in record.included:
                    updates.setdefault(name, []).append(
                        ContributedModel(one.id, record.round, record.added.get(name, ""))
                    )
        return updates

    def withdrawn(self, run: StoredRun) -> dict[str, list[str]]:
        """Return the silos that have withdrawn from a run or its ancestors, each with the ids of those runs."""
        ids: dict[str, list[str]] = {}
        for one in (run, *self.before(run)):
            for event in self.runs.events_of(one.id, WITHDRAWN):
                ids.setdefault(event.silo, []).append(one.id)
        return ids

    def not_asked(self, parent: StoredRun, adds_up: bool) -> dict[str, str]:
        """Return the silos that may not be members of a run that continues `parent`, with the reasons.

        adds_up: whether that run adds to exact sums.
        """
        reasons = {name: f"withdrew from {', '.join(ids)}" for name, ids in self.withdrawn(parent).items()}
        if adds_up and adds(parent):
            reasons = dict.fromkeys(self.updates_in(parent), "is in its sums already") | reasons
        return reasons

    def require_fits(self, parent: StoredRun | None, manifest: RunManifest) -> None:
        """Refuse a run that would count a hospital twice, ask one that has withdrawn, or add sums of other features.

        parent: the run that it continues, if any.
        Raises StateError (E-RUN-11) on a parent that no run may continue; ConfigError: E-RUN-05 on a member, E-CFG-08
        on options and E-CFG-23 on data that do not fit the parent's sums.
        """
        adding, out = manifest.kind.trains and manifest.method.name == SUMS, _digests(manifest.method.options)
        if out:
            self._require_taken_out(parent, manifest, out)
            return
        if parent is None:
            return
        self.require_open(parent)
        if refused := {m.name: why for m in manifest.members if (why := self.not_asked(parent, adding).get(m.name))}:
            listed = "; ".join(f"{name} {why}" for name, why in [*refused.items()][:_NAMED])
            raise ConfigError(
                "E-RUN-05",
                f"expected hospitals that may continue from {parent.id}, found {len(refused)} that may not: "
                f"{listed}: leave them out of silos=[...]",
            )
        if adding and adds(parent):
            _require_same_sums(parent, manifest)

    def require_open(self, parent: StoredRun) -> None:
        """Raise StateError (E-RUN-11) on a run with updates of a withdrawn hospital, or with incomplete sums."""
        if gone := sorted({event.silo for event in self.runs.events_of(parent.id, WITHDRAWN)}):
            raise StateError(
                "E-RUN-11",
                f"expected a model that no hospital has withdrawn from, found {', '.join(gone)} withdrawn from "
                f"{parent.id}: continue from the run that took its sums out, or train again without it; `coordinator "
                f"withdraw {gone[0]}` names both",
            )
        if adds(parent) and not is_complete(parent):
            raise StateError(
                "E-RUN-11",
                f"expected all exchanges of {parent.id} to be closed, found {parent.closed}: its sums contain only a "
                "part of the hospitals' examples; resume it first, or start a new run",
            )

    def _require_taken_out(self, parent: StoredRun | None, manifest: RunManifest, digests: Sequence[str]) -> None:
        """Refuse to take sums out of a run that were never added to it, or were taken out already."""
        name = manifest.members[0].name
        models = self.updates_in(parent).get(name, []) if parent is not None and adds(parent) else []
        if len(manifest.members) != 1 or [g.fingerprint for g in models] != list(digests):
            raise ConfigError(
                "E-CFG-08",
                f"the digests in method.withdraws are not those that {name} added to the sums of a run: leave it "
                "out, since `coordinator withdraw` sets it",
            )


def require_over(parent: StoredRun) -> None:
    """Raise StateError (E-RUN-11) unless a run is over, paused or failed, closed a round and still has its model."""
    if not parent.state.ended:
        raise StateError(
            "E-RUN-11",
            f"{parent.id} is {parent.state.value}, and must be paused, failed or finished: abort it first, which "
            "keeps the trained rounds",
        )
    if parent.closed and parent.state_object is None:
        raise StateError(
            "E-RUN-11",
            f"the model of {parent.id} was deleted when a hospital's sums were taken out of it: continue from the "
            f"run that took them out (coordinator logs {parent.id})",
        )
    if not parent.closed:
        raise StateError("E-RUN-11", f"{parent.id} has no closed round, so it has no model: start from fresh weights")


def method_of(run: StoredRun) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the options of a run's method."""
    return _read(run.manifest)[:2]


def parent_of(run: StoredRun) -> str:
    """Return `Run.parent`; each manifest is read once."""
    return _read(run.manifest)[2]


@lru_cache(maxsize=4096)
def _read(manifest: str) -> tuple[str, Mapping[str, Any], str]:
    raw = json.loads(manifest)
    return str(raw["method"]["name"]), raw["method"]["options"], str((raw.get("start") or {}).get("run", ""))


def adds(run: StoredRun) -> bool:
    """Tell whether a run keeps sums that other runs can add to."""
    name, options = method_of(run)
    return name == SUMS and options.get("covariance", "moments") == "moments"


def removes_sums(run: StoredRun) -> bool:
    """Tell whether a run takes out the sums of its one member."""
    return bool(_digests(method_of(run)[1]))


def _digests(options: Mapping[str, Any]) -> list[str]:
    named = str(options.get("withdraws") or "")
    return named.split(",") if named else []


def is_complete(run: StoredRun) -> bool:
    """Tell whether every exchange of a run is closed."""
    return run.closed >= exchanges(run)


def exchanges(run: StoredRun) -> int:
    """Return after how many rounds a run's method is complete; 0 if every round improves the model."""
    return DerivedFacts.of(run).exchanges


def _require_same_sums(parent: StoredRun, now: RunManifest) -> None:
    before = RunManifest.from_json(parent.manifest)
    if any(m.privacy.name != "none" or m.method.options.get("release", "exact") != "exact" for m in (before, now)):
        raise ConfigError(
            "E-CFG-08",
            f"{parent.id} and this run need exact sums, and one of them adds noise: noisy sums can only be solved "
            "within one run; start a run with all hospitals",
        )
    weights = [m.method.options.get("class_weights", "none") for m in (before, now)]
    if weights != ["none", "none"]:
        raise ConfigError(
            "E-CFG-08",
            f"expected class_weights=none in {parent.id} and here, found {weights[0]} and {weights[1]}: balanced "
            "weights depend on the counts of all hospitals and are part of the sums; start a run with all of them",
        )
    for what, then, actual in (
        ("method.covariance", *(m.method.options.get("covariance", "moments") for m in (before, now))),
        ("model", before.model, now.model),
        ("seed", before.seed, now.seed),
        ("classes, shape and columns", before.schema, now.schema),
        ("image size", before.image_size, now.image_size),
        ("train.freeze", before.train.freeze, now.train.freeze),
    ):
        if then != actual:
            raise ConfigError(
                "E-CFG-23",
                f"expected the {what} of {parent.id}, found {actual}: the sums belong to other features; leave it "
                "unchanged",
            )
