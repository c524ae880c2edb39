"""What the hospital allows and what it has spent: the policy file and the privacy ledger of one home, at work.

The accountants are imported when a ledger is there or a private run comes: a plain silo starts without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fl_core.datasets import SiloDataset
from fl_core.errors import FederationError, RefusedError, StateError
from fl_core.rounds.manifest import RunManifest
from fl_core.training.local_data import PlainData
from fl_core.types.interfaces import Doors
from privacy import profiles as plan
from privacy.ledger.hash_chain import Head
from privacy.policy import BY_HAND, Policy
from privacy.prototype_filter import with_prototype_filter
from protos.storage import private_files as keyfiles
from silo.storage.home import Home
from silo.storage.store import Store
from silo.storage.tasks import Attested, further
from silo.training import policy_in_force

if TYPE_CHECKING:
    from privacy.ledger.ledger import Ledger
    from privacy.ledger.run_ledger import LedgerBook


@dataclass(frozen=True, slots=True)
class Access:
    """How a run reaches the examples: its doors, and the book of a private run."""

    doors: Doors
    submits: bool = True
    book: LedgerBook | None = None

    @contextmanager
    def turn(self, run_id: str) -> Iterator[None]:
        """Charge what happens inside to this run."""
        if self.book is not None:
            self.book.begin(run_id)
        yield

    def commit(self, output: str) -> None:
        """Note that what a task made is safe; output: its digest."""
        if self.book is not None:
            self.book.commit(output)


@dataclass(slots=True)
class Custody:
    """The hospital's side of every run. Nothing that comes over the network changes it."""

    home: Home
    store: Store
    _ledger: Ledger | None = field(default=None, init=False)

    @property
    def ledger(self) -> Ledger:
        """Open the ledger; the first private run, or the operator, makes the file."""
        if self._ledger is None:
            from privacy.ledger.ledger import Ledger

            self._ledger = Ledger(self.home.ledger, self.home.ledger_key)
        return self._ledger

    def policy(self) -> Policy:
        """Read the policy as it is now; raises RefusedError (`policy_in_force.UNUSABLE`) on one that allows nothing."""
        return policy_in_force.in_force(self.home)

    def policy_digest(self) -> str:
        """Return the SHA-256 of the policy file, whatever it says; empty where there is none that can be read."""
        return policy_in_force.digest_of(self.home)

    def hides_size(self) -> bool:
        """Tell whether the hospital hides its size; a policy that cannot be read hides it."""
        try:
            return self.policy().runs.hide_size
        except RefusedError:
            return True

    def attested(self) -> Attested:
        """Return what goes with an update that is made now."""
        if not self.home.ledger.exists():
            return Attested(self.policy_digest())
        head, sealed, restored = self.ledger.statement()
        return Attested(self.policy_digest(), head.seq, head.hash if head.seq else "", sealed.hex(), restored)

    def recover(self) -> list[str]:
        """Look after the ledger at the service's start: verify all of it, count what was left open; return that.

        Raises StateError: E-BUDGET-07 on a ledger that was edited, E-BUDGET-08 on one that lacks what
        others have seen.
        """
        seen = self.seen()
        if seen.seq or self.home.ledger.exists():
            self.ledger.verify(Head(seen.seq, seen.head))
        return self.ledger.recover() if self.home.ledger.exists() else []

    def seen(self) -> Attested:
        """Return the furthest end of the ledger that others have seen, as far as this home remembers."""
        return max(self._told(), self.store.newest_attested(), key=further)

    def all_seen(self) -> list[Attested]:
        """Return every end of the ledger that others have seen."""
        return [self._told(), *self.store.attested()]

    def _told(self) -> Attested:
        try:
            return Attested(*json.loads(self.home.attested.read_text()))
        except (OSError, ValueError, TypeError):
            return Attested()  # the coordinator never reminded this home of anything

    def told(self, seen: Attested) -> None:
        """Take what the coordinator remembers of this hospital's ledger; raises as `check`.

        Raises StateError (E-BUDGET-18) on what this hospital never stated: it would burn budget to restore that.
        """
        if further(seen) > further(self.seen()):
            self._require_own(seen)
            keyfiles.write_private(self.home.attested, json.dumps(seen).encode())
        self.check(seen)

    def _require_own(self, seen: Attested) -> None:
        from privacy.reports.sealed import opened

        if not self.home.ledger.exists() and not self.home.ledger_key.exists():
            return  # all is lost: the coordinator's word is all there is
        sealed = bytes.fromhex(seen.sealed)
        known = opened(self.ledger.secret, Head(seen.seq, seen.head), seen.restored, sealed) is not None
        if not known and (sealed or any(a.sealed for a in self.store.attested())):
            raise StateError(
                "E-BUDGET-18",
                f"expected what this hospital stated of its ledger, found event {seen.seq}, which is not under its key",
            )

    def check(self, seen: Attested) -> None:
        """Raise StateError (E-BUDGET-07, E-BUDGET-08) where events were edited, or lack what others have seen.

        Only what is new since the last look is read.
        """
        if seen.seq or self.home.ledger.exists():
            self.ledger.require(Head(seen.seq, seen.head))

    def admit(self, run_id: str, manifest: RunManifest) -> bool:
        """Hold a run against the policy; return False while the hospital has not decided about it.

        Raises RefusedError (E-POLICY-..) on a run that is not allowed; the ledger has the record. No data is near.
        """
        try:
            policy = self.policy()
            policy.check(manifest)
            if policy.budgets and plan.build(manifest).private:
                policy.require_collections(self.ledger.collections())
            if policy.runs.approve != BY_HAND:
                return True
            decided = self.store.approvals.ask(run_id, manifest.digest(), manifest.name, asks(manifest))
            if decided is False:
                raise RefusedError("E-POLICY-07", f"the hospital decided against run {run_id}")
        except RefusedError as error:
            self.note(run_id, error)
            raise
        return decided is True

    def access(self, manifest: RunManifest, index: int, dataset: SiloDataset, declared: float = 0.0) -> Access:
        """Make the way to the examples that a run gets: plain doors, or private ones over the ledger.

        declared: the size that this hospital declared, 0 where it declared none.
        Raises RefusedError: E-POLICY-05 on a part that the policy does not allow, E-BUDGET-04 on data that is not
        registered; as `privacy.dp_sgd.data_opener.course_of`.
        """
        policy = self.policy()
        hidden, least = _positions(policy, manifest), policy.prototypes.min_count
        if not plan.build(manifest).private:
            return Access(with_prototype_filter(PlainData, hidden, least), policy.prototypes.submit)
        from privacy.accounting.accountant import Filter
        from privacy.data_access import SiloLevelDoors
        from privacy.dp_sgd.data_opener import PrivateDoors
        from privacy.ledger.registration import unit_of
        from privacy.ledger.run_ledger import LedgerBook

        most = Filter.of(policy.privacy.epsilon, policy.privacy.delta)
        book = LedgerBook(self.ledger, manifest, dataset, policy.caps(), most)
        try:
            if manifest.privacy.name == plan.SILO_LEVEL:
                plain = SiloLevelDoors(manifest, book)
                policy.check_update(plain.guard.noise)
                return Access(with_prototype_filter(plain, hidden, least), policy.prototypes.submit, book)
            doors = PrivateDoors(manifest, index, book)
            terms = doors.course.terms
            doors.course = replace(doors.course, terms=replace(terms, min_count=max(terms.min_count, least)))
            policy.check_course(doors.course, unit_of(dataset.train), declared)
        except RefusedError as error:
            self.note(manifest.name, error)
            raise
        return Access(with_prototype_filter(doors, hidden, 0.0), policy.prototypes.submit, book)

    def note(self, run: str, error: FederationError) -> None:
        """Write down in the ledger what a coordinator asked for and was refused."""
        if error.code not in policy_in_force.UNUSABLE:  # of a file that says nothing there is nothing to record
            self.ledger.note_refusal(run, error.code)


def asks(manifest: RunManifest) -> str:
    """Say what a run asks of the hospital, for whoever decides about it."""
    what = f"{manifest.method.name} on {manifest.data}, {manifest.rounds} rounds"
    lead = f", asked for by {manifest.lead}" if manifest.lead else ""
    plan.build(manifest)
    if (terms := plan.terms_of(manifest.privacy)) is None:
        return f"{what}{lead}, without differential privacy"
    unit = "the whole hospital" if manifest.privacy.name == plan.SILO_LEVEL else "each record"
    return f"{what}{lead}, epsilon {terms.epsilon:g} at delta {terms.delta:g} for {unit}"


def _positions(policy: Policy, manifest: RunManifest) -> frozenset[int]:
    """Find the classes that no prototypes are submitted of, in the run's label space."""
    names = manifest.schema.classes
    return frozenset(k for k, name in enumerate(names) if name in policy.prototypes.hidden)
