"""Distributions with extensions, as an installer leaves them, in a folder on the path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from fl_core.extensions import loading, registry

METHOD = """
from dataclasses import dataclass

from fl_core.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    mu: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Undeclared(FedAvg):
    pass
"""


@dataclass
class Installed:
    """A distribution in a folder."""

    folder: Path
    package: str

    @property
    def module(self) -> Path:
        return self.folder / self.package / "method.py"

    @property
    def imported(self) -> bool:
        return f"{self.package}.method" in sys.modules

    @property
    def reference(self) -> str:
        return f"{self.package}.method:Mine"

    def identity(self) -> registry.Extension:
        return loading.identify("method", self.reference)


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str = "mine_package",
    *,
    name: str = "Mine_Package",
    version: str = "1.2",
    points: Mapping[str, str] | None = None,
    source: str = METHOD,
) -> Installed:
    """Install a package with a method; what is loaded of it is forgotten after the test."""
    made = Installed(folder, package)
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").touch()
    made.module.write_text(source)
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    declared = {"mine": made.reference} if points is None else points
    lines = "".join(f"{key} = {value}\n" for key, value in declared.items())
    (info / "entry_points.txt").write_text(f"[consilium.methods]\n{lines}")
    if str(folder) not in sys.path:
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(registry, "_LOADED", {})
    monkeypatch.setattr(loading, "_IMPORTED", {})
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    return made
