"""From a run's privacy profile to its guards, or to a refusal before round 0.

Both sides read the profile from the manifest: a silo builds what leaves it from here, the coordinator what it undoes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fl_core.errors import ConfigError, RefusedError
from fl_core.fixed_point import FixedPoint
from fl_core.manifest import RunManifest
from fl_core.protocols import Guard


@dataclass(frozen=True, slots=True)
class Plan:
    """The guards of one run: `silo` ones are applied at the hospital, `incoming` ones are undone on the sum, reversed.

    arrival order on the way out is silo guards first, then what the accumulator does on arrival.
    """

    profile: str
    silo: tuple[Guard, ...]
    incoming: tuple[Guard, ...]


def _none(manifest: RunManifest) -> Plan:
    """No noise, no mask: bundles travel as float32 and are put on the grid when they are folded."""
    if manifest.privacy.options:
        raise ConfigError("E-PRIV-02", f"profile 'none' has no options, found {dict(manifest.privacy.options)}")
    return Plan("none", (), (FixedPoint(manifest.grid),))


PROFILES: Mapping[str, Callable[[RunManifest], Plan]] = {"none": _none}


def build(manifest: RunManifest) -> Plan:
    """Build the guards of a manifest.

    Raises RefusedError (E-PRIV-01) for a profile that this version does not know: it must not be ignored.
    """
    if manifest.privacy.name not in PROFILES:
        raise RefusedError(
            "E-PRIV-01",
            f"expected a privacy profile of {sorted(PROFILES)}, found {manifest.privacy.name!r}: "
            "this version cannot give what it promises; upgrade it or choose another profile",
        )
    return PROFILES[manifest.privacy.name](manifest)
