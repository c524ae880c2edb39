"""Privacy profiles, one object per run. To add one, add a module here and a line below."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fl_core.converter import Option, Value, stated
from fl_core.errors import ConfigError, RefusedError
from fl_core.methods import build_method
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.values import Layout
from privacy.accounting.gaussian import mu_of
from privacy.accounting.record_config import MIN_NOMINAL, RecordDpConfig
from privacy.accounting.shared_noise import SharedNoise
from privacy.accounting.uncertainty import RunNoise
from privacy.profiles.base import Config, PrivacyProfile
from privacy.profiles.plain import PlainProfile
from privacy.profiles.record import RecordProfile
from privacy.profiles.silo import SiloProfile

PROFILES: dict[str, type[PrivacyProfile]] = {
    "none": PlainProfile,
    "dp_record": RecordProfile,
    "dp_silo_small": SiloProfile,
}


def _resolve(privacy: NamedOptions) -> tuple[type[PrivacyProfile], Config | None]:
    """Return the profile's class and options; epsilon = inf is a run without privacy."""
    if privacy.name not in PROFILES:
        raise RefusedError(
            "E-PRIV-01",
            f"expected a privacy profile of {sorted(PROFILES)}, found {privacy.name!r}: "
            "upgrade this software, or choose another profile",
        )
    kind = PROFILES[privacy.name]
    if kind.config is None:
        if privacy.options:
            raise ConfigError("E-PRIV-20", f"profile {privacy.name!r} has no options, found {dict(privacy.options)}")
        return kind, None
    terms = kind.config.of(privacy.options)
    return (PlainProfile, None) if terms.epsilon == math.inf else (kind, terms)


def stated_options(name: str, options: Mapping[str, Value]) -> dict[str, Value]:
    """Omit options that were added later and have their default; for an unknown profile, return all options."""
    kind = PROFILES.get(name)
    return dict(options) if kind is None or kind.config is None else stated(kind.config, options)


def profile_of(run: RunSetup) -> PrivacyProfile:
    kind, terms = _resolve(run.manifest.privacy)
    return kind(run, terms)


def result_noise(manifest: RunManifest) -> RunNoise:
    """Return the noise of a run's results, building only its method."""
    return profile_of(RunSetup(manifest)).noise()


def is_private(privacy: NamedOptions) -> bool:
    return _resolve(privacy)[1] is not None


def hides_evaluations(privacy: NamedOptions) -> bool:
    """Return whether a run's test examples are private: evaluations are then noisy and charged."""
    terms = _resolve(privacy)[1]
    return terms is not None and terms.test_data != "public"


def private_form(method: NamedOptions, privacy: NamedOptions) -> tuple[NamedOptions, dict[str, Option]]:
    kind, terms = _resolve(privacy)
    built = build_method(method.name, method.options)
    form = {} if terms is None or not kind.private_form else built.private_form
    was: dict[str, Option] = {option: getattr(built, option) for option in form}
    return NamedOptions(method.name, {**method.options, **form}), was


def form_for_noise(manifest: RunManifest, width: int) -> NamedOptions:
    """Return a run's method with the options that follow from its noise, if it leaves them open.

    width: features of the body; a hospital that declared no size counts as the smallest.
    """
    method, terms = manifest.method, _resolve(manifest.privacy)[1]
    if not isinstance(terms, RecordDpConfig):
        return method
    n, noise = len(manifest.members), 1 / mu_of(terms.epsilon, terms.delta)
    noise = SharedNoise.of(manifest).of_all(noise) if terms.distributed else noise * math.sqrt(n)
    records = sum(max(member.units, MIN_NOMINAL) for member in manifest.members)
    chosen = build_method(method.name, method.options).for_noise(width, records, noise)
    return NamedOptions(method.name, {**method.options, **chosen})


def extra_parts(privacy: NamedOptions) -> Layout:
    kind, terms = _resolve(privacy)
    return {} if terms is None else kind.extra_parts(terms)
