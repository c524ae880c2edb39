"""Shared noise in a masked sum: each silo adds a part, and only the sum is read.

Every opened sum has at least m updates, which honest silos enforce. At most c of these belong to silos that reveal
their noise to the coordinator, or add none. So with a discrete Gaussian of standard deviation

sigma_s = z D / sqrt(m - c)        D: the sensitivity

per silo, each silo is hidden by a sum of at least m - c noises, which is as private as the Gaussian of standard
deviation z D except for 3e-68 (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated
Learning with Secure Aggregation", ICML 2021; tests/privacy/profiles/test_shared_noise.py). That is charged. Two other
figures are reported with it: with all n silos present and honest, and with a silo's own noise only, which is all that
remains if masks fail or all others collude.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fl_core.errors import ConfigError
from fl_core.types.secagg import tolerated_colluders

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fl_core.rounds.manifest import RunManifest


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """The number of silos in a round (n), the minimum in a sum (m), and how many may collude (c)."""

    silos: int
    smallest_sum: int
    colluding: int

    @classmethod
    def of(cls, manifest: RunManifest) -> SharedNoise:
        """Read the terms from a masked run.

        Raises ConfigError: E-PRIV-16 on a run without masks, E-CFG-02 if c is 0 or too large.
        """
        n = manifest.cohort_size
        if manifest.secagg is None:
            raise ConfigError(
                "E-PRIV-16",
                "shared noise (privacy.placement=distributed) needs masks; without them the coordinator would see "
                "each hospital's small noise share: set secagg=auto, with three hospitals or more, or "
                "privacy.placement=local",
            )
        c, most = manifest.secagg.collusion, tolerated_colluders(n)
        if not 1 <= c <= most:
            raise ConfigError(
                "E-CFG-02",
                f"expected secagg.collusion from 1 to {most} if noise is shared among {n} hospitals, found {c}: "
                "change it, or set privacy.placement=local",
            )
        return cls(n, manifest.secagg.smallest_sum(n), c)

    @property
    def share(self) -> float:
        """Return a silo's own standard deviation in units of the guaranteed one."""
        return 1 / math.sqrt(self.smallest_sum - self.colluding)

    def of_all(self, noise: float) -> float:
        """Return the noise multiplier if all n silos are in the sum and honest, given the guaranteed z."""
        return noise * self.share * math.sqrt(self.silos)

    def alone(self, noise: float) -> float:
        """Return the noise multiplier of one silo's own noise, given the guaranteed z."""
        return noise * self.share

    @classmethod
    def read(cls, facts: Mapping[str, object]) -> SharedNoise:
        """Read the output of `facts`; raises KeyError, TypeError or ValueError on anything else."""
        n, m, c = (int(str(facts[name])) for name in ("silos", "smallest_sum", "colluding"))
        if not 0 < c < m <= n:
            raise ValueError(f"expected 0 < c < m <= n, found c = {c}, m = {m}, n = {n}")
        return cls(n, m, c)

    def facts(self, noise: float) -> Mapping[str, float]:
        """Return the terms as JSON values, for a release of noise z."""
        return asdict(self) | {"noise_alone": self.alone(noise), "noise_of_all": self.of_all(noise)}


@dataclass(frozen=True, slots=True)
class SharedFigures:
    """The privacy of shared noise for one silo of a run: epsilons of all its releases, under three assumptions.

    promised: at most c collude   all_honest: all are present and honest   alone: masks fail, or all others collude
    noise_alone: the smallest ratio of its own noise to the sensitivity.
    """

    terms: SharedNoise
    promised: float
    all_honest: float
    alone: float
    noise_alone: float

    def __str__(self) -> str:
        n, c = self.terms.silos, self.terms.colluding
        return (
            f"shared under masks among {n} hospitals: epsilon {self.promised:.2f} while at most {c} of the others "
            f"{'colludes' if c == 1 else 'collude'} with the coordinator, {self.all_honest:.2f} if all take part and "
            f"are honest, {self.alone:.2f} if the masks fail"
        )
