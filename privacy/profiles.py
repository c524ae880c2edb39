"""From a run's privacy profile to its doors and guards, or to a refusal before round 0.

Both sides read the profile from the manifest: a silo builds its doors and what leaves it from here, the coordinator
what it undoes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fl_core.aggregation.fixed_point import FixedPoint
from fl_core.converter import Option
from fl_core.errors import ConfigError, RefusedError
from fl_core.methods import build_method
from fl_core.rounds import capabilities
from fl_core.rounds.manifest import Choice, RunManifest
from fl_core.types.enums import Capability
from fl_core.types.interfaces import Guard
from fl_core.types.values import Layout
from privacy.accounting import ranges
from privacy.accounting.record_config import Terms
from privacy.silo_dp import adaptive_clipping as adaptive
from privacy.silo_dp.config import SiloTerms
from privacy.silo_dp.mechanism import silo_level


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run's profile means.

    private: hospitals open what `privacy.data_access.doors_of` makes, and nothing else, to their examples
    silo: guards applied at the hospital; incoming: guards undone on the sum, reversed. On the way out, silo guards come
    first, then what the accumulator does on arrival.
    """

    profile: str
    silo: tuple[Guard, ...]
    incoming: tuple[Guard, ...]
    private: bool = False


def _none(manifest: RunManifest) -> Plan:
    """No noise, no mask: bundles travel as float32 and are put on the grid when they are folded."""
    if manifest.privacy.options:
        raise ConfigError("E-PRIV-20", f"profile 'none' has no options, found {dict(manifest.privacy.options)}")
    return Plan("none", (), (FixedPoint(manifest.grid),))


def _dp_record(manifest: RunManifest) -> Plan:
    """Record-level differential privacy at each hospital; epsilon = inf is the plain run itself."""
    return Plan("dp_record", (), (FixedPoint(manifest.grid),), is_private(manifest.privacy))


def _dp_silo_small(manifest: RunManifest) -> Plan:
    """Silo-level differential privacy of small payloads; epsilon = inf is the plain run itself."""
    grid = FixedPoint(manifest.grid)
    if not is_private(manifest.privacy):
        return Plan("dp_silo_small", (), (grid,))
    guard = silo_level(manifest)
    return Plan("dp_silo_small", (guard,), (grid, guard), private=True)


SILO_LEVEL = "dp_silo_small"
PROFILES: Mapping[str, Callable[[RunManifest], Plan]] = {
    "none": _none,
    "dp_record": _dp_record,
    SILO_LEVEL: _dp_silo_small,
}


def is_private(privacy: Choice) -> bool:
    """Tell whether a profile asks for noise; raises ConfigError on terms that cannot be."""
    kinds: Mapping[str, type[Terms] | type[SiloTerms]] = {"dp_record": Terms, "dp_silo_small": SiloTerms}
    return privacy.name in kinds and kinds[privacy.name].of(privacy.options).epsilon != float("inf")


def terms_of(privacy: Choice) -> Terms | SiloTerms | None:
    """Return the terms of a private run, of records or of hospitals; None for a run without privacy."""
    if not is_private(privacy):
        return None
    return (SiloTerms if privacy.name == SILO_LEVEL else Terms).of(privacy.options)


def formed(method: Choice, privacy: Choice) -> tuple[Choice, dict[str, Option]]:
    """Give a method the form that a run with record-level privacy needs, and the values that this replaced.

    Both are as they were where the run has no such privacy, or the method needs no other form.
    """
    if privacy.name != "dp_record" or not is_private(privacy):
        return method, {}
    built = build_method(method.name, method.options)
    form = built.private_form
    was: dict[str, Option] = {option: getattr(built, option) for option in form}
    return Choice(method.name, {**method.options, **form}), was


def parts(privacy: Choice) -> Layout:
    """Return what a profile adds to the layout of the method's bundles."""
    terms = terms_of(privacy)
    return {adaptive.PART: adaptive.SPEC} if isinstance(terms, SiloTerms) and terms.adaptive else {}


def build(manifest: RunManifest) -> Plan:
    """Build what a manifest's profile means; both sides do, so that neither trusts the other's numbers.

    Raises RefusedError (E-PRIV-01) for a profile that this version does not know: it must not be ignored; (E-PRIV-20)
    on a number of a private run outside its range; ConfigError (E-CFG-08) when the method lacks what a private run
    asks of it.
    """
    if manifest.privacy.name not in PROFILES:
        raise RefusedError(
            "E-PRIV-01",
            f"expected a privacy profile of {sorted(PROFILES)}, found {manifest.privacy.name!r}: "
            "this version cannot give what it promises; upgrade it or choose another profile",
        )
    if is_private(manifest.privacy):
        ranges.check(manifest)
    plan = PROFILES[manifest.privacy.name](manifest)
    if manifest.privacy.name == "dp_record" and plan.private:
        method = build_method(manifest.method.name, manifest.method.options)
        capabilities.refuse(method, {Capability.DIFFERENTIAL_PRIVACY})
    return plan
