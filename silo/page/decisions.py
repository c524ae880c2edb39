"""The buttons of runs that wait for this hospital: they do what `silo approve` does, and only what was shown."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from service_core.audit_log.local_commands import recording
from service_core.web.site import Action, ChangedError
from silo.reports.questions import Known, Question
from silo.storage.approvals import Approval
from silo.storage.home import Home
from silo.storage.store import Store

PAGE = "page"
COMMAND = "approve"
_MOST = 25
"""Runs that are shown of those that wait, and of those that were decided about."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """The runs that ask this hospital. known: what they are held against, as it is now."""

    home: Home
    store: Store
    known: Callable[[], Known]

    def waiting(self, known: Known) -> tuple[dict[str, Question], int]:
        """Return the runs that wait by an id for the page, the oldest question first, and how many more there are."""
        found = [a for a in self.store.approvals.all() if a.decided is None]
        return {_id(a): Question.of(a, known) for a in found[:_MOST]}, max(0, len(found) - _MOST)

    def decided(self) -> list[Approval]:
        """Return the newest decisions, the newest question first."""
        return [a for a in reversed(self.store.approvals.all()) if a.decided is not None][:_MOST]

    def action(self, approve: bool) -> Action:
        return Action(self._digest, lambda form: self._decide(form, approve))

    def _find(self, form: Mapping[str, str]) -> Approval | None:
        """Find a question by the id that its form was shown with: a run's own id may be any text."""
        return next((a for a in self.store.approvals.all() if _id(a) == form.get("question")), None)

    def _digest(self, form: Mapping[str, str]) -> str | None:
        found = self._find(form)
        return None if found is None else Question.of(found, self.known()).digest

    def _decide(self, form: Mapping[str, str], approve: bool) -> str:
        """Decide, with a line in the audit log; raises ChangedError where somebody else just did."""
        asked = self._find(form)
        if asked is None:
            raise ChangedError("This run does not ask any more.")
        run, manifest = asked.run_id, asked.manifest_digest
        about = {"run": run, "deny": not approve, "reason": f"manifest {manifest[:16]}"}
        with recording(self.home.path, COMMAND, about, via=PAGE):
            made = self.store.approvals.decide_waiting(run, manifest, approve)
            if made is None:
                raise ChangedError(f"Run {run} has been decided about in the meantime.")
        name = f"{made.name} ({run})"
        return (
            f"{name} is approved: it may train here." if approve else f"{name} is refused: it gets nothing from here."
        )


def _id(approval: Approval) -> str:
    return hashlib.sha256(f"{approval.run_id} {approval.manifest_digest}".encode()).hexdigest()[:12]
