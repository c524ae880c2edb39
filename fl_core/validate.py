"""Checks of ranges, each in one line: `validate.positive("E-CFG-02", "fedprox", mu=self.mu)`.

The message has the name of the argument. Each check raises ConfigError with the given code. NaN is in no range, and
infinity is only in ranges whose name says so. Dataclasses of options declare ranges in the types of their fields, which
`declared` checks: `mu: NonNegative = 0.01`, `form: Literal["a", "b"] = "a"`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_origin, get_type_hints

from fl_core.errors import ConfigError
from fl_core.suggest import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def positive(code: str, owner: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise _out_of_range(code, owner, name, "a finite number > 0", value)


def positive_or_infinite(code: str, owner: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise _out_of_range(code, owner, name, "a number > 0, or infinity", value)


def at_least(code: str, owner: str, low: float, **numbers: float) -> None:
    for name, value in numbers.items():
        if not low <= value < math.inf:
            raise _out_of_range(code, owner, name, f"a finite number >= {low:g}", value)


def at_most(code: str, owner: str, high: float, **numbers: float) -> None:
    for name, value in numbers.items():
        if not value <= high:
            raise _out_of_range(code, owner, name, f"a number <= {high:g}", value)


def below(code: str, owner: str, high: float, **numbers: float) -> None:
    for name, value in numbers.items():
        if not value < high:
            raise _out_of_range(code, owner, name, f"a number < {high:g}", value)


def between(code: str, owner: str, low: float, high: float, **numbers: float) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not low <= value <= high:
            raise _out_of_range(code, owner, name, f"a number from {low:g} to {high:g}", value)


def one_of(code: str, owner: str, valid: Collection[str], **words: str) -> None:
    for name, value in words.items():
        if value not in valid:
            wanted = f"one of {', '.join(map(repr, valid))}"
            raise _out_of_range(code, owner, name, wanted, value, did_you_mean(value, valid))


def declared(code: str, owner: str, options: DataclassInstance) -> None:
    """Check the fields of a dataclass against the ranges that their types declare."""
    for name, kind in _type_hints(type(options)).items():
        if get_origin(kind) is Literal:
            one_of(code, owner, get_args(kind), **{name: getattr(options, name)})
        for check in getattr(kind, "__metadata__", ()):
            check(code, owner, **{name: getattr(options, name)})


@cache
def _type_hints(kind: type) -> Mapping[str, object]:
    return get_type_hints(kind, include_extras=True)


def _out_of_range(code: str, owner: str, name: str, wanted: str, value: object, hint: str = "") -> ConfigError:
    where = f"{owner}.{name}" if owner else name
    return ConfigError(code, f"{where}: expected {wanted}, found {value!r}{hint and f': {hint}'}")


def bounded(check: Callable[..., None], *bounds: object) -> Callable[..., None]:
    """Declare a range for `Annotated`: `bounded(at_least, 1)`, or words: `bounded(one_of, ("a", "b"))`.

    The converter refuses a wrong word of a `Literal` with its own error code; `one_of` uses the dataclass's code.
    """

    def checked(code: str, owner: str, **found: object) -> None:
        check(code, owner, *bounds, **found)

    return checked


Positive = Annotated[float, bounded(positive)]
PositiveOrInfinite = Annotated[float, bounded(positive_or_infinite)]
NonNegative = Annotated[float, bounded(at_least, 0)]
UnitInterval = Annotated[float, bounded(between, 0, 1)]
HalfOpenUnit = Annotated[float, bounded(at_least, 0), bounded(below, 1)]
Count = Annotated[int, bounded(at_least, 0)]
PositiveCount = Annotated[int, bounded(at_least, 1)]
