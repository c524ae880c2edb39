"""Errors, grouped by the action that they require; `coordinator explain CODE` explains each code offline.

A message says what was expected, what was found and what to do. `extras` raises the one for a missing library.
"""

from __future__ import annotations

import copyreg
from typing import Any

REASON_CHARS = 500
"""Length limit of a stored error with text from another party."""


class FederationError(Exception):
    """Base of every error that Consilium raises on purpose.

        try:
            lead = consilium.connect()
        except consilium.FederationError as error:
            print(error.code, error)  # `coordinator explain CODE` says more

    code: a key of `fl_core.errors.catalogue.EXPLANATIONS`, for instance "E-TLS-01".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Make errors picklable: otherwise one failing run would end a whole pool of workers."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(FederationError, ValueError):
    """The configuration or the command line asks for something impossible: change it.

        try:
            consilium.simulate("fedmr", "digits", learning_rate=0.1)
        except consilium.ConfigError as error:
            print(error)  # there is no key 'learning_rate': did you mean train__lr=...?

    The message names what was expected and what was found.
    """


class DataError(FederationError, ValueError):
    """The hospital's data does not match its description: repair the data or the description.

        try:
            model.predict(["broken.png", "good.png"])
        except consilium.DataError as error:
            print(error)  # names broken.png, and says why it cannot be read

    The message names the file or the column.
    """


class SchemaError(DataError):
    """A hospital's declared schema differs from the run's.

    The message contains only the two declarations, never records, so that the coordinator may read it.
    """


class RefusedError(FederationError):
    """A peer's identity, a policy or a capability forbids it: ask for permission, or for something else."""


class ProtocolError(FederationError, ValueError):
    """A message breaks the protocol (shape, order, digest, version): one side must be repaired or upgraded."""


class StateError(FederationError):
    """Something on disk cannot be used: the message names the file and the remedy."""


class UnavailableError(FederationError):
    """The other side does not answer now: nothing is lost, wait or start it."""
