"""What a private run cost each hospital, computed from what was written in its book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_core.rounds.manifest import RunManifest
from privacy.accounting.accountant import Mechanism, epsilon_prv, epsilon_rdp, replace_one
from privacy.accounting.record_config import Terms
from privacy.accounting.release_plan import HOSPITAL, TEST, TRAIN, Release
from privacy.profiles import SILO_LEVEL, is_private
from privacy.silo_dp.config import SiloTerms, analytic_epsilon, participations
from privacy.silo_dp.mechanism import coordinates, silo_level

HOSPITAL_HIDDEN = (
    "Silo-level privacy hides, within epsilon, what all data of a hospital change, and so which classes it treats; "
    "that it takes part is not hidden."
)
CLASSES_SHOW = (
    "Record-level privacy does not hide which classes a hospital treats: "
    "without secure aggregation its update shows them."
)


def privacy_report(manifest: RunManifest, books: Sequence[Sequence[Release]]) -> Mapping[str, object]:
    """Report the spending of a run: epsilon per hospital and the largest, by both accountants.

    `private` is False where noise came from a seed, as `rng` says; unit, adjacency, accountant and the place of noise
    are named.
    """
    terms = Terms.of(manifest.privacy.options)

    def spent(book: Sequence[Release], collection: str) -> float:
        return epsilon_rdp([r.mechanism for r in book if r.collection == collection], terms.delta)

    train = [spent(book, TRAIN) for book in books]
    worst = books[max(range(len(books)), key=train.__getitem__)]
    largest = max(train)
    twice, more = replace_one(largest, terms.delta)
    return {
        "profile": manifest.privacy.name,
        "private": terms.rng == "secure",
        "rng": terms.rng,
        "unit": "record, or the group that the data names",
        "adjacency": "add or remove one unit",
        "accountant": "RDP; PRV for information",
        "noise": "at the hospital, before anything leaves",
        "delta": terms.delta,
        "epsilon_target": terms.epsilon,
        "epsilon": largest,
        "epsilon_prv": epsilon_prv([r.mechanism for r in worst if r.collection == TRAIN], terms.delta),
        "epsilon_replace_one": {"epsilon": twice, "delta": more},
        "epsilon_by_silo": dict(zip([m.name for m in manifest.members], train, strict=True)),
        "epsilon_test_data": max(spent(book, TEST) for book in books),
        "note": CLASSES_SHOW,
    }


def silo_report(manifest: RunManifest, books: Sequence[Sequence[Release]]) -> Mapping[str, object]:
    """Report the spending of a run with silo-level privacy: a release of rate 1 per round that a silo took part in.

    epsilon_record: what it cost a single training record, for which the same noise is half as large (access.py).
    """
    terms, guard = SiloTerms.of(manifest.privacy.options), silo_level(manifest)

    def history(book: Sequence[Release], collection: str) -> list[Mechanism]:
        return [r.mechanism for r in book if r.collection == collection]

    histories = [history(book, HOSPITAL) for book in books]
    spent = [epsilon_rdp(h, terms.delta) for h in histories]
    worst = histories[max(range(len(spent)), key=spent.__getitem__)]
    twice, more = replace_one(max(spent), terms.delta)
    central = terms.placement == "central"
    return {
        "profile": manifest.privacy.name,
        "private": terms.rng == "secure",
        "rng": terms.rng,
        "unit": "hospital: all its records",
        "adjacency": "add or remove one hospital's data; its place in the roster stays",
        "accountant": "RDP, q = 1 per round taken part in; exact Gaussian curve for information",
        "noise": "at the coordinator, who is trusted" if central else "at the hospital, before anything leaves",
        "noise_multiplier": guard.noise,
        "coordinates": coordinates(manifest.layout),
        "delta": terms.delta,
        "epsilon_target": terms.epsilon,
        "epsilon": max(spent),
        "epsilon_analytic": analytic_epsilon(worst, terms.delta),
        "epsilon_replace_one": {"epsilon": twice, "delta": more},
        "epsilon_by_silo": dict(zip([m.name for m in manifest.members], spent, strict=True)),
        "epsilon_record": max(epsilon_rdp(history(book, TRAIN), terms.delta) for book in books),
        "clipping": terms.clipping,
        "rounds_by_silo": dict(zip([m.name for m in manifest.members], participations(manifest), strict=True)),
        "test_data": terms.test_data,
        "note": HOSPITAL_HIDDEN,
    }


def report(manifest: RunManifest, books: Sequence[Sequence[Release]]) -> Mapping[str, object] | None:
    """Report what a run's profile cost its hospitals; None for a run without privacy."""
    if not is_private(manifest.privacy):
        return None
    return (silo_report if manifest.privacy.name == SILO_LEVEL else privacy_report)(manifest, books)
