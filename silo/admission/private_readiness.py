"""The list of everything that a hospital lacks for private runs, each with its remedy.

The list follows from the hospital's declarations, registrations and decisions, never from a record. The hospital sees
all of it; the lead of a private run gets the error code only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from fl_core.errors import RefusedError
from privacy.policy import Policy

NOT_READY = ("E-POLICY-16", "E-BUDGET-04", "E-BUDGET-02")
"""Error codes of hospitals that are not ready; more requirements may be missing."""


class MissingRequirement(NamedTuple):
    """A missing requirement, and the command or the line of the policy that meets it."""

    what: str
    remedy: str


class Collections(Protocol):
    """The ledger's methods that this module uses."""

    def collections(self) -> list[str]: ...
    def budget(self, collection: str) -> object | None: ...


def missing_requirements(
    policy: Policy, ledger: Collections | None, declared: Collection[str]
) -> list[MissingRequirement]:
    """List what is missing. ledger: None if there is none   declared: classes, for policies that name none."""
    missing = []
    if not (policy.privacy.labels or declared):
        missing.append(MissingRequirement("classes declared", "policy.toml: [privacy] labels = [...]"))
    collections = [name for name in ([] if ledger is None else ledger.collections()) if "/" in name]
    if not collections:
        missing.append(MissingRequirement("data registered", "silo ledger register --data REF"))
    without = [name for name in collections if ledger is not None and ledger.budget(name) is None]
    if not collections or without:
        what = f"a budget for {', '.join(without)}" if without else "a budget"
        missing.append(MissingRequirement(what, "silo ledger budget set NAME"))
    return missing


def with_all(error: RefusedError, missing: list[MissingRequirement]) -> RefusedError:
    """Return a refusal that names all missing requirements, if there is more than one."""
    if error.code not in NOT_READY or len(missing) < 2:
        return error
    return RefusedError(
        error.code, "not ready for private runs, missing: " + "; ".join(f"{w} ({r})" for w, r in missing)
    )
