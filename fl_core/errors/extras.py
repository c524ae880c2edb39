"""Libraries that only some of us need: they come with an extra of the distribution, and are imported when used."""

from __future__ import annotations

import importlib
from types import ModuleType

from fl_core.errors import ConfigError


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional library. purpose: what needs it, as in "expected matplotlib for the pictures of an audit".

    Raises ConfigError (E-CFG-08) with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            "E-CFG-08",
            f"expected {package} for {purpose}, found no such package: pip install 'consilium-fl[{extra}]'",
        ) from error
