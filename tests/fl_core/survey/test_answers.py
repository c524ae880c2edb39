"""Counts and their floor: by patients, at its edge, and against whoever subtracts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_core.survey.answers import exact_answers, patient_vectors, suppressed_cells
from fl_core.survey.facts import SurveyedRecords
from fl_core.types.survey import parse_questions
from fl_core.types.values import SurveySums

CLASSES = parse_questions("classes")


def records(of: list[tuple[int, int]], n_classes: int = 3) -> SurveyedRecords:
    """Make records of (patient, class)."""
    shares = torch.zeros(len(of), n_classes, dtype=torch.float64)
    for i, (_, label) in enumerate(of):
        shares[i, label] = 1.0
    place = {p: k for k, p in enumerate(dict.fromkeys(p for p, _ in of))}
    return SurveyedRecords(torch.tensor([place[p] for p, _ in of], dtype=torch.long), (shares,))


def answer(of: list[tuple[int, int]], least: int = 10, n_classes: int = 3) -> dict[str, list[float]]:
    found = exact_answers(SurveySums(CLASSES, n_classes, least=least), records(of, n_classes))
    assert found.pop("unnamed").tolist() == [0] * n_classes
    return {name: value.tolist() for name, value in found.items()}


def test_the_floor_counts_patients_and_not_rows():
    ten = [(p, 0) for p in range(10)] + [(p, 1) for p in range(100, 130)]
    assert answer(ten) == {"images": [10, 30, 0], "patients": [10, 30, 0], "held": [0, 0, 0]}
    nine = [(p, 0) for p in range(9) for _ in range(100)] + [(p, 1) for p in range(100, 130)]  # 900 rows of 9 patients
    assert answer(nine) == {"images": [0, 0, 0], "patients": [0, 0, 0], "held": [1, 1, 0]}


def test_what_is_held_back_cannot_be_subtracted():
    of = [(p, 0) for p in range(3)] + [(p, 1) for p in range(10, 24)] + [(p, 2) for p in range(30, 90)]
    assert answer(of)["held"] == [1, 1, 0]  # else the sum of all less 14 and 60 would be those 3
    of = [(p, 0) for p in range(6)] + [(p, 1) for p in range(10, 16)] + [(p, 2) for p in range(30, 90)]
    assert answer(of)["held"] == [1, 1, 0]  # twelve patients are together in what is suppressed: the third cell stays


def test_a_hospital_of_few_patients_shows_not_even_which_cells_are_empty():
    assert answer([(p, 0) for p in range(9)])["held"] == [1, 1, 1]
    assert answer([(p, 0) for p in range(10)])["held"] == [0, 0, 0]
    assert answer([])["held"] == [1, 1, 1]


def test_a_question_that_is_not_answered_is_held_back_whatever_the_data_are():
    query = SurveySums(CLASSES, 3, allowed=frozenset({"images"}))
    for of in ([], [(p, 0) for p in range(50)]):
        found = exact_answers(query, records(of))
        assert found["held"].tolist() == [1, 1, 1]
        assert not found["images"].any()
        assert not found["patients"].any()


def test_data_that_name_no_patients_say_so_in_each_number_and_not_how_many_images_a_patient_has():
    of = [(p, p % 2) for p in range(40)] + [(p, 2) for p in range(100, 105)]
    asked = parse_questions("classes,patients")
    found = records(of)
    shares = (found.shares[0], torch.ones(len(of), 1).double() * torch.eye(6).double()[0])
    unnamed = SurveyedRecords(found.patient, shares, named=False)
    said = exact_answers(SurveySums(asked, 3), unnamed)
    assert said["held"].tolist() == [1, 0, 1] + [1] * 6
    assert said["unnamed"].tolist() == [0, 1, 0] + [0] * 6
    said = exact_answers(SurveySums(asked, 3, records_are_patients=True), unnamed)
    assert said["held"].tolist() == [1, 0, 1] + [0] * 6
    assert not said["unnamed"].any()


cells = st.lists(st.integers(0, 25), min_size=1, max_size=6)


@given(cells, st.integers(2, 15), st.integers(1, 4))
def test_a_number_that_is_told_and_all_that_are_not_are_of_many_patients(counts, least, each):
    of = [(1000 * c + p, c) for c, n in enumerate(counts) for p in range(n) for _ in range(each)]
    found = answer(of, least, len(counts))
    held, total = found["held"], sum(counts)
    for count, is_held, patients, images in zip(counts, held, found["patients"], found["images"], strict=True):
        assert (patients, images) == ((0, 0) if is_held else (count, each * count))
        assert is_held or count == 0 or count >= least
    hidden = sum(count for count, is_held in zip(counts, held, strict=True) if is_held)
    assert hidden == 0 or hidden >= least or hidden == total
    if total < least:
        assert all(held)


@given(cells, st.integers(2, 15))
def test_no_more_is_held_back_than_must_be(counts, least):
    """Any cell less, of those that were added to hide others, and the rest would be of fewer than `least`."""
    of = [(1000 * c + p, c) for c, n in enumerate(counts) for p in range(n)]
    held = answer(of, least, len(counts))["held"]
    if sum(counts) < least:
        return
    small = [c for c, n in enumerate(counts) if 0 < n < least]
    added = [c for c, h in enumerate(held) if h and c not in small]
    if added:
        without = sum(counts[c] for c in small) + sum(sorted(counts[c] for c in added)[:-1])
        assert without < least


def test_patients_in_several_cells_are_counted_once_each():
    touched = torch.zeros(12, 2, dtype=torch.bool)
    touched[:9, 0] = True
    touched[:12, 1] = True
    assert suppressed_cells(touched, 10).tolist() == [True, True]


def test_a_patient_adds_the_mean_of_its_records():
    of = [(0, 0), (0, 0), (0, 1), (1, 2)]
    expected = torch.tensor([[2 / 3, 1 / 3, 0], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(patient_vectors(SurveySums(CLASSES, 3), records(of)), expected)
