"""The software bill of materials of a release: CycloneDX 1.6 as JSON, from what `uv pip compile` locked.

A component is a distribution of the lock with its version, its digests and its package URL. It has no licence, since a
lock has none, and no place to download it from, since that is whoever installs to choose.
"""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

SPEC = "1.6"
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^ ;\\]+)(?: ; ([^\\]+?))?(?: \\)?")
_HASH = re.compile(r"    --hash=sha256:([0-9a-f]{64})(?: \\)?")
_NAMESPACE = uuid.UUID("9d1f5a52-8f0c-4c0e-9d0b-6d6a4a0c6f11")
"""Of serial numbers, which follow from the content: equal bills have one."""
_DEVELOPMENT = ("dev", "docs", "ray")
"""Extras that no service has; `ray` is locked apart."""
_SERVICES = ("pages",)
"""Extras in the locks of services."""


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """One entry of a lock. marker: on which machines it is installed; empty: on all   via: who requires it, by name.

    digests: SHA-256 of each of its files, of which an installation takes one.
    """

    name: str
    version: str
    marker: str
    digests: tuple[str, ...]
    via: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def normalized(name: str) -> str:
    """Write a distribution's name as package URLs have it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> list[LockedPackage]:
    """Read a lock with digests; raises ValueError, with the line, on anything else."""
    entries: list[LockedPackage] = []
    pin: tuple[str, str, str] | None = None
    digests: list[str] = []
    via: list[str] = []

    def finish() -> None:
        if pin is not None:
            if not digests:
                raise ValueError(f"expected a digest for {pin[0]}=={pin[1]}, found none: make lock")
            entries.append(LockedPackage(*pin, tuple(digests), tuple(via)))

    for number, line in enumerate(text.splitlines(), start=1):
        if match := _PIN.fullmatch(line):
            finish()
            pin, digests, via = (normalized(match[1]), match[2], (match[3] or "").strip()), [], []
        elif (match := _HASH.fullmatch(line)) and pin:
            digests.append(match[1])
        elif line.startswith("    # ") and pin:
            name = line[5:].strip().removeprefix("via").strip().partition(" ")[0]
            via += [] if name in ("", "-c", "-r") else [normalized(name)]
        elif line and not line.startswith("#"):
            raise ValueError(
                f"expected a lock of `uv pip compile --generate-hashes`, found in line {number}: {line[:80]}"
            )
    finish()
    return entries


def scopes(entries: Sequence[LockedPackage], pyproject: Mapping[str, object]) -> dict[str, str]:
    """Say of each name whether every service has it ("required"), an extra brings it ("optional"), or neither does."""
    project = pyproject["project"]
    assert isinstance(project, dict)
    requires: dict[str, set[str]] = {}
    for entry in entries:
        for name in entry.via:
            requires.setdefault(name, set()).add(entry.name)
    own_name = normalized(project["name"])
    extras: dict[str, list[str]] = project["optional-dependencies"]
    services = [*project["dependencies"], *(word for extra in _SERVICES for word in extras.get(extra, ()))]
    direct = _closure(_names(services, own_name), requires)
    wanted = [word for extra, words in extras.items() if extra not in _DEVELOPMENT for word in words]
    optional = _closure(_names(wanted, own_name), requires)
    return {
        e.name: "required" if e.name in direct else "optional" if e.name in optional else "excluded" for e in entries
    }


def _names(requirements: Iterable[str], own_name: str) -> set[str]:
    """Name what requirements ask for; references to our own extras are left out."""
    names = {normalized(re.split(r"[\[<>=~!; ]", word)[0]) for word in requirements}
    return names - {own_name}


def _closure(names: set[str], requires: Mapping[str, set[str]]) -> set[str]:
    closure, left = set[str](), list(names)
    while left:
        name = left.pop()
        if name not in closure:
            closure.add(name)
            left += requires.get(name, set())
    return closure


def bill(lock: str, pyproject: str, wheel: tuple[str, str], made: float) -> str:
    """Write the bill of a release. wheel: its name and SHA-256   made: Unix seconds.

    *Guarantees*: equal arguments give equal bytes; every entry of the lock is in it, once, with all its digests.
    """
    entries, project = read_lock(lock), tomllib.loads(pyproject)
    metadata = project["project"]
    scope = scopes(entries, project)
    own_name = normalized(metadata["name"])
    purls: dict[str, list[str]] = {}
    for entry in entries:
        purls.setdefault(entry.name, []).append(entry.purl)
    root = f"pkg:pypi/{own_name}@{metadata['version']}"
    depends: dict[str, list[str]] = {root: [], **{entry.purl: [] for entry in entries}}
    for entry in entries:
        for name in entry.via:
            for purl in [root] if name == own_name else purls.get(name, []):
                depends[purl].append(entry.purl)
    document: dict[str, object] = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(made, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": metadata["name"],
                "version": metadata["version"],
                "description": metadata["description"],
                "licenses": [{"license": {"id": metadata["license"]}}],
                "purl": root,
                "hashes": [{"alg": "SHA-256", "content": wheel[1]}],
                "properties": [{"name": "consilium:wheel", "value": wheel[0]}],
            },
        },
        "components": [_component(entry, scope[entry.name]) for entry in sorted(entries, key=lambda e: e.purl)],
        "dependencies": [{"ref": ref, "dependsOn": sorted(set(on))} for ref, on in sorted(depends.items())],
    }
    named = uuid.uuid5(_NAMESPACE, json.dumps(document, sort_keys=True))
    return json.dumps({**document, "serialNumber": f"urn:uuid:{named}"}, indent=1, sort_keys=True) + "\n"


def _component(entry: LockedPackage, scope: str) -> dict[str, object]:
    """Write one component. Its digests are of the files that an installation may choose from: any one of them is it."""
    component: dict[str, object] = {
        "type": "library",
        "bom-ref": entry.purl,
        "name": entry.name,
        "version": entry.version,
        "purl": entry.purl,
        "scope": scope,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in sorted(entry.digests)],
    }
    if entry.marker:
        component["properties"] = [{"name": "consilium:installed-where", "value": entry.marker}]
    return component
