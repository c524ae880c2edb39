"""The fewest that anything which leaves this hospital may be of: test images, training examples, patients.

The policy sets each number; which of them hold, the run's privacy and its kind say. Nobody else asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_core.datasets import SiloDataset
from fl_core.survey.facts import names_patients
from fl_core.training.evaluation import (
    BY_HOSPITAL,
    CLINICAL_PART,
    METRIC_PARTS,
    PAIRED,
    WithoutScarceClasses,
    scarce_class_names,
)
from fl_core.types.clinical import CLINICAL
from fl_core.types.values import Examples
from privacy.accounting.release_plan import TEST
from privacy.compiled_run import CompiledRun
from privacy.policy import Policy
from privacy.policy_terms import ACCURACY, NOTHING
from privacy.profiles.prototype_filter import DisclosureLimits

_SENT = {CLINICAL: frozenset[str](), ACCURACY: frozenset({CLINICAL_PART, PAIRED}), NOTHING: METRIC_PARTS}
"""What of an evaluation stays here, by what the policy says that leaves."""


@dataclass(frozen=True, slots=True)
class ReleaseFloors:
    """What a policy suppresses of one run.

    tested: test images of a class, without which nothing that is measured on it leaves; 0: any number   a_day: runs
    that may measure models here in a day; 0: any number   parts: of an evaluation, which stay here   counted: what is
    kept back of training examples, and of patients in a survey.
    """

    tested: int
    a_day: int
    parts: frozenset[str]
    counted: DisclosureLimits

    @classmethod
    def of(cls, policy: Policy, run: CompiledRun, dataset: SiloDataset | None = None) -> ReleaseFloors:
        """Read the floors of a run. dataset: says whether records name patients, where something is counted."""
        said, classes, survey, least = policy.evaluation, run.manifest.schema.classes, policy.survey, policy.prototypes
        exact = run.kind.measures and TEST not in run.profile.protected and said.send != NOTHING
        counted = DisclosureLimits(
            frozenset(k for k, name in enumerate(classes) if name in least.hidden),
            least.min_count,
            least.min_examples,
            answered=survey.answered(bool(run.method.unsummed_parts)),
            least_patients=survey.min_patients,
            named=dataset is not None and names_patients(dataset.train, dataset.test),
            records_are_patients=survey.records_are_patients,
        )
        parts = _SENT[said.send] if said.by_hospital else _SENT[said.send] | {BY_HOSPITAL}
        return cls(said.min_examples if exact else 0, said.runs_a_day if exact else 0, parts, counted)

    def too_few(self, test: Examples, classes: Sequence[str]) -> tuple[str, ...]:
        """Name the classes of which nothing that is measured leaves: there are too few test images."""
        return tuple(scarce_class_names(test.labels, classes, self.tested)) if self.tested else ()

    def sent(self, test: Examples, classes: Sequence[str]) -> Examples:
        """Return the test examples of which something leaves."""
        return WithoutScarceClasses(test, len(classes), self.tested) if self.too_few(test, classes) else test
