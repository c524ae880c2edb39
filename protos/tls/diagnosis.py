"""The diagnosis of a connection that fails: a code, an explanation, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from fl_core.errors import FederationError, RefusedError, UnavailableError

REACHABILITY = frozenset({"E-TLS-01", "E-TLS-13"})
"""Codes of a network that may be better in a minute; every other code stays until somebody repairs something."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a failed connection, as far as this side can see it. code None: the connection works."""

    code: str | None
    explanation: str
    remedy: str

    @property
    def ok(self) -> bool:
        return self.code is None

    @property
    def worth_retrying(self) -> bool:
        """Whether waiting can help: yes for an unreachable network, no for anything about certificates."""
        return self.code in REACHABILITY

    def __str__(self) -> str:
        return f"{self.explanation}; {self.remedy}" if self.ok else f"{self.code}: {self.explanation}; {self.remedy}"

    def error(self) -> FederationError:
        """Return the error to raise: UnavailableError when waiting can help, RefusedError when it cannot."""
        if self.code is None:
            raise ValueError("a connection that works is no error")
        kind = UnavailableError if self.worth_retrying else RefusedError
        return kind(self.code, f"{self.explanation}; {self.remedy}")


class NotConnected(Exception):  # noqa: N818 - it carries a finding, it is no error of ours
    """Carries the diagnosis of a connection that never got as far as TLS."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(str(diagnosis))
        self.diagnosis = diagnosis
