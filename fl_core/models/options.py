"""From a configuration's mapping to a frozen dataclass of options: nothing unknown, nothing of a wrong type."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, TypeVar

from fl_core.errors import ConfigError
from fl_core.types import Schema
from fl_core.words import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
    elif kind is float and type(value) is int:
        return float(value)
    wanted = "a list of positive integers" if kind is tuple else f"{kind.__name__}, like the default {default!r}"
    raise ConfigError("E-CFG-22", f"{owner}.{name}: expected {wanted}, found {value!r}: change it")


def one_of(owner: str, name: str, value: str, valid: Collection[str]) -> None:
    """Check a closed choice; raises ConfigError E-CFG-22 with the nearest valid value."""
    if value not in valid:
        raise ConfigError("E-CFG-22", f"{owner}.{name}: found {value!r}: {nearest(value, valid)}")


def in_range(owner: str, name: str, value: float, low: float, high: float) -> None:
    """Check low <= value <= high; raises ConfigError E-CFG-22."""
    if not low <= value <= high:
        raise ConfigError("E-CFG-22", f"{owner}.{name}: expected {low} to {high}, found {value}: change it")


def image_shape(owner: str, schema: Schema, *, channels: Collection[int], sizes: Collection[int]) -> tuple[int, int]:
    """Read (channels, side) off a schema of square images; raises ConfigError E-CFG-23 when the model cannot take it.

    sizes: the sides it takes, in pixels (a `range` for an open choice).
    """
    if len(schema.classes) < 2:
        raise ConfigError("E-CFG-23", f"{owner} needs at least 2 classes, found {schema.classes}: name the label space")
    shape = schema.shape
    if len(shape) == 3 and shape[0] in channels and shape[1] == shape[2] and shape[1] in sizes:
        return shape[0], shape[1]
    sides = f"{min(sizes)} to {max(sizes)}" if isinstance(sizes, range) else " or ".join(map(str, sorted(sizes)))
    wanted = f"{' or '.join(map(str, sorted(channels)))} channel(s) and a square side of {sides} pixels"
    raise ConfigError("E-CFG-23", f"{owner} takes {wanted}, found {shape}: change image_size or the model")
