"""The interface of a privacy profile."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.options import Options
from fl_core.aggregation.update_check import NoisyRows
from fl_core.errors import ConfigError, RefusedError
from fl_core.rounds.memory_need import MadeUpExamples
from fl_core.rounds.run_setup import Guards, RunSetup
from fl_core.training.local_data import PlainLocalData, eval_batch
from fl_core.types.clinical import BASIC, CLINICAL
from fl_core.types.interfaces import DataFactory, LocalData, RoundData
from fl_core.types.metric_parts import CLINICAL_PART, METRICS
from fl_core.types.records import TrainConfig
from fl_core.types.values import Layout, RoundContext
from privacy.accounting import ranges
from privacy.accounting.accountant import Bound, Mechanism, PrivacyFilter, epsilon_of, epsilon_spent, replace_one
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import TEST, TRAIN, Release
from privacy.accounting.shared_noise import SharedFigures
from privacy.accounting.uncertainty import NO_NOISE, EvaluationNoise, RunNoise
from privacy.mechanisms.silo.config import SiloDpConfig
from privacy.profiles.prototype_filter import NO_LIMITS, DisclosureLimits
from privacy.release_log import ReleaseLog, by_collection

if TYPE_CHECKING:
    import torch

    from privacy.policy_terms import Floors

Config = RecordDpConfig | SiloDpConfig
PLACEMENTS = {
    "local": "at the hospital, before anything leaves",
    "central": "at the coordinator, which is trusted",
    "distributed": "distributed: each hospital adds a share under masks, and only the sum has enough noise",
}
"""Placements of noise, for reports."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Projected cost for one hospital: N, q, total training steps and rounds, z, and epsilon at the run's delta.

    used: share of the run's budget, by its filter   epsilon_tight: actually spent, by the privacy loss of all releases
    epsilon_record, epsilon_test: of one training or test record (0 if test records are public)   epsilon_most: with the
    costliest round repeated `reserve` times   epsilon_all_honest, epsilon_alone: for distributed noise, if all
    hospitals take part and are honest, and if masks fail; otherwise both are epsilon.
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
    epsilon_all_honest: float
    epsilon_alone: float
    reserve: int


class MadeUpStep(NamedTuple):
    """A training step under a profile on synthetic examples, to measure its memory.

    training, evaluating: examples in memory at once, in training steps and in sums; both are public constants
    opened: opens the given number of synthetic examples.
    """

    training: int
    evaluating: int
    opened: Callable[[int], LocalData]


def one_step(train: TrainConfig, number: int) -> TrainConfig:
    """Return a schedule of one step over `number` examples, in one batch and without compilation."""
    return replace(train, batch_size=number, micro_batch=0, max_steps=1, compile=False, cudnn_benchmark=False)


class PrivacyProfile(ABC):
    """One privacy profile for one run, used by coordinator and hospitals.

    config: the class of its options   private_form: whether methods run in their private form   subject: the protected
    unit, in words   promised: the collection that the run's epsilon is for   collections: those that are charged
    terms: its options in the manifest; None for a run without privacy.
    """

    config: ClassVar[type[Config] | None] = None
    private_form: ClassVar[bool] = False
    subject: ClassVar[str] = ""
    promised: ClassVar[str] = TRAIN
    collections: ClassVar[tuple[str, ...]] = (TRAIN, TEST)
    terms: Config | None

    def __init__(self, run: RunSetup, terms: Config | None) -> None:
        self.run, self.terms = run, terms

    # ---- before there is a run --------------------------------------------------------------------------------------

    @classmethod
    def extra_parts(cls, terms: Config) -> Layout:  # noqa: ARG003
        """Return the parts that the profile adds to the layout of an update."""
        return {}

    def check(self) -> None:
        """Raise RefusedError (E-PRIV-16, -20) or ConfigError (E-CFG-08, E-PRIV-16, -17) on a run it cannot protect."""
        if self.terms is not None:
            if self.run.manifest.evaluation.metrics == CLINICAL and self.terms.test_data != "public":
                raise RefusedError(
                    "E-PRIV-16",
                    f"private test data need metrics={BASIC}, found {CLINICAL}: histograms and confusion matrix have "
                    "no version with noise. Set metrics=auto, or privacy.test_data=public if the test examples are "
                    "published anyway",
                )
            if self.run.manifest.schema.multi_label and self.terms.test_data != "public":
                raise ConfigError(
                    "E-CFG-08",
                    "expected privacy.test_data=public for multi-label data, because a record is counted for each "
                    "of its labels and these counts have no noise: set it if the test examples are published anyway",
                )
            ranges.check(self.run.manifest, self.terms)

    @property
    def protected(self) -> frozenset[str]:
        """Return the splits whose releases are all charged and protected by secret noise at the hospital."""
        if self.terms is None or self.terms.rng != "secure" or self.terms.central:
            return frozenset()
        return frozenset({TRAIN, TEST} if self.terms.test_data == "private" else {TRAIN})

    # ---- to be implemented ------------------------------------------------------------------------------------------

    def guards(self) -> Guards:
        """Return the guards of the run. An outgoing update passes the silo's guards first, then the aggregator's."""
        return Guards((), (FixedPoint(self.run.manifest.grid),))

    @abstractmethod
    def data_factory(self, index: int, log: ReleaseLog, withheld: DisclosureLimits = NO_LIMITS) -> DataFactory:
        """Return a function that opens a member's examples for a round; it logs releases before reading any example."""

    @abstractmethod
    def releases(self, index: int, prototypes: bool = True, counts: bool = True) -> list[Release]:
        """List all releases of the run at a member, in order.

        prototypes: whether the hospital submits them if the run asks for them   counts: whether class counts must be
        released, which is done once.
        """

    @abstractmethod
    def project(self) -> list[Projection]:
        """Project the cost of the run for each member; empty for a run without privacy."""

    @abstractmethod
    def report(self, logs: Sequence[Sequence[Release]]) -> Mapping[str, object] | None:
        """Report the cost of the run for its members, from their logs; None for a run without privacy."""

    # ---- what follows -----------------------------------------------------------------------------------------------

    def charges(self, index: int, prototypes: bool = True, counts: bool = True) -> dict[str, list[Mechanism]]:
        sorted_ = by_collection(self.releases(index, prototypes, counts))
        return {collection: [r.mechanism for r in releases] for collection, releases in sorted_.items()}

    @abstractmethod
    def bounds(self, policy: PrivacyFilter | None = None) -> Mapping[str, tuple[Bound, ...]]:
        """Return upper bounds on the run's charges, by collection. policy: the hospital's limit for one run."""

    def shared_figures(self, index: int) -> SharedFigures | None:
        """Return the figures of distributed noise for a member; None without it."""
        return None

    def noise(self) -> RunNoise:
        """Return the noise of the run's results; none without privacy."""
        return NO_NOISE

    @property
    def clipped(self) -> Mapping[str, float | None]:
        """Return the bound on the numbers of each clipped part, noise included; None if the clip adapts."""
        return {}

    def aggregator(self, chosen: Options) -> Options:
        """Return the aggregator's options, adapted to the profile; raises ConfigError (E-CFG-08) if not allowed."""
        return chosen

    def made_up_step(self, index: int, context: RoundContext, device: torch.device) -> MadeUpStep:
        """Return the number of examples that a member has in memory at once, and synthetic data to train on."""
        train, schema = self.run.manifest.train, self.run.schema

        def opened(number: int) -> LocalData:
            examples = MadeUpExamples(schema, number)
            return PlainLocalData(RoundData(examples, examples, one_step(train, number), context, device))

        return MadeUpStep(train.micro_batch or train.batch_size, eval_batch(schema.shape), opened)

    def require_submission(self, submits: bool) -> None:  # noqa: B027
        """Raise RefusedError (E-POLICY-05) if a hospital would leave out its part of distributed noise.

        submits: whether sums over its classes may leave.
        """

    def check_part(self, index: int, floors: Floors, unit: str, declared: float) -> None:  # noqa: B027
        """Raise RefusedError (E-POLICY-05) if a hospital's policy does not allow its part in the run; see `Floors`."""


class PrivateProfile(PrivacyProfile):
    """Base of the profiles with noise."""

    terms: Config

    def projection(
        self, index: int, costliest: Iterable[Release], reserve: int, rate: float, steps: int, noise: float
    ) -> Projection:
        """Project the cost for one member. costliest: releases of the round that may be repeated `reserve` times."""
        member, terms, releases = self.run.manifest.members[index], self.terms, self.releases(index)
        charged, train, test = (mechanisms(releases, c) for c in (self.promised, TRAIN, TEST))
        again = mechanisms(costliest, self.promised)
        return Projection(
            name=member.name,
            units=member.units,
            rate=rate,
            steps=steps,
            rounds=len(self.run.training_rounds[index]),
            noise=noise,
            epsilon=epsilon_of(charged, terms.delta),
            epsilon_tight=epsilon_spent(charged, terms.delta),
            epsilon_record=epsilon_of(train, terms.delta),
            epsilon_test=epsilon_of(test, terms.delta),
            used=PrivacyFilter.of(terms.epsilon, terms.delta).used(charged),
            epsilon_most=epsilon_of([*charged, *again * reserve], terms.delta),
            epsilon_all_honest=epsilon_of(mechanisms(releases, self.promised, lambda r: r.of_all), terms.delta),
            epsilon_alone=epsilon_of(mechanisms(releases, self.promised, lambda r: r.alone), terms.delta),
            reserve=reserve,
        )

    def _noise(self, sent: EvaluationNoise | None, rows: NoisyRows | None = None) -> RunNoise:
        """Return the noise of a run's results. sent: of its evaluations   rows: bounds on released sums per class."""
        scores = {"pm_l", "pm_v"} | ({"pa"} if self.terms.test_data == "private" else set())
        counts = dict.fromkeys(self.run.manifest.layout, math.inf)
        counts |= {METRICS: 0.0 if sent is None else sent.std, CLINICAL_PART: 0.0}
        return RunNoise(sent, frozenset(scores), counts, rows)

    def spent(self, logs: Sequence[Sequence[Release]], tight_name: str, **facts: object) -> Mapping[str, object]:
        """Report the cost for the members, with further `facts`; `private` is False if noise came from a seed."""
        terms, histories = self.terms, [mechanisms(log, self.promised) for log in logs]
        spent = [epsilon_of(h, terms.delta) for h in histories]
        twice, more = replace_one(max(spent), terms.delta)
        return {
            **facts,
            **self._shared(logs),
            "profile": self.run.manifest.privacy.name,
            "private": terms.rng == "secure",
            "rng": terms.rng,
            "delta": terms.delta,
            "epsilon_target": terms.epsilon,
            "epsilon": max(spent),
            tight_name: epsilon_spent(histories[spent.index(max(spent))], terms.delta),
            "epsilon_replace_one": {"epsilon": twice, "delta": more},
            "epsilon_by_silo": dict(zip([m.name for m in self.run.manifest.members], spent, strict=True)),
        }

    def _shared(self, logs: Sequence[Sequence[Release]]) -> Mapping[str, object]:
        """Report epsilon for distributed noise if all hospitals are honest, and if masks fail; empty without it."""
        if not (figures := [of_log for log in logs if (of_log := self._figures(log))]):
            return {}
        return {
            "epsilon_all_honest": max(f.all_honest for f in figures),
            "epsilon_masks_broken": max(f.alone for f in figures),
            "noise_shared": asdict(figures[0].terms) | {"noise_alone": min(f.noise_alone for f in figures)},
        }

    def _figures(self, releases: Iterable[Release]) -> SharedFigures | None:
        made = list(releases)
        shared = [r for r in made if r.shared is not None and r.collection == self.promised]
        if not shared or shared[0].shared is None:
            return None
        promised, honest, unmasked = (
            epsilon_of([getattr(r, name) for r in made if r.collection == self.promised], self.terms.delta)
            for name in ("mechanism", "of_all", "alone")
        )
        return SharedFigures(shared[0].shared, promised, honest, unmasked, min(r.alone.noise for r in shared))

    def shared_figures(self, index: int) -> SharedFigures | None:
        return self._figures(self.releases(index))


def mechanisms(
    releases: Iterable[Release], collection: str, seen: Callable[[Release], Mechanism] = lambda r: r.mechanism
) -> list[Mechanism]:
    return [seen(r) for r in releases if r.collection == collection]
