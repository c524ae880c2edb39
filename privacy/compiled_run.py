"""What follows from a run's manifest, its privacy profile included: what every service makes of a manifest, once."""

from __future__ import annotations

from dataclasses import dataclass

from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from privacy import profiles


@dataclass(frozen=True, eq=False)
class CompiledRun(RunSetup):
    """A run whose manifest was checked, with all that it names built. Both sides make their own.

    private: silos reach examples through the doors of the run's profile alone.
    """

    private: bool = False

    @classmethod
    def of(cls, manifest: RunManifest) -> CompiledRun:
        """Check a manifest and build what it names; raises as `RunSetup.of` and `privacy.profiles.build`."""
        plan = profiles.build(manifest)
        return cls(manifest, RunSetup.of(manifest).method, plan.incoming, plan.silo, plan.private)
