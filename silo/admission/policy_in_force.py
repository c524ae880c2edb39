"""The policy in force in a home. A home that once had a policy file refuses runs without one."""

from __future__ import annotations

import contextlib
import hashlib
import shlex

from fl_core.errors import RefusedError, StateError
from privacy.policy import Policy, open_file
from privacy.policy_terms import BY_HAND
from service_core.storage import private_files
from silo.storage.home import Home

UNUSABLE = ("E-POLICY-01", "E-POLICY-10", "E-POLICY-13")
"""Error codes of policy files that allow no run at all."""


def in_force(home: Home) -> Policy:
    """Read the policy of a home. Raises RefusedError: as `Policy.read`; E-POLICY-13 if the policy file was removed."""
    policy = Policy.read(home.policy)
    if policy.digest:
        if not home.had_policy.exists():
            with contextlib.suppress(OSError, StateError):  # a home that is read-only still works
                private_files.write_private(home.had_policy, b"")
    elif home.had_policy.exists():
        raise RefusedError(
            "E-POLICY-13",
            f"the policy file {home.policy} was here before and is missing: put it back. To use the defaults from "
            f"now on, create an empty one: touch {shlex.quote(str(home.policy))}",
        )
    return policy


def accepts_new_peers(home: Home) -> bool:
    """Tell whether new members are accepted without the hospital's consent; False if the policy cannot be read."""
    try:
        return in_force(home).peers.accept != BY_HAND
    except RefusedError:
        return False


def trains(home: Home) -> bool:
    """Tell whether the hospital takes part in training at all; False if the policy cannot be read."""
    try:
        return in_force(home).runs.train and not home.validation_only
    except RefusedError:
        return False


def digest_of(home: Home) -> str:
    """Return the SHA-256 of the policy file, valid or not; empty if it is missing or cannot be read."""
    try:
        opened = open_file(home.policy)
    except RefusedError:
        return ""
    return "" if opened is None else hashlib.sha256(opened[0]).hexdigest()
