"""Secure aggregation terms from a manifest, since `privacy.secagg` does not import manifests. Imports no torch."""

from __future__ import annotations

from fl_core.rounds.manifest import RunManifest
from privacy.secagg.terms import SecaggRun


def secagg_run(run_id: str, manifest: RunManifest) -> SecaggRun:
    """Return the secure aggregation terms of a masked run; raises ConfigError (E-CFG-02) as `SecaggRun`."""
    assert manifest.secagg is not None
    digest, names = bytes.fromhex(manifest.digest()), tuple(member.name for member in manifest.members)
    return SecaggRun(run_id, digest, names, manifest.rounds, manifest.grid.ring, manifest.secagg)
