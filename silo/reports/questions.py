"""Runs that wait for this hospital's decision: their requests, compared with its policy, and their cost."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_core.errors import ConfigError, FederationError, RefusedError
from silo.admission.policy_in_force import in_force
from silo.identity.identity import SiloIdentity
from silo.reports.disclosure import UpdateContents
from silo.reports.run_request import RequestLine, RunRequest, SurveyPreview
from silo.reports.spending import SpendingPreview, preview
from silo.storage.approvals import Approval
from silo.storage.home import Home

if TYPE_CHECKING:
    from privacy.ledger.ledger import Ledger
    from privacy.policy import Policy


@dataclass(frozen=True, slots=True)
class PolicyAndLedger:
    """The basis of a decision: policy and ledger, or the errors on reading them; the data's fingerprint.

    confirmed: members whose key this hospital confirmed   measured: runs that measured models here within a day.
    """

    policy: Policy | None
    policy_error: str
    ledger: Ledger | None
    ledger_error: str
    fingerprint: str = ""
    confirmed: frozenset[str] = frozenset()
    measured: int = 0

    @classmethod
    def of(cls, home: Home, fingerprint: str = "", ledger: Ledger | None = None, measured: int = 0) -> PolicyAndLedger:
        """Read policy and ledger. ledger: used if it is open already; it sees new entries."""
        policy, policy_error, ledger_error = None, "", ""
        try:
            policy = in_force(home)
        except RefusedError as error:
            policy_error = str(error)
        try:
            if not home.ledger.exists():
                ledger = None
            elif ledger is None:
                from privacy.ledger.ledger import Ledger

                ledger = Ledger(home.ledger, home.ledger_key)
            if ledger is not None:
                ledger.collections()
        except FederationError as error:
            ledger, ledger_error = None, str(error)
        identity = SiloIdentity(home.path)
        confirmed = identity.pins().confirmed() if identity.joined else frozenset[str]()
        return cls(policy, policy_error, ledger, ledger_error, fingerprint, confirmed, measured)


@dataclass(frozen=True, slots=True)
class PendingDecision:
    """A run that waits for a decision, with everything that is shown about it.

    previews: its spending; None if unknown, empty if it spends nothing   spends: a sentence about its spending
    digest: SHA-256 of everything shown, so that it changes with any detail.
    """

    approval: Approval
    request: RunRequest | None
    comparisons: tuple[RequestLine, ...]
    previews: tuple[SpendingPreview, ...] | None
    spends: str
    digest: str

    @classmethod
    def of(cls, approval: Approval, basis: PolicyAndLedger) -> PendingDecision:
        request = _request(approval)
        comparisons: tuple[RequestLine, ...] = ()
        if request is not None and basis.policy is not None:
            comparisons = tuple(request.compare(basis.policy, basis.confirmed, basis.measured))
        previews, spends = _spends(request, basis)
        shown = [
            approval.run_id,
            approval.manifest_digest,
            approval.name,
            approval.about,
            approval.decided,
            approval.request,
            comparisons,
            spends,
            [p.sentence() for p in previews or ()],
        ]
        digest = hashlib.sha256(json.dumps(shown).encode()).hexdigest()
        return cls(approval, request, comparisons, previews, spends, digest)

    @property
    def contents(self) -> UpdateContents | None:
        return None if self.request is None else self.request.contents

    @property
    def survey(self) -> SurveyPreview | None:
        """The numbers that would leave in a survey, cell by cell; None for other runs."""
        return None if self.request is None else self.request.survey

    @property
    def all_spends(self) -> str:
        return " ".join([self.spends, *(f"{p.sentence()}." for p in self.previews or ())])


def _request(approval: Approval) -> RunRequest | None:
    try:
        return RunRequest.from_json(approval.request)
    except (FederationError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # only its sentence is shown


def _spends(request: RunRequest | None, basis: PolicyAndLedger) -> tuple[tuple[SpendingPreview, ...] | None, str]:
    """Return previews of a run's spending, as in `PendingDecision.previews`, and a sentence about it."""
    if request is None:
        return None, "Its cost is unknown: an earlier version of this software got the request."
    if not request.private:
        return (), ("It has no differential privacy: it spends no budget, and nothing bounds what its updates reveal.")
    if request.charges is None:
        return None, "It spends nothing here, because this hospital is not one of its members."
    if basis.ledger_error:
        return None, f"The ledger cannot be read, so the run would be refused: {basis.ledger_error}"
    if basis.ledger is None:
        return None, "There is no ledger yet, so the run would be refused: silo ledger register"
    try:
        previews = preview(basis.ledger, basis.policy, request, basis.fingerprint)
    except ConfigError as error:
        return None, f"Its cost cannot be computed: {error}"
    if previews is None:
        return None, (
            "What it would spend is unknown, because the ledger has no collection, or several, for the data that is "
            "served: silo ledger register"
        )
    return previews, "At most, for all its rounds together:"
