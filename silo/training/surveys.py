"""A survey at this hospital: who is in its data, what would leave, and that what leaves is what was shown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from fl_core.datasets import SiloDataset
from fl_core.survey.answers import (
    HELD,
    IMAGES,
    PATIENTS,
    exact_answers,
    nothing_told,
    patient_vectors,
    places,
    refused_cells,
)
from fl_core.survey.facts import patient_names, surveyed
from fl_core.survey.method import Survey
from fl_core.training.local_data import LocalDataWrapper
from fl_core.types import tensor_maps
from fl_core.types.enums import Split
from fl_core.types.interfaces import LocalData
from fl_core.types.values import Examples, Query, SurveySums, Tensors
from privacy.compiled_run import CompiledRun
from privacy.ledger.registration import content_names
from privacy.mechanisms.record.survey import sensitivity
from privacy.profiles.prototype_filter import Withheld
from privacy.profiles.record import RecordProfile
from service_core.storage.digests import file_digest
from silo.reports.run_request import HELD_BACK, LEAVES, NOT_ANSWERED, SurveyPreview, SurveyRow
from silo.storage.surveys import SurveyedPatients

log = logging.getLogger(__name__)


def surveyed_patients(dataset: SiloDataset) -> SurveyedPatients:
    """Name who is in the data, and digest the records of each: bytes, class and split.

    A record of no patient is known by its file's name in its folder, or by what it is.
    """
    splits, classes = (dataset.train, dataset.test), dataset.schema.classes
    names = iter(patient_names(splits))
    records: dict[str, list[str]] = {}
    for examples, split in zip(splits, ("train", "test"), strict=True):
        for (own, content), label in zip(_records(examples), examples.labels.tolist(), strict=True):
            patient = next(names)
            patient = own if examples.groups is None else patient
            records.setdefault(patient, []).append(f"{content} {classes[label]} {split}")
    digests = {name: blake3("\n".join(sorted(found)).encode()).digest() for name, found in records.items()}
    return SurveyedPatients(digests)


def _records(examples: Examples) -> Iterator[tuple[str, str]]:
    """Yield a name and a digest of the content of each record."""
    paths: tuple[Path, ...] | None = getattr(examples, "paths", None)
    if paths is None:
        yield from ((name, name) for name in content_names(examples))
        return
    for path in paths:
        yield f"file {'/'.join(path.parts[-2:])}", file_digest(path)


def answers_digest(found: Tensors) -> str:
    return tensor_maps.digest({name: value.double() + 0.0 for name, value in found.items()})


class RememberedSurvey(LocalDataWrapper):
    """Answers of a survey without noise what the hospital's memory allows, and nothing that was not approved.

    claim: names the questions that may be answered, and notes that they are   approved: digests of the numbers that
    the hospital approved, None where nobody is asked.
    """

    def __init__(
        self, data: LocalData, claim: Callable[[], frozenset[str]], approved: Callable[[], frozenset[str] | None]
    ) -> None:
        super().__init__(data)
        self._claim, self._approved = claim, approved

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        """Sum a query; numbers of a survey that are others than the approved ones are all held back."""
        if not isinstance(query, SurveySums):
            return super().sum(query, bound=bound, split=split)
        found = super().sum(replace(query, allowed=self._claim()))
        approved = self._approved()
        if approved is None or answers_digest(found) in approved:
            return found
        log.warning("a survey is held back: its numbers are others than this hospital approved; ask in a new survey")
        return nothing_told(query)


def survey_preview(
    run: CompiledRun, dataset: SiloDataset, withheld: Withheld, answerable: frozenset[str] | None
) -> SurveyPreview:
    """Compute what would leave, cell by cell. With noise the numbers are the true ones, of which nothing leaves.

    answerable: the questions that the hospital's memory leaves; None: all.
    """
    method, profile = run.method, run.profile
    assert isinstance(method, Survey)
    classes = run.manifest.schema.classes
    query = withheld.of(replace(method.query(len(classes)), allowed=answerable))
    records = surveyed(query.questions, dataset.train, dataset.test, query.n_classes)
    if isinstance(profile, RecordProfile):
        patients, held = patient_vectors(query, records).sum(0), refused_cells(query)
        images, digest = None, ""
        noise = profile.plan(0).survey[0].mechanism.noise * sensitivity(query)
    else:
        found = exact_answers(query, records)
        images, patients, held, digest, noise = found[IMAGES], found[PATIENTS], found[HELD], answers_digest(found), 0.0
    rows = list[SurveyRow]()
    for question, place in places(query.questions, query.n_classes):
        refused = not query.answers(question)
        for cell, k in zip(question.cells(classes), range(place.start, place.stop), strict=True):
            what = NOT_ANSWERED if refused else HELD_BACK if held[k] else LEAVES
            number = 0.0 if images is None else float(images[k])
            rows.append(SurveyRow(str(question), cell, number, float(patients[k]), what))
    return SurveyPreview(tuple(rows), digest, noise, query.least)
