"""What a hospital remembers of the surveys that it answered without noise."""

from __future__ import annotations

import pytest

from fl_core.types.survey import parse_questions
from silo.storage.store import Store
from silo.storage.surveys import SurveyedPatients

ALL = parse_questions("classes,ages:10")


@pytest.fixture
def memory(tmp_path):
    store = Store(tmp_path / "silo.sqlite")
    yield store.surveys
    store.close_database()


def patients(*ranges: range, changed: range = range(0)) -> SurveyedPatients:
    return SurveyedPatients({f"p{k}": b"other" if k in changed else b"records" for one in ranges for k in one})


def claimed(memory, data: SurveyedPatients, questions=ALL, least: int = 10) -> list[str]:
    expected = memory.answerable(data, questions, least)
    assert memory.claim("run", data, questions, least) == expected
    return sorted(expected)


def test_the_same_questions_about_the_same_records_are_answered_again(memory):
    for _ in range(3):
        assert claimed(memory, patients(range(50))) == ["ages", "classes"]


def test_other_bins_of_the_same_records_are_held_back_and_new_questions_are_not(memory):
    claimed(memory, patients(range(50)))
    assert claimed(memory, patients(range(50)), parse_questions("ages:5,sex")) == ["sex"]
    assert claimed(memory, patients(range(50)), parse_questions("sex,ages:10")) == ["ages", "sex"]
    assert claimed(memory, patients(range(100, 150)), parse_questions("ages:5")) == ["ages"]


@pytest.mark.parametrize("gone", [1, 9, 10])
def test_records_of_a_few_patients_more_or_less_are_not_surveyed_again(memory, gone):
    claimed(memory, patients(range(50)))
    allowed = ["sex"] if gone >= 10 else []
    assert claimed(memory, patients(range(gone, 50)), parse_questions("sex")) == allowed
    assert claimed(memory, patients(range(50 + gone)), parse_questions("sex")) == allowed


@pytest.mark.parametrize("others", [1, 9, 10])
def test_other_records_of_a_few_patients_are_not_surveyed_again(memory, others):
    claimed(memory, patients(range(50)))
    assert claimed(memory, patients(range(50), changed=range(others))) == (["ages", "classes"] if others == 10 else [])


@pytest.mark.fault("a lead", "surveys again after all records were stored anew and one patient left", "held back")
def test_records_that_were_all_stored_anew_hide_no_patient_who_left(memory):
    claimed(memory, patients(range(50)))
    assert claimed(memory, patients(range(1, 50), changed=range(50))) == []


def test_every_version_is_remembered_and_not_the_newest_alone(memory):
    claimed(memory, patients(range(50)))
    claimed(memory, patients(range(20, 70)))
    assert claimed(memory, patients(range(1, 50))) == []
    assert claimed(memory, patients(range(21, 70))) == []


def test_what_is_held_back_leaves_no_version_behind(memory):
    claimed(memory, patients(range(50)))
    assert claimed(memory, patients(range(5, 50))) == []
    assert claimed(memory, patients(range(14, 50))) == [
        "ages",
        "classes",
    ]  # 9 from what was held back, 14 from the first


def test_a_higher_floor_looks_farther(memory):
    claimed(memory, patients(range(50)))
    assert claimed(memory, patients(range(15, 50)), least=20) == []
    assert claimed(memory, patients(range(15, 50)), least=15) == ["ages", "classes"]


def test_memory_outlives_the_service_and_names_nobody(tmp_path):
    for expected in (["ages", "classes"], []):
        store = Store(tmp_path / "silo.sqlite")
        data = patients(range(50)) if expected else patients(range(1, 50))
        assert claimed(store.surveys, data) == expected
        store.close_database()
    files = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert b"p49" not in files
