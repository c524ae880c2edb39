"""The terms of a masked run from its manifest, which `privacy.secagg` does not know; without torch."""

from __future__ import annotations

from fl_core.rounds.manifest import RunManifest
from privacy.secagg.terms import SecaggRun


def secagg_run(run_id: str, manifest: RunManifest) -> SecaggRun:
    """Return the secure aggregation terms of a masked run; raises ConfigError (E-CFG-02) as `SecaggRun`."""
    assert manifest.secagg is not None
    digest, names = bytes.fromhex(manifest.digest()), tuple(member.name for member in manifest.members)
    return SecaggRun(run_id, digest, names, manifest.rounds, manifest.grid.ring, manifest.secagg)
