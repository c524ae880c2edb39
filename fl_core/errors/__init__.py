"""Errors grouped by what their reader can do; each has a code that `coordinator explain CODE` knows offline.

A message says what was expected, what was found and what to do. `extras` has the one for a library that is not there.
"""

from __future__ import annotations

import copyreg
from typing import Any

REASON_CHARS = 500
"""What is kept of an error whose text another side has a hand in."""


class FederationError(Exception):
    """Base of every error that Consilium raises on purpose.

    code: a key of `fl_core.errors.catalogue.EXPLANATIONS`, for instance "E-TLS-01".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Let an error travel between processes: otherwise one run that fails takes a whole pool of workers with it."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(FederationError, ValueError):
    """The configuration or the command line asks for something that cannot be: change it."""


class DataError(FederationError, ValueError):
    """The hospital's data is not what its description says: repair the data or the description."""


class SchemaError(DataError):
    """A hospital's declared schema is not the run's.

    The message is made of the two declarations alone, never of records, so that the coordinator may read it.
    """


class RefusedError(FederationError):
    """A peer's identity, a policy or a capability forbids it: ask for the permission, or for something else."""


class ProtocolError(FederationError, ValueError):
    """A message breaks the protocol (shape, order, digest, version): one side must be repaired or upgraded."""


class StateError(FederationError):
    """What lies on disk cannot be used as it is: the message names the file and the way back."""


class UnavailableError(FederationError):
    """The other side does not answer now: nothing is lost, wait or start it."""
