"""The noisy answer to a survey: one release over all questions and all patients of both splits.

A patient adds shares with a total of 1 to the cells of each question: with Q questions a vector v with |v|^2 <= Q,
whatever records the patient has. Adding or removing the patient moves the sum of truncated vectors by no more, so
discrete Gaussian noise of standard deviation z sqrt(Q) on every number is a Gaussian mechanism of noise multiplier z.
The width of bins does not change the noise. A question that the hospital does not answer gives zeros without noise, and
is marked as such.
"""

from __future__ import annotations

import math

from fl_core.survey.answers import HELD, PATIENTS, UNNAMED, VARIANCE, patient_vectors, refused_cells
from fl_core.survey.facts import surveyed
from fl_core.tensors import Tensor, torch
from fl_core.types.survey import document_digest
from fl_core.types.values import Examples, Progress, SurveySums, Tensors
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.sources import NoiseSource


def sensitivity(query: SurveySums) -> float:
    """Return the most that one patient moves the sum: the root of the number of questions, answered or not."""
    return math.sqrt(len(query.questions))


def release_name(query: SurveySums, noise_multiplier: float) -> str:
    """Name a release. Surveys with equal questions, equal answered questions and equal noise share one answer."""
    answered = ",".join(q.name for q in query.questions if query.answers(q))
    return f"survey {document_digest(query.questions)} of {answered} with noise {noise_multiplier!r}"


def survey_release(
    query: SurveySums,
    train: Examples,
    test: Examples,
    noise_multiplier: float,
    noise: NoiseSource,
    progress: Progress | None = None,
) -> Tensor:
    """Return the noisy number of patients in each cell (cells,), float64, which may be below 0.

    Guarantees: adding or removing all records of a patient moves the sum, before the noise, by at most `sensitivity`.
    """
    records = surveyed(query.questions, train, test, query.n_classes, progress)
    bound = sensitivity(query)
    vectors = grid.contributions(patient_vectors(query, records), bound)
    g = grid.step(bound, query.cells)
    total = grid.truncated(vectors, g).sum(0)
    noisy = grid.add_noise(total, g, noise_multiplier * bound, noise)
    return torch.where(refused_cells(query) > 0, 0.0, noisy)


def as_answers(query: SurveySums, released: Tensor, noise_multiplier: float) -> Tensors:
    """Return a release in the form of an answer, with the variance of the noise on each number."""
    variance = torch.tensor((noise_multiplier * sensitivity(query)) ** 2, dtype=torch.float64)
    suppressed = refused_cells(query)
    return {PATIENTS: released, HELD: suppressed, UNNAMED: (1.0 - suppressed) * query.unnamed, VARIANCE: variance}
