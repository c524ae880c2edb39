"""What follows from a run's manifest, its privacy profile included: what every service makes of a manifest, once."""

from __future__ import annotations

from functools import cached_property
from typing import Self

from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import Guards, RunSetup
from privacy import profiles
from privacy.profiles.base import PrivacyProfile


class CompiledRun(RunSetup):
    """A run whose manifest was checked, with all that it names built. Both sides make their own.

    Its guards are those of its profile, and silos open examples by `profile.data_factory` alone.
    """

    @classmethod
    def of(cls, manifest: RunManifest) -> Self:
        """Check a manifest and build what it names, so that neither side trusts the other's numbers.

        Raises RefusedError (E-PRIV-01) for a profile that this version does not know: it must not be ignored;
        ConfigError and RefusedError as `RunSetup.of` and as the profile's `check`.
        """
        run = cls(manifest)
        run.profile.check()
        _ = run.method, run.guards
        return run

    @cached_property
    def profile(self) -> PrivacyProfile:
        return profiles.profile_of(self)

    @cached_property
    def guards(self) -> Guards:
        return self.profile.guards()

    @property
    def private(self) -> bool:
        """Whether the run asks for noise."""
        return self.profile.terms is not None
