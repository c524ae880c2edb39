"""What a privacy profile answers for one run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl_core.converter import Option
from fl_core.rounds.run_setup import Guards, RunSetup
from fl_core.types.interfaces import DataFactory, Method
from fl_core.types.values import Layout
from privacy.accounting import ranges
from privacy.accounting.accountant import Bound, Filter, Mechanism
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import TEST, TRAIN, Release
from privacy.release_log import ReleaseLog, by_collection
from privacy.reports.uncertainty import NO_NOISE, EvaluationNoise, RunNoise
from privacy.silo_dp.config import SiloDpConfig

if TYPE_CHECKING:
    from privacy.policy import Floors, Policy

Config = RecordDpConfig | SiloDpConfig


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


class PrivacyProfile(ABC):
    """One privacy profile and its answers for one run; both sides of a run ask it.

    config: the class of its options   subject: whom its epsilon is about   collections: what is charged, so that a
    hospital needs a budget for each   terms: its options as the manifest has them; None for a run without privacy.
    """

    config: ClassVar[type[Config] | None] = None
    subject: ClassVar[str] = ""
    collections: ClassVar[tuple[str, ...]] = (TRAIN, TEST)
    terms: Config | None

    def __init__(self, run: RunSetup, terms: Config | None) -> None:
        self.run, self.terms = run, terms

    # ---- before there is a run --------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def read(cls, options: Mapping[str, object]) -> Config | None:
        """Read the options of the profile; raises ConfigError on options that it does not have."""

    @classmethod
    def private_form(cls, method: Method) -> Mapping[str, Option]:  # noqa: ARG003
        """Return the options that a method must take under this profile."""
        return {}

    @classmethod
    def extra_parts(cls, terms: Config) -> Layout:  # noqa: ARG003
        """Return what it adds to the layout of the method's bundles."""
        return {}

    def check(self) -> None:
        """Refuse a run that the profile cannot keep its promise for; no data is near.

        Raises RefusedError (E-PRIV-20) on a number outside its range; ConfigError (E-CFG-08, E-PRIV-16, E-PRIV-17)
        on a method or a size that does not go with it.
        """
        if self.terms is not None:
            ranges.check(self.run.manifest, self.terms, self.derived_numbers)

    def derived_numbers(self) -> Mapping[str, float]:
        """Return products of options that have a range of their own."""
        return {}

    # ---- the five questions -----------------------------------------------------------------------------------------

    @abstractmethod
    def guards(self) -> Guards:
        """Return the guards of the run. On the way out, silo guards come before what the aggregator does on arrival."""

    @abstractmethod
    def data_factory(
        self, index: int, log: ReleaseLog, hidden: frozenset[int] = frozenset(), min_count: float = 0.0
    ) -> DataFactory:
        """Make what opens a member's examples, round by round: what a round releases is in the log before it reads any.

        hidden: positions of classes that no prototypes leave of   min_count: nor of classes with fewer examples
        """

    @abstractmethod
    def releases(self, index: int, prototypes: bool = True, counts: bool = True) -> list[Release]:
        """List what the whole run releases at a member, in order; a round that is repeated is charged again.

        prototypes: the hospital submits them where the run asks for them; counts: class counts were not released before
        """

    @abstractmethod
    def project(self) -> list[Projection]:
        """Project what the run will cost each member; empty for a run without privacy."""

    @abstractmethod
    def report(self, logs: Sequence[Sequence[Release]]) -> Mapping[str, object] | None:
        """Report what the run cost its members, from their logs; None for a run without privacy."""

    # ---- what follows -----------------------------------------------------------------------------------------------

    def charges(self, index: int, prototypes: bool = True, counts: bool = True) -> dict[str, list[Mechanism]]:
        """List `releases` by what they are charged to."""
        sorted_ = by_collection(self.releases(index, prototypes, counts))
        return {collection: [r.mechanism for r in found] for collection, found in sorted_.items()}

    @abstractmethod
    def bounds(self, policy: Filter | None = None) -> Mapping[str, tuple[Bound, ...]]:
        """Return the most that the run may be charged, by collection; policy: the most that one run may spend."""

    @abstractmethod
    def evaluation_noise(self) -> EvaluationNoise | None:
        """Return the noise on one hospital's evaluation as it is sent; None where it is sent as it was counted."""

    def own_noise(self) -> EvaluationNoise | None:
        """Return the noise on what a hospital itself knows of its evaluation."""
        return None

    def result_noise(self) -> RunNoise:
        """Return what of the run's results is noisy."""
        if self.terms is None:
            return NO_NOISE
        scores = {"pm_l", "pm_v"} | ({"pa"} if self.terms.test_data == "private" else set())
        return RunNoise(self.evaluation_noise(), frozenset(scores))

    def examples_at_once(self, index: int) -> int:
        """Return how many examples' gradients a member holds at once, a public constant; 0 where none are."""
        return 0

    @abstractmethod
    def check_terms(self, floors: Floors) -> None:
        """Raise RefusedError (E-POLICY-05) on options that a hospital's policy does not allow."""

    @abstractmethod
    def check_part(self, index: int, policy: Policy, unit: str, declared: float) -> None:
        """Raise RefusedError (E-POLICY-05) on a part that its policy does not allow; see `Policy.check_plan`."""


def mechanisms(releases: Iterable[Release], collection: str) -> list[Mechanism]:
    """List the mechanisms of the releases of one collection."""
    return [r.mechanism for r in releases if r.collection == collection]
