"""From plain values (JSON, TOML, YAML) to dataclasses: unknown names and wrong types are refused.

The dataclass is the schema: its fields' names, types and defaults. One converter reads the options of methods, models
and privacy profiles, a run's configuration, its manifest and a hospital's policy, so that all refuse the same input.
The dataclass checks its ranges itself (`validate`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import GenericAlias
from typing import Any, Literal, TypeVar, get_args, get_origin

from cattrs import AttributeValidationNote, Converter, IterableValidationNote
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, override

from fl_core.errors import ConfigError, FederationError
from fl_core.suggest import did_you_mean, suggest

T = TypeVar("T")
Option = str | int | float | bool | list[int] | None
"""Possible values of an option of a method, a model or a privacy profile."""

SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_NAMES = "names with values"
_Read = Callable[[Any, Any], Any]
_EXACT = 2**53
"""Whole numbers up to here are exact in floats."""
_WHOLE = range(-(2**63), 2**63)


class ConversionError(ValueError):
    """A value does not fit its dataclass. The message names the place, the expected and the actual value.

    unknown: whether the error is a name that the dataclass does not have.
    """

    def __init__(self, where: str, message: str, unknown: bool = False) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.unknown = unknown


def structure(kind: type[T], raw: object, where: str) -> T:
    """Build a dataclass from plain values; `where` names them in messages.

    Raises ConversionError on an unknown or missing name, a wrong type or NaN, and the dataclass's own error on a value
    out of range. An int is accepted as a float and a list as a tuple; nothing else is converted.
    """
    try:
        return CONVERTER.structure(raw, kind)
    except (BaseValidationError, _UnexpectedError) as error:
        raise _first_error(error, where) from error


def read_options(kind: type[T], owner: str, options: Mapping[str, object]) -> T:
    """Build the options of a method, a model or a profile.

    Raises ConfigError E-CFG-01 (unknown option), E-CFG-02 (value of a wrong type), or the options' own errors.
    """
    try:
        return structure(kind, options, owner)
    except ConversionError as error:
        raise ConfigError("E-CFG-01" if error.unknown else "E-CFG-02", str(error)) from error


Value = TypeVar("Value")


def stated(kind: type, options: Mapping[str, Value]) -> dict[str, Value]:
    """Omit options that were added later and have their default value (`omitted_at_default` of the class).

    So digests of earlier manifests stay the same.
    """
    gained: frozenset[str] = getattr(kind, "omitted_at_default", frozenset())
    default = {f.name: f.default for f in fields(kind) if f.name in gained}
    return {key: value for key, value in options.items() if key not in gained or value != default[key]}


def rename(kind: type, **names: str) -> None:
    renamed: dict[str, Any] = {field: override(rename=name) for field, name in names.items()}
    read: _Read = make_dict_structure_fn(kind, CONVERTER, **renamed)
    CONVERTER.register_structure_hook(kind, _checked(_NAMES, Mapping, read))


def parse_json(text: str) -> object:
    """Read untrusted JSON; raises ConversionError if it is invalid or repeats a name."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # also for deep nesting, or a number of thousands of digits
        raise ConversionError("", f"expected JSON, found: {error}") from error


def shown(value: object) -> str:
    """Format a value briefly, without very long numbers and deep nesting."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} with thousands of digits or nesting levels"
    return text if len(text) <= 80 else f"{text[:80]}..."


class _UnexpectedError(ValueError):
    def __init__(self, wanted: str, found: object, hint: str = "") -> None:
        super().__init__(f"expected {wanted}, found {shown(found)}{hint and f': {hint}'}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} twice in one object")
    return mapping


def _first_error(error: BaseException, where: str) -> Exception:
    """Reduce a tree of errors to one: an unknown name before a missing one, otherwise the first."""
    if not isinstance(error, BaseValidationError):
        return _conversion_error(error, where)
    inner = next((e for e in error.exceptions if isinstance(e, ForbiddenExtraKeysError)), error.exceptions[0])
    for note in getattr(inner, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            where = f"{where}.{note.name}" if where else note.name
        elif isinstance(note, IterableValidationNote):
            where = f"{where}[{shown(note.index)}]"
    return _first_error(inner, where)


def _conversion_error(error: BaseException, where: str) -> Exception:
    if isinstance(error, FederationError):
        return error
    if isinstance(error, ForbiddenExtraKeysError):
        valid, name = [f.name for f in fields(error.cl)], sorted(map(str, error.extra_fields))[0]
        return ConversionError(where, f"there is no {shown(name)}: {suggest(name, valid)}", unknown=True)
    return ConversionError(where, "expected a value, found none" if isinstance(error, KeyError) else str(error))


# ---- how each kind of type is read ----------------------------------------------------------------------------------


def _scalar(value: object, kind: type) -> object:
    if kind is float and type(value) is int and abs(value) <= _EXACT:
        return float(value)
    if type(value) is not kind or not _plain(value):
        wanted = f"{SCALARS[kind]} of 64 bits" if type(value) is kind is int else SCALARS[kind]
        raise _UnexpectedError(wanted, value)
    return value


def _option(value: object, _: object) -> object:
    whole_numbers = type(value) is list and all(type(v) is int and _plain(v) for v in value)
    if value is None or whole_numbers or _plain(value):
        return value
    raise _UnexpectedError("a plain value", value)


def _plain(value: object) -> bool:
    """Tell whether a value is text, a boolean, a whole number of 64 bits, or a float that is not NaN."""
    return value in _WHOLE if type(value) is int else type(value) in SCALARS and value == value


def _literal(value: object, kind: object) -> object:
    if type(value) is str and value in get_args(kind):
        return value
    hint = did_you_mean(value, get_args(kind)) if isinstance(value, str) else ""
    raise _UnexpectedError(f"one of {', '.join(map(repr, get_args(kind)))}", value, hint)


def _checked(wanted: str, accepted: type | tuple[type, ...], read: _Read) -> _Read:
    def checked(value: Any, kind: Any) -> Any:  # noqa: ANN401 - as cattrs types its hooks
        if not isinstance(value, accepted):
            raise _UnexpectedError(wanted, value)
        return read(value, kind)

    return checked


def _tuple(kind: Any) -> _Read:  # noqa: ANN401
    plain = GenericAlias(list, get_args(kind)[:1])
    read = CONVERTER.get_structure_hook(plain)
    return _checked("a list", (list, tuple), lambda value, _: tuple(read(value, plain)))


def _mapping(kind: Any) -> _Read:  # noqa: ANN401
    plain = GenericAlias(dict, get_args(kind))
    read = CONVERTER.get_structure_hook(plain)
    return _checked(_NAMES, Mapping, lambda value, _: read(value, plain))


def _origin(kind: object) -> object:
    return get_origin(kind)  # as an object: mypy takes the hooks' argument for a ParamSpec


CONVERTER = Converter(forbid_extra_keys=True)
for scalar in SCALARS:
    CONVERTER.register_structure_hook(scalar, _scalar)
CONVERTER.register_structure_hook(Option, _option)
CONVERTER.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
CONVERTER.register_structure_hook_func(lambda kind: _origin(kind) is Literal, _literal)
CONVERTER.register_structure_hook_factory(lambda kind: _origin(kind) is tuple, _tuple)
CONVERTER.register_structure_hook_factory(lambda kind: _origin(kind) is Mapping, _mapping)
CONVERTER.register_structure_hook_factory(
    is_dataclass, lambda kind: _checked(_NAMES, Mapping, make_dict_structure_fn(kind, CONVERTER))
)
