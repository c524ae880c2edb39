"""The diagnosis of a connection that fails: a code, an explanation, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from fl_core.errors import FederationError, RefusedError, UnavailableError

PASSING = frozenset({"E-TLS-01", "E-TLS-13", "E-TLS-06", "E-TLS-08", "E-TLS-12"})
"""Codes of a network that may be better in a minute, and of a clock that may be set, on whichever side; every other
code stays until somebody repairs something here."""


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
        """Whether waiting can help: it does where the other side, the network or a clock is at fault."""
        return self.code in PASSING

    def __str__(self) -> str:
        return f"{self.explanation}; {self.remedy}" if self.ok else f"{self.code}: {self.explanation}; {self.remedy}"

    def error(self) -> FederationError:
        if self.code is None:
            raise ValueError("a connection that works is no error")
        kind = UnavailableError if self.worth_retrying else RefusedError
        return kind(self.code, f"{self.explanation}; {self.remedy}")


class NotConnected(Exception):  # noqa: N818 - it carries a finding, it is no error of ours
    """Carries the diagnosis of a connection that never got as far as TLS."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(str(diagnosis))
        self.diagnosis = diagnosis
