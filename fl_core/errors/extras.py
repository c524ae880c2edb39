"""Optional libraries: they are installed with an extra of the distribution, and imported when used.

The subpackages of `consilium` build on the core and are found by name; each one is an extra.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fl_core.errors import ConfigError


def installed(module: str) -> bool:
    """Tell whether a module can be imported, without importing it."""
    return find_spec(module) is not None


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional library. purpose: its user, as in "expected matplotlib for the pictures of an audit".

    Raises ConfigError (E-CFG-08) with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module.partition(".")[0], extra, purpose) from error


def require_installed(module: str, extra: str, purpose: str) -> None:
    """Raise as `require` if a library is not installed, without importing it."""
    if not installed(module):
        raise _missing(module, extra, purpose)


def load(place: str, purpose: str) -> Any:  # noqa: ANN401 - whatever has that name
    """Load `consilium.SUBPACKAGE...:NAME`. purpose: its user.

    Raises ConfigError (E-CFG-08) with the command that installs the subpackage's libraries, if one is missing.
    """
    module, _, name = place.partition(":")
    with requires_extra(module.split(".")[1], purpose):
        return getattr(importlib.import_module(module), name)


@contextmanager
def requires_extra(extra: str, purpose: str) -> Iterator[None]:
    """Convert a missing library to ConfigError (E-CFG-08) with the command that installs the extra.

    The error for a missing module of this software or of the standard library is raised unchanged, since no extra
    contains it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "consilium", *sys.stdlib_module_names):
            raise
        raise _missing(package, extra, purpose) from error


def _missing(package: str, extra: str, purpose: str) -> ConfigError:
    return ConfigError(
        "E-CFG-08", f"expected {package} for {purpose}, found no such package: pip install 'consilium-fl[{extra}]'"
    )
