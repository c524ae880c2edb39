"""Checks of ranges, each in one line: `validate.positive("E-CFG-02", "fedprox", mu=self.mu)`.

The name of an argument is the one in the message. Each check raises ConfigError with the code it is given. NaN is in no
range, and infinity only where the name says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from fl_core.errors import ConfigError
from fl_core.suggest import did_you_mean


def positive(code: str, owner: str, **numbers: float) -> None:
    """Check 0 < number < infinity."""
    for name, found in numbers.items():
        if not 0 < found < math.inf:
            raise _out_of_range(code, owner, name, "a finite number > 0", found)


def positive_or_infinite(code: str, owner: str, **numbers: float) -> None:
    """Check 0 < number <= infinity."""
    for name, found in numbers.items():
        if not found > 0:
            raise _out_of_range(code, owner, name, "a number > 0, or infinity", found)


def at_least(code: str, owner: str, low: float, **numbers: float) -> None:
    """Check low <= number < infinity."""
    for name, found in numbers.items():
        if not low <= found < math.inf:
            raise _out_of_range(code, owner, name, f"a finite number >= {low:g}", found)


def at_most(code: str, owner: str, high: float, **numbers: float) -> None:
    """Check number <= high."""
    for name, found in numbers.items():
        if not found <= high:
            raise _out_of_range(code, owner, name, f"a number <= {high:g}", found)


def below(code: str, owner: str, high: float, **numbers: float) -> None:
    """Check number < high."""
    for name, found in numbers.items():
        if not found < high:
            raise _out_of_range(code, owner, name, f"a number < {high:g}", found)


def between(code: str, owner: str, low: float, high: float, **numbers: float) -> None:
    """Check low <= number <= high."""
    for name, found in numbers.items():
        if not low <= found <= high:
            raise _out_of_range(code, owner, name, f"a number from {low:g} to {high:g}", found)


def one_of(code: str, owner: str, **words: tuple[str, Collection[str]]) -> None:
    """Check words: name=(word, valid words)."""
    for name, (found, valid) in words.items():
        if found not in valid:
            wanted = f"one of {', '.join(map(repr, valid))}"
            raise _out_of_range(code, owner, name, wanted, found, did_you_mean(found, valid))


def _out_of_range(code: str, owner: str, name: str, wanted: str, found: object, hint: str = "") -> ConfigError:
    where = f"{owner}.{name}" if owner else name
    return ConfigError(code, f"{where}: expected {wanted}, found {found!r}{hint and f': {hint}'}")
