"""From a configuration's mapping to a frozen dataclass of options: nothing unknown, nothing of a wrong type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, TypeVar

from fl_core.errors import ConfigError
from fl_core.suggest import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WHOLE = 2**53
"""Whole numbers up to here are floats, too; one of thousands of digits would overflow."""
T = TypeVar("T", bound="DataclassInstance")


def from_mapping(cls: type[T], owner: str, values: Mapping[str, object]) -> T:
    """Build `cls` from `values`; raises ConfigError E-CFG-21 (unknown option) or E-CFG-22 (value of a wrong type).

    The type of an option is that of its default: bool, int, float (an int is taken), str, or a tuple of ints (a
    list is taken).
    """
    defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
    chosen: dict[str, object] = {}
    for name, value in values.items():
        if name not in defaults:
            raise ConfigError("E-CFG-21", f"{owner} has no option {name!r}: {nearest(name, defaults)}")
        chosen[name] = _typed(owner, name, value, defaults[name])
    return cls(**chosen)


def _typed(owner: str, name: str, value: object, default: object) -> object:
    kind = type(default)
    if kind is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        if all(type(v) is int and v > 0 for v in value):
            return tuple(value)
    elif type(value) is kind:
        return value
    elif kind is float and type(value) is int and abs(value) <= _WHOLE:
        return float(value)
    wanted = "a list of positive integers" if kind is tuple else f"{kind.__name__}, like the default {default!r}"
    raise ConfigError("E-CFG-22", f"{owner}.{name}: expected {wanted}, found {_shown(value)}: change it")


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"
