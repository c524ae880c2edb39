"""Our errors <-> the status of a call, whose text begins with our code."""

from __future__ import annotations

import re

from fl_core import errors
from fl_core.errors import FederationError

_STATUS: tuple[tuple[type[FederationError], str], ...] = (
    (errors.RefusedError, "PERMISSION_DENIED"),
    (errors.ProtocolError, "INVALID_ARGUMENT"),
    (errors.ConfigError, "INVALID_ARGUMENT"),
    (errors.DataError, "INVALID_ARGUMENT"),
    (errors.StateError, "FAILED_PRECONDITION"),
    (errors.UnavailableError, "UNAVAILABLE"),
)

RETRY = frozenset(
    {"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "CANCELLED"}
)
"""Statuses after which a silo tries again, without end. All others are answers: trying again gives the same."""


_MAX_BYTES = 6000
"""Of a text as it travels: with more than 8 KiB of metadata gRPC drops the status, and the reason with it."""


def to_status(error: FederationError) -> tuple[str, str]:
    """Return the name of a status and its text, which is cut where it would be dropped."""
    return next((name for kind, name in _STATUS if isinstance(error, kind)), "INTERNAL"), _fitting(str(error))


def _fitting(text: str) -> str:
    """Cut a text whose bytes, three for each that is no visible ASCII, are too many for a status."""
    left = _MAX_BYTES
    for place, char in enumerate(text):
        left -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace"))
        if left < 0:
            return f"{text[:place]}..."
    return text


def from_status(status: str, details: str | None) -> FederationError:
    """Rebuild the error that the other side raised; without a code it is E-NET-01 (unavailable) or E-WIRE-10."""
    match = re.match(r"(E-[A-Z]+-\d\d): (.*)", details or "", re.DOTALL)
    if match is None:
        if status in RETRY:
            return errors.UnavailableError("E-NET-01", f"the other side does not answer ({status}): {details}")
        return errors.ProtocolError("E-WIRE-10", f"the other side answered {status}: {details}")
    kinds: dict[str, type[FederationError]] = {name: kind for kind, name in reversed(_STATUS)}
    return kinds.get(status, errors.UnavailableError)(match[1], match[2])
