"""Keyword arguments of Python in place of a command's words: `method="fedmr", train__lr=0.1, train={"epochs": 2}`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.config.hydra_config import GROUPS
from fl_core.errors import ConfigError


class Keywords:
    """Words that choose from groups, and values that override what the words compose.

    In names, `__` stands for the dot. Texts reach the configuration as they are, without Hydra's grammar.
    """

    def __init__(self, arguments: Mapping[str, object] | None = None) -> None:
        """Take arguments; None chooses nothing. Raises ConfigError (E-CFG-02) on a value that is not plain."""
        self.words = list[str]()
        self.values = dict[str, Any]()
        for key, value in (arguments or {}).items():
            path = key.replace("__", ".")
            if not (path in GROUPS and value is None):
                self.put(path, value)

    def put(self, path: str, value: object) -> None:
        """Store a value, or all values of a mapping, under a path; a name at a group's path is its choice."""
        group = path in GROUPS
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self.put(path if group and key == "name" else f"{path}.{key}", inner)
        elif not group:
            *outer, last = path.split(".")
            below = self.values
            for key in outer:
                below = below.setdefault(key, {})
                if not isinstance(below, dict):
                    raise ConfigError("E-CFG-02", f"{path}: {key} has two values, but takes one")
            below[last] = _plain(path, value)
        elif isinstance(value, str):
            self.words.append(f"{path}={value}")
        else:
            raise ConfigError("E-CFG-02", f"{path}: expected a name, found {value!r}")


def _plain(path: str, value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(path, v) for v in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError("E-CFG-02", f"{path}: expected a plain value, found {value!r}"[:300])
