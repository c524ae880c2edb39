"""Surveys at this hospital: the people in its data, a preview of the answers, and the check of approved numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from fl_core.datasets import SiloDataset
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import content
from fl_core.datasets.image_loader import cores
from fl_core.survey.answers import (
    HELD,
    IMAGES,
    PATIENTS,
    exact_answers,
    fully_withheld,
    patient_vectors,
    places,
    refused_cells,
    withhold,
)
from fl_core.survey.facts import names_patients, patient_names, surveyed
from fl_core.tensors import torch
from fl_core.training.local_data import LocalDataWrapper
from fl_core.types import tensor_maps
from fl_core.types.enums import Split
from fl_core.types.interfaces import LocalData
from fl_core.types.survey import records_word
from fl_core.types.targets import is_multi_label
from fl_core.types.values import Examples, Progress, Query, SurveySums, Tensors
from privacy.compiled_run import CompiledRun
from privacy.ledger.registration import content_names
from privacy.mechanisms.record.survey import sensitivity
from privacy.profiles.prototype_filter import DisclosureLimits
from privacy.profiles.record import RecordProfile
from silo.admission.survey_history import Countable, SurveyedPatients, Told
from silo.reports.run_request import LEAVES, NOT_ANSWERED, SUPPRESSED, SurveyPreview, SurveyRow

log = logging.getLogger(__name__)


Decide = Callable[[SurveyedPatients, Sequence[Countable]], Told]
"""Names the cells that may leave in view of all earlier answers."""


def surveyed_patients(train: Examples, test: Examples, classes: Sequence[str]) -> SurveyedPatients:
    """List the people in the data, in the order of `surveyed`, with their records: pixels or cells, class and split.

    A record without a patient is a person, named by its folder and file.
    """
    names, contents, labelled = list[str](), list[list[str]](), list[list[str]]()
    places = dict[str, int]()
    whose = iter(patient_names((train, test)))
    for examples, split in ((train, "train"), (test, "test")):
        labels = ("" if is_multi_label(examples.labels) or k < 0 else classes[k] for k in examples.labels.tolist())
        for (file, what), label in zip(_records(examples), labels, strict=True):
            patient = next(whose)
            if patient not in places:
                places[patient] = len(names)
                names.append(file if examples.groups is None else patient)
                contents.append([])
                labelled.append([])
            contents[places[patient]].append(what)
            labelled[places[patient]].append(f"{what} {label} {split}")
    return SurveyedPatients(names, contents, labelled, names_patients(train, test))


def _records(examples: Examples) -> Iterator[tuple[str, str]]:
    """Yield the name and content of each record. The content of an unreadable file is its folder and name."""
    paths: tuple[Path, ...] | None = getattr(examples, "paths", None)
    if paths is None:
        yield from ((name, name) for name in content_names(examples))
        return
    with ThreadPoolExecutor(cores()) as pool:
        for path, what in zip(paths, pool.map(_content, paths), strict=True):
            yield f"file {'/'.join(path.parts[-2:])}", what


def _content(path: Path) -> str:
    try:
        return content(path).key
    except UnreadableError:
        return f"broken {'/'.join(path.parts[-2:])}"


def remembered_answers(
    query: SurveySums,
    train: Examples,
    test: Examples,
    classes: Sequence[str],
    decide: Decide,
    progress: Progress | None = None,
) -> Tensors:
    """Answer a survey without noise; suppress the cells that, with earlier answers, must not leave.

    decide: receives people and questions counted in the finest cells, and returns the cells that may leave.
    """
    least = tuple(question.least for question in query.questions)
    records = surveyed((*query.questions, *least), train, test, query.n_classes, progress)
    answers = exact_answers(query, replace(records, shares=records.shares[: len(least)]))
    countable, start = list[Countable](), len(least)
    for k, (question, place) in enumerate(places(query.questions, query.n_classes)):
        if not query.answers(question):
            continue
        cells, within = question.cells(classes), question.within(classes)
        rows = records.of_patients(records.shares[start + k]).tolist()
        shares = [{cell: share for cell, share in zip(within, row, strict=True) if share} for row in rows]
        if question.name == "classes":  # a coarse label counts in the total, but in no cell
            whole = torch.bincount(records.patient, minlength=len(rows)).tolist()
            shares = [
                {**counts, "": rest} if (rest := n - sum(counts.values())) else counts
                for counts, n in zip(shares, whole, strict=True)
            ]
        numbers = (records.of_patients(records.shares[k]) > 0).sum(0).tolist()
        free = frozenset(cell for cell, suppressed in zip(cells, answers[HELD][place], strict=True) if not suppressed)
        countable.append(
            Countable(question.name, str(question), within, shares, dict(zip(cells, numbers, strict=True)), free)
        )
    released = decide(surveyed_patients(train, test, classes), countable)
    leave = [
        cell in released.get(question.name, ()) for question in query.questions for cell in question.cells(classes)
    ]
    return withhold(answers, ~torch.tensor(leave))


def answers_digest(answers: Tensors) -> str:
    return tensor_maps.digest({name: value.double() + 0.0 for name, value in answers.items()})


class RememberedSurvey(LocalDataWrapper):
    """Answers a survey without noise as far as earlier answers allow, and only with approved numbers.

    answers: to a query   approved: digests of the numbers that the hospital approved; None if no approval is needed.
    """

    def __init__(
        self, data: LocalData, answers: Callable[[SurveySums], Tensors], approved: Callable[[], frozenset[str] | None]
    ) -> None:
        super().__init__(data)
        self._answers, self._approved = answers, approved

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        """Sum a query; a survey whose numbers differ from the approved ones is withheld."""
        if not isinstance(query, SurveySums):
            return super().sum(query, bound=bound, split=split)
        answers, approved = self._answers(query), self._approved()
        if approved is None or answers_digest(answers) in approved:
            return answers
        log.warning(
            "survey withheld: its numbers differ from those that this hospital approved; ask again in a new survey"
        )
        return fully_withheld(query)


def survey_preview(run: CompiledRun, dataset: SiloDataset, withheld: DisclosureLimits, decide: Decide) -> SurveyPreview:
    """Compute the answers to a survey, cell by cell. With noise it shows the true numbers; only noisy ones leave."""
    profile, classes, asked = run.profile, run.manifest.schema.classes, run.question
    assert asked is not None
    query = withheld.of(asked)
    if isinstance(profile, RecordProfile):
        records = surveyed(query.questions, dataset.train, dataset.test, query.n_classes)
        patients, suppressed = patient_vectors(query, records).sum(0), refused_cells(query)
        images, digest = None, ""
        noise = profile.plan(0).survey[0].mechanism.noise * sensitivity(query)
    else:
        answers = remembered_answers(query, dataset.train, dataset.test, classes, decide)
        images, patients, suppressed, digest, noise = (
            answers[IMAGES],
            answers[PATIENTS],
            answers[HELD],
            answers_digest(answers),
            0.0,
        )
    rows = list[SurveyRow]()
    for question, place in places(query.questions, query.n_classes):
        refused = not query.answers(question)
        for cell, k in zip(question.cells(classes), range(place.start, place.stop), strict=True):
            what = NOT_ANSWERED if refused else SUPPRESSED if suppressed[k] else LEAVES
            number = 0.0 if images is None else float(images[k])
            rows.append(SurveyRow(str(question), cell, number, float(patients[k]), what))
    word = records_word(run.manifest.schema.columns)
    return SurveyPreview(tuple(rows), digest, noise, query.least, word, not query.unnamed)
