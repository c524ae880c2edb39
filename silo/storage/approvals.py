"""Runs that the hospital decides about by hand: which ones wait, and what was decided."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from fl_core.errors import ConfigError
from silo.storage.schema import ApprovalRow


@dataclass(frozen=True, slots=True)
class Approval:
    """One run under one manifest. about: what it asks for, for whoever decides; decided: None while it waits."""

    run_id: str
    manifest_digest: str
    name: str
    about: str
    asked: float
    decided: bool | None


class Approvals:
    """Decisions on the disk; a decision is for a manifest, so that a run that changes needs a new one."""

    def __init__(
        self, begin: Callable[[], AbstractContextManager[Session]], clock: Callable[[], float] = time.time
    ) -> None:
        self._begin = begin
        self._clock = clock

    def ask(self, run_id: str, manifest_digest: str, name: str, about: str) -> bool | None:
        """Return the decision about a run; one that nobody was asked about waits from now on."""
        with self._begin() as db:
            row = db.get(ApprovalRow, (run_id, manifest_digest))
            if row is None:
                row = ApprovalRow(
                    run_id=run_id, manifest_digest=manifest_digest, name=name, about=about, asked=self._clock()
                )
                db.add(row)
            return row.decided

    def waits(self, run_id: str) -> bool:
        """Tell whether a run waits for a decision."""
        with self._begin() as db:
            waiting = ApprovalRow.run_id == run_id, ApprovalRow.decided.is_(None)
            return db.scalar(select(ApprovalRow).where(*waiting)) is not None

    def decide(self, run: str, approved: bool) -> Approval:
        """Decide about a run, by its id or its name; raises ConfigError (E-POLICY-08) when none like it has asked."""
        with self._begin() as db:
            rows = list(db.scalars(select(ApprovalRow).order_by(ApprovalRow.asked)))
            found = [row for row in rows if run in (row.run_id, row.name)]
            if not found or len({row.run_id for row in found}) > 1:
                known = ", ".join(row.run_id for row in rows if row.decided is None) or "none"
                raise ConfigError("E-POLICY-08", f"expected one of the runs that wait ({known}), found {run!r}")
            found[-1].decided = approved
            return _approval(found[-1])

    def all(self) -> list[Approval]:
        """List what was asked, oldest first."""
        with self._begin() as db:
            return [_approval(row) for row in db.scalars(select(ApprovalRow).order_by(ApprovalRow.asked))]


def _approval(row: ApprovalRow) -> Approval:
    return Approval(row.run_id, row.manifest_digest, row.name, row.about, row.asked, row.decided)
