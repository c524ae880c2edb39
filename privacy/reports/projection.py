"""What a run will cost each hospital, before anyone starts: its releases follow from public facts alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from fl_core.rounds import sampling as cohort
from fl_core.rounds.manifest import RunManifest
from privacy.accounting.accountant import Filter, Mechanism, epsilon_prv, epsilon_rdp
from privacy.accounting.record_config import Terms
from privacy.accounting.release_plan import HOSPITAL, TEST, TRAIN, Release
from privacy.data_access import silo_releases
from privacy.dp_sgd.data_opener import course_of, spent
from privacy.noise.discrete_gaussian import TOTAL_VARIATION
from privacy.profiles import SILO_LEVEL, is_private, terms_of
from privacy.silo_dp.config import SiloTerms, analytic_epsilon, participations
from privacy.silo_dp.mechanism import silo_level


class Preview(TypedDict):
    """The projection of a run as plain values; epsilon and epsilon_most are the largest."""

    profile: str
    method: str
    rounds: int
    epsilon_target: float | None
    delta: float | None
    epsilon: float | None
    epsilon_most: float | None
    reserve_rounds: int
    delta_of_sampling: float | None
    silos: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Projection:
    """One hospital's part: N, q, training steps and rounds in all, z, and epsilon at the run's delta.

    used: share of the budget, by the filter that ledgers use, which keeps one order and is the stricter
    epsilon_tight: by the tighter accountant, for information   epsilon_record, epsilon_test: of one training record and
    of one test record, which have budgets of their own (0 where test records are public); under record-level privacy
    the first is epsilon, under silo-level privacy epsilon is the hospital's   epsilon_most: epsilon when the reserve is
    used up as well, the costliest round repeated; the ledger stops a run at the epsilon that it was asked for.
    """

    name: str
    units: int
    rate: float
    steps: int
    rounds: int
    noise: float
    epsilon: float
    epsilon_tight: float
    epsilon_record: float
    epsilon_test: float
    used: float
    epsilon_most: float


def planned(manifest: RunManifest, index: int, prototypes: bool = True, counts: bool = True) -> list[Release]:
    """List all releases of one member of a record-level run, in order, as its book will have them.

    prototypes: the hospital submits them where the run asks for them; counts: class counts were not released before.
    """
    course, member = course_of(manifest, index), manifest.members[index]
    found = list[Release]()
    for t in range(manifest.rounds):
        if index in cohort.sample(manifest.seed, t, len(manifest.members), manifest.cohort):
            found += course.releases(t, True, prototypes and member.prototypes, counts)
            counts = False
    return found + course.releases(manifest.rounds, False)


def whole_run(
    manifest: RunManifest, index: int, prototypes: bool = True, counts: bool = True
) -> dict[str, list[Mechanism]]:
    """List all that a run releases at one member, by what it is charged to; nothing for a run without privacy.

    prototypes, counts: as `planned` has them. Each round is made once: one that is repeated is charged again.
    """
    if not is_private(manifest.privacy):
        return {}
    if manifest.privacy.name == SILO_LEVEL:
        guard, rounds = silo_level(manifest), participations(manifest)[index]
        releases = silo_releases(guard, True) * rounds + silo_releases(guard, False)
    else:
        releases = planned(manifest, index, prototypes, counts)
    return {split: [r.mechanism for r in found] for split, found in spent(releases).items()}


def project(manifest: RunManifest) -> list[Projection]:
    """Project the cost of a run to each member; an empty list for a run without privacy."""
    if not is_private(manifest.privacy):
        return []
    if manifest.privacy.name == SILO_LEVEL:
        return _silo_level(manifest)
    terms, rounds, found = Terms.of(manifest.privacy.options), participations(manifest), []
    for k, member in enumerate(manifest.members):
        releases = planned(manifest, k)
        of: Mapping[str, list[Mechanism]] = {
            c: [r.mechanism for r in releases if r.collection == c] for c in (TRAIN, TEST)
        }
        training = [r.mechanism for r in releases if r.purpose == "training"]
        again = [r.mechanism for r in course_of(manifest, k).costliest if r.collection == TRAIN]
        found.append(
            Projection(
                member.name,
                member.units,
                training[0].rate if training else 0.0,
                sum(m.steps for m in training),
                rounds[k],
                min((m.noise for m in training), default=0.0),
                epsilon_rdp(of[TRAIN], terms.delta),
                epsilon_prv(of[TRAIN], terms.delta),
                epsilon_rdp(of[TRAIN], terms.delta),
                epsilon_rdp(of[TEST], terms.delta),
                Filter.of(terms.epsilon, terms.delta).used(of[TRAIN]),
                epsilon_rdp([*of[TRAIN], *again * terms.reserve_rounds], terms.delta),
            )
        )
    return found


def _silo_level(manifest: RunManifest) -> list[Projection]:
    terms, guard, found = SiloTerms.of(manifest.privacy.options), silo_level(manifest), []
    for member, rounds in zip(manifest.members, participations(manifest), strict=True):
        releases = silo_releases(guard, True) * rounds + silo_releases(guard, False)
        again = [r.mechanism for r in silo_releases(guard, True) if r.collection == HOSPITAL]
        hospital, train, test = ([r.mechanism for r in releases if r.collection == c] for c in (HOSPITAL, TRAIN, TEST))
        found.append(
            Projection(
                member.name,
                member.units,
                1.0,
                rounds,
                rounds,
                guard.noise,
                epsilon_rdp(hospital, terms.delta),
                analytic_epsilon(hospital, terms.delta),
                epsilon_rdp(train, terms.delta),
                epsilon_rdp(test, terms.delta),
                Filter.of(terms.epsilon, terms.delta).used(hospital),
                epsilon_rdp([*hospital, *again * terms.reserve_rounds], terms.delta),
            )
        )
    return found


def preview(manifest: RunManifest) -> Preview:
    """Return the projection as plain values: per silo and the largest epsilon."""
    silos = project(manifest)
    terms = terms_of(manifest.privacy)
    return {
        "profile": manifest.privacy.name,
        "method": manifest.method.name,
        "rounds": manifest.rounds,
        "epsilon_target": terms.epsilon if terms else None,
        "delta": terms.delta if terms else None,
        "epsilon": max((s.epsilon for s in silos), default=None),
        "epsilon_most": max((s.epsilon_most for s in silos), default=None),
        "reserve_rounds": terms.reserve_rounds if terms else 0,
        "delta_of_sampling": sampling_delta(manifest, silos) if silos else None,
        "silos": [asdict(s) for s in silos],
    }


def sampling_delta(manifest: RunManifest, silos: Sequence[Projection]) -> float:
    """Bound what noise that is drawn from tables of finite precision adds to delta, over a whole run: (1 + e^eps) t.

    t: the distance of one number's noise from the discrete Gaussian, times all numbers of all releases, counted as if
    each release had every number of an update.
    """
    numbers = sum(
        math.prod(shape) for part in manifest.layout.values() for shape in (*part.shapes.values(), part.weight_shape)
    )
    releases = max(s.steps + 4 * (s.rounds + 1) for s in silos) * 2  # twice: a reserve repeats at most as much again
    largest = max(s.epsilon_most for s in silos)
    return min(1.0, (1 + math.exp(min(largest, 700.0))) * numbers * releases * TOTAL_VARIATION)
