"""Reads the answers to a survey from the state of its run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torch import Tensor

from coordinator.lead.survey_answers import ROUNDING, SurveyAnswers
from fl_core.errors import ConfigError, ProtocolError
from fl_core.kinds.one_answer import HOSPITALS
from fl_core.methods import build_written
from fl_core.rounds.manifest import RunManifest
from fl_core.survey.answers import HELD, IMAGES, PATIENTS, UNNAMED, VARIANCE, blank_answers, places
from fl_core.survey.program import SurveyProgram
from fl_core.types import tensor_maps
from fl_core.types.survey import NOT_STATED, Cell, SurveyAnswer, SurveyQuestion, document_digest, records_word
from fl_core.types.values import State
from privacy import profiles
from privacy.accounting.record_config import RecordDpConfig

if TYPE_CHECKING:
    from rich.table import Table

    from coordinator.lead.client import LeadClient
    from protos.consilium.v1 import federation_pb2 as pb

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""From the 5th to the 95th percentile: the smallest and the largest value belong to a single person."""
_MAX_STATE = 64 << 20
"""Size limit of a survey's state in bytes, far above any answers."""
_NORMAL_95 = 1.959963984540054


def fetched(client: LeadClient, detail: pb.RunDetail) -> SurveyAnswers:
    """Fetch and read the answers to a survey; raises ConfigError (E-RUN-11) if there are none yet."""
    from coordinator.lead.run_detail import check_detail
    from protos.wire.codec import read_state

    if not detail.info.model_object or not detail.rounds:
        raise ConfigError(
            "E-RUN-11",
            f"expected a survey with answers, found {detail.info.run_id} in state {detail.info.state}: wait for it",
        )
    manifest = check_detail(detail)
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "state"
        client.fetch(detail.info.model_object, file, _MAX_STATE)
        return answers_of(manifest, read_state(file), detail.rounds[0].included)


def answers_of(manifest: RunManifest, state: State, included: Sequence[str] = ()) -> SurveyAnswers:
    """Read the answers of a run. included: who answered, for answers kept per hospital.

    Raises ConfigError (E-CFG-08) on a run that is no survey; ProtocolError (E-WIRE-06) on a state of another form.
    """
    if manifest.kind.name != SurveyProgram.name:
        raise ConfigError("E-CFG-08", f"this is no survey, but a run of {manifest.method.name}: use coordinator survey")
    method = build_written(manifest.method.name, manifest.method.options)
    assert isinstance(method, SurveyProgram)
    classes = manifest.schema.classes
    sums, each = _checked(state, method, len(classes)), dict[str, Mapping[str, Tensor]]()
    if method.by_hospital:
        names, n = [member.name for member in manifest.members if member.name in set(included)], len(sums[HOSPITALS])
        if len(names) != n:
            names = [f"hospital {k + 1}" for k in range(n)]
        each = {name: {key: value[k] for key, value in sums.items()} for k, name in enumerate(names)}
        sums = {key: value.sum(0) for key, value in sums.items()}
    terms = None
    if profiles.is_private(manifest.privacy):
        terms = RecordDpConfig.of(manifest.privacy.options)
    records = records_word(manifest.schema.columns)
    answers = tuple(_answers(method, classes, sums, records))
    return SurveyAnswers(
        document_digest(method.parsed_questions),
        round(float(sums[HOSPITALS])),
        None if terms is None else terms.epsilon,
        None if terms is None else terms.delta,
        answers,
        {name: tuple(_answers(method, classes, of_hospital, records)) for name, of_hospital in each.items()},
        tuple(_implausible(answers)),
        records,
    )


def answer_lines(manifest: RunManifest, state: State) -> Iterator[str | Table]:
    """Yield the answers of a run without a model as text; raises as `answers_of`."""
    if manifest.kind.name == SurveyProgram.name:
        yield from answers_of(manifest, state).lines()
        return
    for name, value in state[manifest.kind.name].items():
        yield f"{name}: {value.tolist()}"


def _checked(state: State, method: SurveyProgram, n_classes: int) -> Mapping[str, Tensor]:
    blank, answers = blank_answers(method.query(n_classes)), state.get(method.name, {})
    lead = (len(answers.get(HOSPITALS, ())),) if method.by_hospital and answers else ()
    shapes = {name: (*lead, *value.shape) for name, value in blank.items()} | {HOSPITALS: lead}
    if UNNAMED not in answers:  # 0.1.0 did not record what its numbers count
        del shapes[UNNAMED]
    if {name: tuple(value.shape) for name, value in answers.items()} != shapes or not tensor_maps.all_finite(answers):
        raise ProtocolError("E-WIRE-06", "the state does not have the form of survey answers: update")
    return answers


def _answers(
    method: SurveyProgram, classes: Sequence[str], sums: Mapping[str, Tensor], records: str
) -> Iterator[SurveyAnswer]:
    hospitals = round(float(sums[HOSPITALS]))
    for question, place in places(method.parsed_questions, len(classes)):
        cells = []
        for name, k in zip(question.cells(classes), range(place.start, place.stop), strict=True):
            withheld = round(float(sums[HELD][k]))
            answered = hospitals - withheld
            variance = float(sums[VARIANCE]) / max(1, hospitals) * answered if VARIANCE in sums else 0.0
            cells.append(
                Cell(
                    name,
                    float(sums[IMAGES][k]) if IMAGES in sums and answered > 0 else None,
                    float(sums[PATIENTS][k]) if answered > 0 else None,
                    _NORMAL_95 * math.sqrt(max(0.0, variance)),
                    withheld,
                    round(float(sums[UNNAMED][k])) if UNNAMED in sums else 0,
                )
            )
        unnamed, answered = sum(cell.unnamed for cell in cells), sum(hospitals - cell.held for cell in cells)
        same = {0: "patients", answered: records} if UNNAMED in sums else {}
        counts = same.get(unnamed, f"patients or {records}")
        kind, quantiles = question.kind, _quantiles(question, cells)
        yield SurveyAnswer(str(question), kind.title, kind.unit, tuple(cells), quantiles, counts)


def _quantiles(question: SurveyQuestion, cells: Sequence[Cell]) -> Mapping[str, str]:
    """Return the bin of each quantile of the released numbers; noisy numbers below 0 count as 0."""
    if question.kind.bins is None:
        return {}
    numbers = [
        (c.name, max(0.0, c.patients or 0.0) if c.images is None else c.images) for c in cells if c.name != NOT_STATED
    ]
    total, quantiles = sum(n for _, n in numbers), dict[str, str]()
    if not total > 0:
        return {}
    for share in QUANTILES:
        below = 0.0
        for name, number in numbers:
            below += number
            if number and below >= share * total * (1 - 1e-9):
                quantiles[f"{100 * share:.0f} %"] = name
                break
    return quantiles


def _implausible(answers: Sequence[SurveyAnswer]) -> Iterator[str]:
    """Name cells with fewer records than patients, or negative numbers; noise is allowed six deviations."""
    for answer in answers:
        for cell in answer.cells:
            slack = ROUNDING + 6 / _NORMAL_95 * cell.half_width
            few = cell.patients is not None and cell.patients < -slack
            divided = answer.question.startswith("intensity")  # a record's pixels count in many cells
            odd = cell.images is not None and cell.patients is not None and cell.images < cell.patients - slack
            if few or cell.held < 0 or (odd and not divided) or (cell.images is not None and cell.images < -ROUNDING):
                yield f"{answer.question}, {cell.name}"
