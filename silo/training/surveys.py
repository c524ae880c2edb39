"""A survey at this hospital: who is in its data, what would leave, and that what leaves is what was shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from fl_core.datasets import SiloDataset
from fl_core.errors import RefusedError
from fl_core.survey.answers import HELD, IMAGES, PATIENTS, exact_answers, patient_vectors, places, refused_cells
from fl_core.survey.facts import patient_names, surveyed
from fl_core.survey.method import Survey
from fl_core.training.local_data import LocalDataWrapper
from fl_core.types import tensor_maps
from fl_core.types.enums import Split
from fl_core.types.interfaces import DataFactory, LocalData
from fl_core.types.values import Examples, Query, SurveySums, Tensors
from privacy.compiled_run import CompiledRun
from privacy.ledger.registration import content_names
from privacy.mechanisms.record.survey import sensitivity
from privacy.profiles.prototype_filter import Withheld
from privacy.profiles.record import RecordProfile
from service_core.storage.digests import file_digest
from silo.reports.run_request import HELD_BACK, LEAVES, NOT_ANSWERED, SurveyPreview, SurveyRow
from silo.storage.surveys import SurveyedPatients


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
    """Notes the answer to a survey before it leaves. answered: takes what leaves, and may refuse."""

    def __init__(self, data: LocalData, answered: Callable[[Tensors], None]) -> None:
        super().__init__(data)
        self._answered = answered

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        found = super().sum(query, bound=bound, split=split)
        if isinstance(query, SurveySums):
            self._answered(found)
        return found


def remembering(factory: DataFactory, answered: Callable[[Tensors], None]) -> DataFactory:
    return lambda data: RememberedSurvey(factory(data), answered)


def require_approved(digest: str, found: Tensors) -> None:
    """Raise RefusedError (E-POLICY-19) unless the numbers that leave are those that the hospital approved."""
    if answers_digest(found) != digest:
        raise RefusedError(
            "E-POLICY-19",
            "expected the numbers that this hospital approved, found others: its data or its policy have changed; "
            "ask again in a new survey",
        )


def survey_preview(run: CompiledRun, dataset: SiloDataset, withheld: Withheld) -> SurveyPreview:
    """Compute what would leave, cell by cell. With noise the numbers are the true ones, of which nothing leaves."""
    method, profile = run.method, run.profile
    assert isinstance(method, Survey)
    classes = run.manifest.schema.classes
    query = withheld.of(method.query(len(classes)))
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
