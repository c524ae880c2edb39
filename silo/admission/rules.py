"""The service's own access to the hospital's policy and privacy ledger. It admits no run and needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fl_core.errors import FederationError, RefusedError, StateError
from privacy.policy import Policy
from service_core.storage import private_files
from service_core.storage.chain import ChainHead
from silo.admission import policy_in_force
from silo.storage.home import Home
from silo.storage.store import SiloStore
from silo.storage.tasks import Attestation, ledger_position

if TYPE_CHECKING:
    from privacy.ledger.ledger import Ledger


@dataclass(slots=True)
class HospitalRules:
    """One home's policy file and privacy ledger. Workers use the subclass `HospitalControls`, which admits runs.

    coordinator: the authority's certificate; it identifies this consortium in a ledger that several share.
    """

    home: Home
    store: SiloStore
    coordinator: str = ""
    _ledger: Ledger | None = field(default=None, init=False)

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            from privacy.ledger.ledger import Ledger

            self._ledger = Ledger(self.home.ledger, self.home.ledger_key)
        return self._ledger

    def existing_ledger(self) -> Ledger | None:
        """Return the ledger; None if it does not exist yet."""
        return self.ledger if self.home.ledger.exists() else None

    def policy(self) -> Policy:
        """Read the current policy; raises RefusedError (`policy_in_force.UNUSABLE`) if it cannot be used."""
        return policy_in_force.in_force(self.home)

    def policy_digest(self) -> str:
        """Return the SHA-256 of the policy file, valid or not; empty if it is missing or cannot be read."""
        return policy_in_force.digest_of(self.home)

    def hides_size(self) -> bool:
        """Tell whether the hospital hides its size; True if the policy cannot be read."""
        try:
            return self.policy().runs.hide_size
        except RefusedError:
            return True

    def tells_data(self) -> bool:
        """Tell whether counted sizes and classes may be declared: not if the policy requires masks or is unreadable."""
        try:
            return not self.policy().secagg.require
        except RefusedError:
            return False

    def trains(self) -> bool:
        """Tell whether the hospital takes part in training at all; as `policy_in_force.trains`."""
        return policy_in_force.trains(self.home)

    def attestation(self) -> Attestation:
        if not self.home.ledger.exists():
            return Attestation(self.policy_digest())
        head, sealed, restored = self.ledger.statement()
        return Attestation(self.policy_digest(), head.seq, head.hash if head.seq else "", sealed.hex(), restored)

    def recover(self) -> list[str]:
        """Verify the ledger when the service starts; count open entries as spent, and return them.

        Raises StateError: E-BUDGET-07 if the ledger was edited, E-BUDGET-08 if it lacks events that it
        attested before.
        """
        seen = self.latest_attestation()
        if seen.seq or self.home.ledger.exists():
            self.ledger.verify(ChainHead(seen.seq, seen.head))
        return self.ledger.recover() if self.home.ledger.exists() else []

    def latest_attestation(self) -> Attestation:
        return max(self._attestation_reminded(), self.store.latest_attestation_sent(), key=ledger_position)

    def all_attestations(self) -> list[Attestation]:
        return [self._attestation_reminded(), *self.store.attested()]

    def _attestation_reminded(self) -> Attestation:
        try:
            attested = Attestation(*json.loads(self.home.attested.read_text()))
            if not all(type(v) is type(valid) for v, valid in zip(attested, Attestation(), strict=True)):
                raise TypeError("it is no attestation")
        except (OSError, ValueError, TypeError, RecursionError):
            return Attestation()  # the coordinator has sent no attestation to this home
        return attested

    def record_attestation(self, seen: Attestation) -> None:
        """Store the coordinator's record of this hospital's ledger, if it is newer; raises as `check`.

        Raises StateError (E-BUDGET-18) if this hospital never stated that record: restoring from it would waste budget.
        """
        if ledger_position(seen) > ledger_position(self.latest_attestation()):
            self._require_own(seen)
            private_files.write_private(self.home.attested, json.dumps(seen).encode())
        self.check(seen)

    def _require_own(self, seen: Attestation) -> None:
        from privacy.ledger.sealed import unseal

        if not self.home.ledger.exists() and not self.home.ledger_key.exists():
            return  # all is lost: only the coordinator's record is left
        sealed = bytes.fromhex(seen.sealed)
        is_own = unseal(self.ledger.chain.secret, ChainHead(seen.seq, seen.head), seen.restored, sealed) is not None
        if not is_own and (sealed or any(a.sealed for a in self.store.attested())):
            raise StateError(
                "E-BUDGET-18",
                f"expected an earlier statement of this hospital's ledger, found event {seen.seq}, which is not "
                "signed with its key",
            )

    def check(self, seen: Attestation) -> None:
        """Raise StateError: E-BUDGET-07 if events were edited, E-BUDGET-08 if the ledger lacks events in `seen`."""
        if seen.seq or self.home.ledger.exists():
            self.ledger.require(ChainHead(seen.seq, seen.head))

    def record_refusal(self, run: str, error: FederationError) -> None:
        if error.code not in policy_in_force.UNUSABLE:  # without a usable policy no run was judged
            self.ledger.note_refusal(run, error.code, self.coordinator)
