"""A run built from its manifest, including its privacy profile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Self

from fl_core.aggregation.options import Options
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import Guards, RunSetup
from fl_core.rounds.torch_need import require_torch
from privacy import profiles
from privacy.profiles.base import PrivacyProfile


class CompiledRun(RunSetup):
    """A run built from a checked manifest. Coordinator and hospitals each build their own."""

    @classmethod
    def of(cls, manifest: RunManifest) -> Self:
        """Check a manifest and build the run.

        Raises RefusedError (E-PRIV-01) for an unknown profile, and as `RunManifest.require_possible`,
        `RunSetup.of`, `require_torch` and the profile's `check`.
        """
        manifest.require_possible()
        require_torch(manifest)
        run = cls(manifest)
        run.require_supported()
        run.profile.check()
        _ = run.guards, run.aggregator
        return run

    @cached_property
    def profile(self) -> PrivacyProfile:
        return profiles.profile_of(self)

    @cached_property
    def guards(self) -> Guards:
        return self._with_masked(self.profile.guards())

    @cached_property
    def limits(self) -> Options:
        return self.profile.aggregator(super().limits)

    def update_check(self, sizes: Mapping[str, DeclaredSize] | None = None) -> UpdateCheck:
        """Return the check of single updates; for private runs, with the manifest's sizes and the noise of counts."""
        check = super().update_check(sizes)
        if not self.private:
            return check
        tests = {name: size.test for name, size in check.sizes.items()}
        declared = {
            m.name: DeclaredSize(m.units or math.inf, tests.get(m.name, math.inf)) for m in self.manifest.members
        }
        noise = self.profile.noise()
        return replace(check, sizes=declared, noise=noise.counts, noisy_rows=noise.rows, signs=False)

    @property
    def private(self) -> bool:
        """Whether the run has a privacy profile with noise."""
        return self.profile.terms is not None
