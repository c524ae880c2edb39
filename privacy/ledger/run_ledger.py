"""The release log over a hospital's ledger. A task's releases are reserved before any record is read.

If a task fails or its process is killed, its entries stay charged. A repeated round is charged again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fl_core.datasets import SiloDataset
from fl_core.errors import FederationError, RefusedError
from fl_core.tensors import Tensor, torch
from privacy.accounting.accountant import Mechanism, PrivacyFilter
from privacy.accounting.release_plan import TRAIN, Release
from privacy.compiled_run import CompiledRun
from privacy.ledger import registration
from privacy.ledger.account import SEEDED
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.release_log import by_collection


class _Version(NamedTuple):
    """The data version of one split or of the hospital, and the collection that is charged."""

    fingerprint: str
    collection: str


class RunLedger:
    """The `ReleaseLog` of one run at one hospital, over its ledger. One task at a time.

    caps: the policy's budgets by collection   most: the policy's limit for one run, an input of `PrivacyProfile.bounds`
    coordinator: that requests the run   once: the name of the run's only, cached release; empty for other runs.
    Raises RefusedError (E-BUDGET-04) if this version of a split is not registered in the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        run: CompiledRun,
        dataset: SiloDataset,
        caps: Mapping[str, PrivacyFilter] | None = None,
        most: PrivacyFilter | None = None,
        coordinator: str = "",
    ) -> None:
        terms = run.profile.terms
        self._ledger, self._manifest, self._caps = ledger, run.manifest.digest(), caps or {}
        self._bounds = run.profile.bounds(most)
        self._versions = {split: _registered(ledger, dataset, split) for split in run.profile.collections}
        self._seeded = terms is not None and terms.rng != "secure"
        self._about = [list(run.manifest.schema.classes), SEEDED if self._seeded else ""]
        self._run, self._coordinator = "", coordinator
        self._open: list[str] = []
        self.once = ""

    @property
    def paid(self) -> bool:
        """Whether the run's only release was already made from these data, so that it costs nothing."""
        return bool(self.once) and self.cached(self.once) is not None

    def begin(self, run: str) -> None:
        """Start a task of a run; open entries of an earlier task stay charged."""
        self._run, self._open = run, []

    def charged(self, run: str, round: int, train: bool) -> int:
        """Return how often a round of a run was charged: the maximum over its collections."""
        tasks = {split: self._task(round, train, split, run) for split in self._versions}
        return max((self._ledger.times_charged(self._versions[s].collection, t) for s, t in tasks.items()), default=0)

    def cached(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return a stored release, which is made once per data version and label space; None if not made yet.

        Releases with seeded noise are stored separately.
        """
        value = self._ledger.stored_value(*self._key(purpose))
        return None if value is None else torch.tensor(json.loads(value), dtype=dtype)

    def cache(self, purpose: str, value: Tensor) -> None:
        """Keep a release permanently; on the disk on return."""
        self._ledger.keep(*self._key(purpose), json.dumps(value.tolist()))

    def _key(self, purpose: str) -> tuple[str, str]:
        return self._versions[TRAIN].fingerprint, json.dumps([purpose, json.dumps(self._about)])

    def require(self, whole: Mapping[str, Sequence[Mechanism]]) -> None:
        """Raise RefusedError unless the budgets cover all releases of a run. Reserves nothing. whole: by split.

        E-BUDGET-01 if they exceed a budget of the ledger or of the policy, E-BUDGET-02 without a budget, E-BUDGET-12 if
        they exceed the rest of this run's own bounds, or round 0 was charged too often.
        """
        requested: dict[str, list[Mechanism]] = {}
        for split, mechanisms in whole.items():
            requested.setdefault(self._versions[split].collection, []).extend(mechanisms)
        for collection, mechanisms in requested.items():
            budget, spent_before = self._ledger.budget(collection), self._ledger.history(collection)
            if budget is None:
                raise RefusedError(
                    "E-BUDGET-02",
                    f"expected a budget for {collection!r}, found none: set one with `silo ledger budget set`",
                )
            cap = self._caps.get(collection)
            for limit in (budget, *([cap.kept_like(budget)] if cap else [])):
                if not limit.admits(spent_before, mechanisms):
                    raise RefusedError(
                        "E-BUDGET-01",
                        f"all rounds together would take {limit.used(mechanisms):.0%} of the budget of "
                        f"{collection!r} (epsilon {limit.epsilon:g}), and {1 - limit.used(spent_before):.0%} is "
                        "left: use fewer rounds or a smaller epsilon, or set another "
                        f"budget{limit.remedy(spent_before, mechanisms)}",
                    )
        for split, mechanisms in whole.items():
            task, bounds = self._task(0, True, split), self._bounds.get(split, ())
            self._ledger.require_room(self._versions[split].collection, task, mechanisms, None, bounds)

    def reserve(self, round: int, train: bool, releases: Sequence[Release]) -> None:
        """Reserve and start the releases of one task. If the ledger refuses one, none stays reserved.

        All are checked before the first is entered, so that a refused request leaves no entry.
        """
        requests = []
        for split, planned in by_collection(releases).items():
            collection, task = self._versions[split].collection, self._task(round, train, split)
            cap, bounds = self._caps.get(collection), self._bounds.get(split, ())
            self._ledger.require_room(collection, task, [r.mechanism for r in planned], cap, bounds)
            entered = [PlannedRelease(r.purpose, r.mechanism, r.shared) for r in planned]
            requests.append((collection, task, entered, cap, bounds))
        made: list[str] = []
        try:
            for request in requests:
                made.append(self._ledger.reserve(*request))
        except FederationError:
            for entry in made:
                self._ledger.release_unused(entry)
            raise
        for entry in made:
            self._ledger.start(entry)
        self._open = made

    def _task(self, round: int, train: bool, split: str, run: str = "") -> LedgerTask:
        kind = ("train" if train else "evaluate") + (f", {SEEDED}" if self._seeded else "")
        version = self._versions[split].fingerprint
        return LedgerTask(run or self._run, self._manifest, round, kind, version, self._coordinator)

    def commit(self, output: str) -> None:
        """Record that the output of the task is on the disk. output: its digest."""
        for entry in self._open:
            self._ledger.commit(entry, output)
        self._open = []


def _registered(ledger: Ledger, dataset: SiloDataset, split: str) -> _Version:
    fingerprint = registration.version(dataset, split)
    collection = ledger.collection_of(fingerprint)
    if collection is None:
        raise RefusedError(
            "E-BUDGET-04",
            f"the {split} data of {dataset.origin} are not the registered version: register them with `silo ledger "
            f"register --data {dataset.origin}`",
        )
    return _Version(fingerprint, collection)
