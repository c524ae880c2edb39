"""What one run may be charged at each collection: what its manifest announced, and what the hospital's policy allows.

The records, or the hospital, that a run promises its epsilon to are held to that epsilon and to the policy's. Test
records in a run with record-level privacy are held to the evaluations of the whole run, the reserve included, which is
what the preview says of them, and to the policy's epsilon. In a run with silo-level privacy a record's release has half
the noise multiplier of the hospital's, so its RDP is at most four times the hospital's, and is held to that.
"""

from __future__ import annotations

from collections.abc import Mapping

from fl_core.methods import build_method
from fl_core.rounds.manifest import RunManifest
from privacy import profiles as plan
from privacy.accounting.accountant import Bound, Filter, Mechanism, Most
from privacy.accounting.record_config import Terms
from privacy.accounting.release_plan import HOSPITAL, TEST, TRAIN
from privacy.silo_dp.config import SiloTerms

RECORD_OF_A_SILO = 4.0
"""RDP of a record per RDP of its hospital: alpha / (2 (z/2)^2) over alpha / (2 z^2)."""


def run_bounds(manifest: RunManifest, policy: Filter | None = None) -> Mapping[str, tuple[Bound, ...]]:
    """Return the bounds of a run by collection (train, test, hospital); policy: the most that one run may spend."""
    terms = plan.terms_of(manifest.privacy)
    if terms is None:
        return {}
    own = Filter.of(terms.epsilon, terms.delta)
    promised = (own, policy) if policy else (own,)
    if isinstance(terms, SiloTerms):
        record = tuple(Most(f.order, RECORD_OF_A_SILO * f.bound) for f in promised)
        return {HOSPITAL: promised, TRAIN: record, TEST: record}
    tests = Most.of(_evaluations(manifest, terms), own.order)
    return {TRAIN: promised, TEST: (tests, policy) if policy else (tests,)}


def _evaluations(manifest: RunManifest, terms: Terms) -> list[Mechanism]:
    """List what a whole run releases of test records, every round taken part in and some repeated."""
    measured = build_method(manifest.method.name, manifest.method.options).has_global_model
    times = (manifest.rounds + terms.reserve_rounds) * (measured + manifest.personal) + measured
    return [Mechanism(terms.metric_noise, 1.0, times)] if times and terms.test_data == "private" else []
