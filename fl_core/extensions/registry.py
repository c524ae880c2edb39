"""The extensions that this process has loaded, and the entry points of installed distributions. Imports none of them.

Methods, models, data sets and partitions look up names here that are not built in. `loading` fills the registry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from fl_core.converter import shown
from fl_core.errors import ConfigError
from fl_core.suggest import suggest

_GROUPS = {"method": "methods", "model": "models", "data": "data", "partition": "partitions"}
KINDS = tuple(_GROUPS)
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class Extension:
    """Code of another distribution that a run uses, as its manifest names it.

    Attributes:
        kind: one of KINDS
        name: `package.module:Name`
        distribution, version: as installed; empty for code that is not installed, which only simulations may use
        digest: BLAKE3 of all files of the package
    """

    kind: str
    name: str
    distribution: str = ""
    version: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        printed = all(text.isprintable() and len(text) <= _MAX_CHARS for text in (self.distribution, self.version))
        sound = self.kind in KINDS and is_reference(self.name) and re.fullmatch(r"[0-9a-f]{0,64}", self.digest)
        if not (printed and sound):
            raise ConfigError(
                "E-CFG-02",
                f"expected an extension with a kind of {KINDS}, a name like package.module:Name, a distribution, its "
                f"version and a digest, found {shown(self.kind)}, {shown(self.name)}, {shown(self.distribution)}, "
                f"{shown(self.version)}, {shown(self.digest)}",
            )

    def __str__(self) -> str:
        where = f"{self.distribution} {self.version}" if self.distribution else "no distribution"
        return f"{self.name} of {where} (code {self.digest[:16]})"


Entry = tuple[object, Extension]
_LOADED: dict[tuple[str, str], Entry] = {}


def entry(kind: str, name: str) -> Entry | None:
    """Return a loaded extension with its identity; None if there is none of this name."""
    return _LOADED.get((kind, name))


def loaded(kind: str, name: str) -> object | None:
    """Return a loaded extension, a class or an object of this process; None if there is none of this name."""
    pair = entry(kind, name)
    return pair and pair[0]


def identity(kind: str, name: str) -> Extension | None:
    """Return the identity of a loaded extension; None if there is none of this name."""
    pair = entry(kind, name)
    return pair and pair[1]


def register(kind: str, name: str, loaded_entry: Entry | None) -> None:
    """Set the extension of this kind and name in this process. loaded_entry: None removes it."""
    if loaded_entry is None:
        _LOADED.pop((kind, name), None)
    else:
        _LOADED[kind, name] = loaded_entry


def is_reference(word: str) -> bool:
    return len(word) <= _MAX_CHARS and _REFERENCE.fullmatch(word) is not None


def unknown(kind: str, name: str, valid: Mapping[str, object] | Sequence[str]) -> ConfigError:
    """Create the error (E-CFG-01) for a name that is neither built in nor a loaded extension."""
    if is_reference(name):
        return ConfigError(
            "E-CFG-01",
            f"expected a {kind} that is loaded here, found {name!r}: install its distribution; a service runs it if "
            "its administrator names that distribution (coordinator serve --extension, policy.toml [runs] "
            "extensions)",
        )
    return ConfigError("E-CFG-01", f"there is no {kind} {name!r}: {suggest(name, valid)}")


def require_named(method: str, model: str, named: Sequence[Extension]) -> None:
    """Raise ConfigError (E-CFG-08) unless a manifest lists exactly the extensions of its method and its model.

    A hospital could not decide about code that is missing in the list.
    """
    used = {(kind, name) for kind, name in (("method", method), ("model", model)) if is_reference(name)}
    if sorted(used) != sorted((extension.kind, extension.name) for extension in named):
        raise ConfigError(
            "E-CFG-08",
            f"expected a manifest that names the code of {shown(sorted(n for _, n in used))}, found "
            f"{shown([extension.name for extension in named])}: both sides must run the same version",
        )


def require_same(method: str, model: str, named: Sequence[Extension]) -> None:
    """Raise ConfigError: E-CFG-08 if this process has loaded other code than a manifest names, E-CFG-01 if none.

    Also raises as `require_named`.
    """
    require_named(method, model, named)
    for wanted in named:
        present = identity(wanted.kind, wanted.name)
        if present is None:
            raise unknown(wanted.kind, wanted.name, ())
        if present != wanted:
            raise ConfigError("E-CFG-08", f"expected {wanted}, found {present}: install that version and start again")


# ---- what is installed ----------------------------------------------------------------------------------------------


class EntryPoint(NamedTuple):
    """An entry point of an installed distribution. reference: `package.module:Name`."""

    kind: str
    name: str
    reference: str
    distribution: str
    version: str

    def is_of(self, distribution: str) -> bool:
        return normalised(self.distribution) == normalised(distribution)


def entry_points(kinds: Sequence[str] = KINDS) -> list[EntryPoint]:
    """List what all installed distributions declare, by kind and name."""
    return [
        EntryPoint(kind, p.name, p.value, p.dist.name if p.dist else "", p.dist.version if p.dist else "")
        for kind in kinds
        for p in sorted(metadata.entry_points(group=f"consilium.{_GROUPS[kind]}"), key=lambda p: (p.name, p.value))
    ]


def normalised(distribution: str) -> str:
    """Normalise a distribution's name as package indexes do: "My_Package" and "my-package" are equal."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def installed(allowed: Sequence[str]) -> dict[str, str]:
    """Describe, for each entry of an allow-list ("name" or "name==version"), the installed version; imports none."""
    points, states = entry_points(), {}
    for entry in allowed:
        name, _, version = (part.strip() for part in entry.partition("=="))
        matching = [point for point in points if point.is_of(name)]
        have = matching[0].version if matching else ""
        what = ", ".join(f"{point.kind} {point.reference}" for point in matching)
        states[entry] = (
            f"not installed, found {have or 'none'}" if not matching or version not in ("", have) else f"{have}: {what}"
        )
    return states
