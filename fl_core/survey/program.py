"""The program of a survey: its update is one sum, the answers to its questions.

images, patients, held: sums over hospitals, cell by cell; the weight counts the hospitals

The hospital decides what leaves, question by question (`fl_core.survey.answers`); in a run with record-level privacy
the program has the form `release=noisy`, one release. Masks, the outbox, policies, approvals and ledgers treat it like
any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from fl_core.kinds.one_answer import OneAnswer
from fl_core.kinds.survey import SurveyRun
from fl_core.survey.answers import blank_answers
from fl_core.types.interfaces import LocalData
from fl_core.types.survey import SurveyQuestion, parse_questions
from fl_core.types.values import RoundContext, SurveySums, Tensors


@dataclass(frozen=True, kw_only=True)
class SurveyProgram(OneAnswer):
    """Questions about records, answered once.

    Attributes:
        questions: `name` or `name:width`, separated by commas (`fl_core.types.survey`)
        release: "noisy" is the form of private runs
        by_hospital: keep each hospital's answers separate, in the order of the members; not under masks
    """

    name: ClassVar[str] = SurveyRun.name
    questions: str = "classes,images,patients"
    release: Literal["exact", "noisy"] = "exact"
    by_hospital: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.parsed_questions

    @cached_property
    def parsed_questions(self) -> tuple[SurveyQuestion, ...]:
        return parse_questions(self.questions)

    @property
    def apart(self) -> bool:
        return self.by_hospital

    @property
    def private_form(self) -> Mapping[str, str | int]:
        return {} if self.release == "noisy" else {"release": "noisy"}

    def query(self, n_classes: int) -> SurveySums:
        return SurveySums(self.parsed_questions, n_classes, private=self.release == "noisy")

    def blank(self, n_classes: int) -> Tensors:
        return blank_answers(self.query(n_classes))

    def answer(self, data: LocalData, context: RoundContext) -> Tensors:
        return data.sum(self.query(context.n_classes))
