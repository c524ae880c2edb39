"""The smallest counts behind anything that leaves this hospital: test images, training examples, patients.

The policy sets each number; the run's privacy and its kind decide which ones apply. This is the only place that reads
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_core.datasets import SiloDataset
from fl_core.survey.facts import names_patients
from fl_core.training.evaluation import WithoutScarceClasses, scarce_class_names
from fl_core.types.clinical import CLINICAL
from fl_core.types.metric_parts import BY_HOSPITAL, CLINICAL_PART, METRIC_PARTS, PAIRED
from fl_core.types.values import Examples
from privacy.accounting.release_plan import TEST
from privacy.compiled_run import CompiledRun
from privacy.policy import Policy
from privacy.policy_terms import ACCURACY, NOTHING
from privacy.profiles.prototype_filter import DisclosureLimits

_SENT = {CLINICAL: frozenset[str](), ACCURACY: frozenset({CLINICAL_PART, PAIRED}), NOTHING: METRIC_PARTS}
"""The policy's `evaluation.send` -> the parts of an evaluation that stay here."""


@dataclass(frozen=True, slots=True)
class ReleaseFloors:
    """The smallest counts that a policy lets leave in one run.

    min_test_images: results of classes with fewer test images stay here; 0: no limit
    runs_a_day: runs that may measure models here in a day; 0: no limit   parts: of an evaluation, which stay here
    counted: limits for training examples, and for patients in a survey.
    """

    min_test_images: int
    runs_a_day: int
    parts: frozenset[str]
    counted: DisclosureLimits

    @classmethod
    def of(cls, policy: Policy, run: CompiledRun, dataset: SiloDataset | None = None) -> ReleaseFloors:
        """Read the floors of a run. dataset: tells surveys whether records name patients."""
        evaluation, classes, survey, least = (
            policy.evaluation,
            run.manifest.schema.classes,
            policy.survey,
            policy.prototypes,
        )
        exact = run.kind.measures and TEST not in run.profile.protected and evaluation.send != NOTHING
        counted = DisclosureLimits(
            frozenset(k for k, name in enumerate(classes) if name in least.hidden),
            least.min_count,
            least.min_examples,
            answered=survey.answered(bool(run.method.unsummed_parts)),
            least_patients=survey.min_patients,
            named=dataset is not None and names_patients(dataset.train, dataset.test),
            records_are_patients=survey.records_are_patients,
        )
        parts = _SENT[evaluation.send] if evaluation.by_hospital else _SENT[evaluation.send] | {BY_HOSPITAL}
        return cls(evaluation.min_examples if exact else 0, evaluation.runs_a_day if exact else 0, parts, counted)

    def too_few(self, test: Examples, classes: Sequence[str]) -> tuple[str, ...]:
        """Name the classes whose results stay here because they have too few test images."""
        return tuple(scarce_class_names(test.labels, classes, self.min_test_images)) if self.min_test_images else ()

    def sent(self, test: Examples, classes: Sequence[str]) -> Examples:
        """Return the test examples whose results may leave."""
        return WithoutScarceClasses(test, len(classes), self.min_test_images) if self.too_few(test, classes) else test
