"""Checks of a method's hyper-parameters."""

from __future__ import annotations

from fl_core.errors import ConfigError


def one_of(method: object, option: str, valid: tuple[str, ...]) -> None:
    """Raise ConfigError (E-CFG-02) unless an option has one of these values."""
    if (found := getattr(method, option)) not in valid:
        raise ConfigError("E-CFG-02", f"{_name(method)}.{option}: expected one of {valid}, found {found!r}")


def at_least(method: object, low: float, *options: str) -> None:
    """Raise ConfigError (E-CFG-02) unless these options are finite numbers of at least `low`."""
    for option in options:
        if not low <= (found := getattr(method, option)) < float("inf"):
            raise ConfigError("E-CFG-02", f"{_name(method)}.{option}: expected {option} >= {low:g}, found {found}")


def above(method: object, low: float, *options: str) -> None:
    """Raise ConfigError (E-CFG-02) unless these options are finite numbers greater than `low`."""
    for option in options:
        if not low < (found := getattr(method, option)) < float("inf"):
            raise ConfigError("E-CFG-02", f"{_name(method)}.{option}: expected {option} > {low:g}, found {found}")


def within(method: object, low: float, high: float, *options: str) -> None:
    """Raise ConfigError (E-CFG-02) unless these options are numbers from `low` to `high`."""
    for option in options:
        if not low <= (found := getattr(method, option)) <= high:
            raise ConfigError("E-CFG-02", f"{_name(method)}.{option}: expected {low:g} to {high:g}, found {found}")


def _name(method: object) -> str:
    return str(getattr(method, "name", type(method).__name__))
