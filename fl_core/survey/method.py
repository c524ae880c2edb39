"""A survey as a method: a run of one round whose update is one sum, the answers to its questions.

    images, patients, held: sums over hospitals, cell by cell; the weight counts the hospitals

It has no model of its own, trains nothing and sends nothing down. What leaves a hospital is decided there, question by
question (`fl_core.survey.answers`); in a run with record-level privacy it takes the form `release=noisy`, one release.
Masks, the outbox, policies, approvals and ledgers treat it as any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from torch import Tensor, nn

from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg
from fl_core.survey.answers import blank_answers
from fl_core.types.enums import Capability, Weighing
from fl_core.types.interfaces import LocalData
from fl_core.types.survey import SURVEY, Question, parse_questions
from fl_core.types.values import Bundle, LocalResult, Part, PartRule, RoundContext, State, SurveySums, Tensors

ANSWERS = SURVEY
"""The part of an update, and the group of the server's state, that hold the answers."""
HOSPITALS = "hospitals"


@dataclass(frozen=True, kw_only=True)
class Survey(FedAvg):
    """Questions about records, answered once.

    Attributes:
        questions: `name` or `name:width`, with commas between (`fl_core.types.survey`)
        release: "noisy" is the form of private runs
        by_hospital: keep each hospital's answers apart, in the order of the members; not under masks
    """

    name: ClassVar[str] = SURVEY
    has_global_model: ClassVar[bool] = False
    bias_follows_classes: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    questions: str = "classes,images,patients"
    release: Literal["exact", "noisy"] = "exact"
    by_hospital: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.asked

    @cached_property
    def asked(self) -> tuple[Question, ...]:
        return parse_questions(self.questions)

    @property
    def sends(self) -> tuple[str, ...]:
        return (ANSWERS,)

    @property
    def exchanges(self) -> int:
        return 1

    @property
    def unsummed_parts(self) -> frozenset[str]:
        return frozenset({ANSWERS}) if self.by_hospital else frozenset()

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        return {ANSWERS: PartRule(Weighing.ONCE)}

    @property
    def private_form(self) -> Mapping[str, str | int]:
        return {} if self.release == "noisy" else {"release": "noisy"}

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        found = dict(super().unsupported)
        if self.by_hospital:
            found[Capability.SECURE_AGGREGATION] = "masks leave sums alone: set method.by_hospital=false"
        return found

    def shared(self, name: str) -> bool:  # noqa: ARG002
        return False

    def query(self, n_classes: int) -> SurveySums:
        return SurveySums(self.asked, n_classes, private=self.release == "noisy")

    def init_server(self, model: nn.Module, context: RoundContext) -> State:  # noqa: ARG002
        blank = blank_answers(self.query(context.n_classes))
        n = (context.n_silos,) if self.by_hospital else ()
        empty = {name: value.new_zeros((*n, *value.shape)) for name, value in blank.items()}
        return {"w": {}, ANSWERS: {**empty, HOSPITALS: blank["held"].new_zeros(n)}}

    def broadcast(self, server: State) -> State:  # noqa: ARG002
        return {"w": {}}

    def local(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> LocalResult:  # noqa: ARG002
        query = self.query(context.n_classes)
        found = data.sum(query) if context.round == 0 else blank_answers(query)
        return LocalResult({ANSWERS: Part(found, found["held"].new_ones(()))}, silo)

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        if context.round or not bool((total[ANSWERS].weight > 0).any()):
            return server
        part = total[ANSWERS]
        answers: dict[str, Tensor] = {name: value.double() for name, value in part.total.items()}
        return {**server, ANSWERS: {**answers, HOSPITALS: part.weight.double()}}

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:  # noqa: ARG002
        raise _no_model()

    def exported(self, server: State) -> Tensors:  # noqa: ARG002
        raise _no_model()


def _no_model() -> ConfigError:
    return ConfigError(
        "E-CFG-08", "expected a run that trains a model, found a survey: read its answers with coordinator survey"
    )
