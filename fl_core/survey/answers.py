"""From records to the numbers of each cell, and their suppression at a hospital.

Without noise, for each cell

images     sum of the records' shares: the number of records, or of records' shares of pixels
patients   patients with a record that has a share in the cell
held       1 if the number is suppressed; both numbers are 0 then
unnamed    1 if the data name no patients, so that each record counts as one, in cells that are not suppressed

A cell of 1 to `least` - 1 patients is suppressed. It must not follow from the total of the question, which other
questions share. So further cells are suppressed, those of the fewest patients first, until the suppressed cells have
`least` patients together, or no cell is left. A question with fewer than `least` patients in total is suppressed as a
whole, with its empty cells. An empty cell of any other question is shown as 0, since it is about no patient.

With noise (in private data) a patient adds the mean of its records' shares. So cells count patients, not images, and
the cells of a question sum to all patients. Only questions that the hospital does not answer are suppressed.

Guarantees: suppression and all numbers depend on patients; a patient counts once, for any number of records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fl_core.survey.facts import SurveyedRecords
from fl_core.tensors import Tensor, torch
from fl_core.types.survey import SurveyQuestion
from fl_core.types.values import SurveySums, Tensors

IMAGES, PATIENTS, HELD, UNNAMED, VARIANCE = "images", "patients", "held", "unnamed", "variance"


def exact_answers(query: SurveySums, records: SurveyedRecords) -> Tensors:
    """Answer without noise: images, patients, held, unnamed (cells,), float64."""
    images, patients, suppressed = list[Tensor](), list[Tensor](), list[Tensor]()
    query = known_patients(query, records.named)
    for question, shares in zip(query.questions, records.shares, strict=True):
        touched = records.of_patients(shares) > 0
        images.append(shares.sum(0))
        patients.append(touched.sum(0).double())
        suppressed.append(
            suppressed_cells(touched, query.least) if query.answers(question) else touched.new_ones(shares.shape[1])
        )
    none = torch.zeros(query.cells, dtype=torch.float64)
    answers = {IMAGES: torch.cat(images), PATIENTS: torch.cat(patients), HELD: none, UNNAMED: none + query.unnamed}
    return withhold(answers, torch.cat(suppressed))


def withhold(answers: Tensors, cells: Tensor) -> Tensors:
    """Suppress further cells (cells,) bool of an answer."""
    return {n: value if n == VARIANCE else value.masked_fill(cells, float(n == HELD)) for n, value in answers.items()}


def known_patients(query: SurveySums, named: bool) -> SurveySums:
    """Return the questions that the data can answer. Without patient names, images per patient are not answered."""
    if named or query.records_are_patients:
        return query
    answered = frozenset(q.name for q in query.questions if query.answers(q))
    return replace(query, unnamed=True, allowed=answered - {"patients"})


def suppressed_cells(touched: Tensor, least: int) -> Tensor:
    """Return the suppressed cells (cells,). touched: (patients, cells) bool, patients with a record in the cell."""
    patients = touched.sum(0)
    if int(touched.any(1).sum()) < least:
        return torch.ones_like(patients).bool()
    suppressed = (patients > 0) & (patients < least)
    while bool(suppressed.any()) and int(touched[:, suppressed].any(1).sum()) < least:
        rest = torch.where(suppressed | (patients == 0), torch.iinfo(patients.dtype).max, patients)
        if bool((suppressed | (patients == 0)).all()):
            break
        suppressed[int(rest.argmin())] = True
    return suppressed


def patient_vectors(query: SurveySums, records: SurveyedRecords) -> Tensor:
    """Return each patient's contribution in private data (patients, cells), float64: 1 in total per question.

    Columns of questions that are not answered are zeros.
    """
    number = torch.bincount(records.patient, minlength=records.patients).double().unsqueeze(1)
    parts = []
    for question, shares in zip(query.questions, records.shares, strict=True):
        total = records.of_patients(shares)
        parts.append(total / number if query.answers(question) else torch.zeros_like(total))
    return torch.cat(parts, dim=1)


def refused_cells(query: SurveySums) -> Tensor:
    """Return 1 for each cell of a question that is not answered (cells,), otherwise 0; reads no record."""
    counts = ((q.count(query.n_classes), float(not query.answers(q))) for q in query.questions)
    return torch.cat([torch.full((n,), suppressed, dtype=torch.float64) for n, suppressed in counts])


def fully_withheld(query: SurveySums) -> Tensors:
    """Return an answer with everything suppressed."""
    return withhold(blank_answers(query), torch.ones(query.cells, dtype=torch.bool))


def blank_answers(query: SurveySums) -> Tensors:
    """Return the layout of an answer, as zeros."""
    names = (PATIENTS, HELD, UNNAMED) if query.private else (IMAGES, PATIENTS, HELD, UNNAMED)
    answers = {name: torch.zeros(query.cells, dtype=torch.float64) for name in names}
    return answers | ({VARIANCE: torch.zeros((), dtype=torch.float64)} if query.private else {})


def places(questions: tuple[SurveyQuestion, ...], n_classes: int) -> Iterator[tuple[SurveyQuestion, slice]]:
    """Return the positions of each question's cells."""
    start = 0
    for question in questions:
        stop = start + question.count(n_classes)
        yield question, slice(start, stop)
        start = stop
