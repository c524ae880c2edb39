"""The registry of methods: a literal dictionary, one file per method."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields

from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.methods.fedmr import FedMR
from fl_core.methods.fedprox import FedProx
from fl_core.protocols import Method

METHODS: Mapping[str, type[FedAvg]] = {"fedavg": FedAvg, "fedprox": FedProx, "fedmr": FedMR}


def build_method(name: str, options: Mapping[str, object]) -> Method:
    """Make a method from its registered name and options; raises ConfigError (E-CFG-01) with the nearest valid name."""
    if name not in METHODS:
        raise ConfigError(
            "E-CFG-01", f"expected a method of {sorted(METHODS)}, found {name!r}{_nearest(name, METHODS)}"
        )
    valid = {f.name: f for f in fields(METHODS[name])}
    for option in options:
        if option not in valid:
            raise ConfigError(
                "E-CFG-01", f"method {name} has the options {sorted(valid)}, found {option!r}{_nearest(option, valid)}"
            )
    return METHODS[name](**options)


def _nearest(word: str, valid: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(word, list(valid), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
