"""What an extension of each kind must be, so that a wrong one is refused when it is loaded and not in round 3."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass

from fl_core.errors import ConfigError
from fl_core.extensions import user_data as own_data
from fl_core.extensions import user_partition as own_partition
from fl_core.methods.fedavg import FedAvg


def accept(kind: str, name: str, value: object) -> None:
    """Check what is about to be loaded under a name, and forget what was read under it before.

    Raises ConfigError (E-CFG-02) on what is no such thing.
    """
    {"method": _method, "model": _model, "data": _data, "partition": _partition}[kind](name, value)


def _method(name: str, value: object) -> None:
    if not isinstance(value, type) or not issubclass(value, FedAvg):
        raise _wrong(name, "a method, a class below fl_core.methods.fedavg.FedAvg", value)
    _options(name, value)


def _model(name: str, value: object) -> None:
    if not isinstance(value, type) or not callable(getattr(value, "build", None)):
        raise _wrong(name, "a model, a class with build(schema)", value)
    _options(name, value)


def _options(name: str, kind: type) -> None:
    """Require a frozen dataclass whose fields have defaults: they are its options on every command line."""
    if not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise _wrong(name, "a frozen dataclass, whose fields are its options", kind)
    own = [n for n, hint in vars(kind).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
    if own and "__dataclass_fields__" not in vars(kind):
        raise _wrong(name, f"@dataclass(frozen=True, kw_only=True) above a class with options ({', '.join(own)})", kind)
    bare = [f.name for f in fields(kind) if f.default is MISSING]
    if bare:
        raise _wrong(name, "a plain default for each option", f"none for {', '.join(bare)}")
    try:
        kind()
    except TypeError as error:
        raise _wrong(name, "options that all have a default", str(error)) from error


def _data(name: str, value: object) -> None:
    own_data.require(name, value)
    own_data.forget()


def _partition(name: str, value: object) -> None:
    if isinstance(value, type):
        _options(name, value)
    own_partition.require(name, value)
    own_data.forget()


def _wrong(name: str, expected: str, found: object) -> ConfigError:
    what = f"the class {found.__name__}" if isinstance(found, type) else f"{found}"[:200]
    return ConfigError("E-CFG-02", f"{name}: expected {expected}, found {what}")
