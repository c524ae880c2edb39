"""Projection of a run's cost for each hospital before it starts, from public facts only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TypedDict

from fl_core.rounds.manifest import NamedOptions, RunManifest
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.noise.discrete_gaussian import TOTAL_VARIATION
from privacy.profiles.base import Projection


class Preview(TypedDict):
    """The projection of a run as plain values. epsilon, epsilon_most: the largest of all silos.

    silos: the `Projection` of each silo, with noise_unreserved: its noise in a run without a reserve.
    """

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


def preview(run: CompiledRun) -> Preview:
    manifest, terms, silos = run.manifest, run.profile.terms, run.profile.project()
    least = silos
    if terms and any(s.reserve for s in silos):
        stated = NamedOptions(manifest.privacy.name, {**manifest.privacy.options, "reserve_rounds": 0})
        least = CompiledRun.of(replace(manifest, privacy=stated)).profile.project()
    return {
        "profile": manifest.privacy.name,
        "method": manifest.method.name,
        "rounds": manifest.rounds,
        "epsilon_target": terms.epsilon if terms else None,
        "delta": terms.delta if terms else None,
        "epsilon": max((s.epsilon for s in silos), default=None),
        "epsilon_most": max((s.epsilon_most for s in silos), default=None),
        "reserve_rounds": max((s.reserve for s in silos), default=0),
        "delta_of_sampling": sampling_delta(manifest, silos) if silos else None,
        "silos": [asdict(s) | {"noise_unreserved": other.noise} for s, other in zip(silos, least, strict=True)],
    }


def sampling_delta(manifest: RunManifest, silos: Sequence[Projection]) -> float:
    """Bound the delta that a whole run adds because noise is drawn from tables of finite precision: (1 + e^eps) t.

    t: the distance of one number's noise from the discrete Gaussian, times the number of all numbers in all releases.
    """
    numbers = sum(
        math.prod(shape) for part in manifest.layout.values() for shape in (*part.shapes.values(), part.weight_shape)
    )
    releases = max(s.steps + 4 * (s.rounds + 1) for s in silos) * 2  # twice: a reserve repeats at most everything
    largest = max(s.epsilon_most for s in silos)
    return min(1.0, (1 + math.exp(min(largest, 700.0))) * numbers * releases * TOTAL_VARIATION)
