"""A survey: hospitals answer questions about their records once, without training (docs/survey.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fl_core.aggregation.options import Mean
from fl_core.errors import ConfigError
from fl_core.kinds.base import ManifestFacts, RunKind
from fl_core.types.enums import TaskKind
from fl_core.types.records import FEATURES

if TYPE_CHECKING:
    from fl_core.types.values import SurveySums


class SurveyRun(RunKind):
    """A run of one round whose update is one sum, the answers."""

    name = "survey"
    program = "fl_core.survey.program:SurveyProgram"
    parts: ClassVar[Mapping[str, str]] = {
        "survey": "how many records here fall into each bin of the questions, and which counts are suppressed"
    }
    answered = "Hospitals have answered"

    def length(self, rounds: int) -> str:  # noqa: ARG002
        return "one answer, without training"

    def staged(self, task: TaskKind) -> str:
        return "the answers of a survey" if task.trains else "the survey ends"

    def how_to_read(self, run: str) -> str:
        return f"coordinator survey --of {run}"

    def check(self, manifest: ManifestFacts) -> None:
        chosen, freeze = manifest.aggregator.name, manifest.train.freeze
        if freeze == FEATURES or chosen != Mean.name:
            raise ConfigError(
                "E-CFG-08",
                "expected aggregator=mean and train.freeze=none in a survey, whose numbers are added unchanged, found "
                f"{chosen} and {freeze}: set both",
            )

    def question(self, method: Any, n_classes: int) -> SurveySums:  # noqa: ANN401
        query: SurveySums = method.query(n_classes)
        return query
