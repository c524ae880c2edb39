"""Questions: read by name, with bins that are never narrower than the table says."""

from __future__ import annotations

import json

import pytest

from fl_core.errors import ConfigError
from fl_core.types.survey import QUESTIONS, SurveyQuestion, document, document_digest, parse_questions


def test_questions_have_one_order_and_one_digest_however_they_are_asked():
    asked, again = parse_questions("ages, classes"), parse_questions("classes,ages:10")
    assert [str(question) for question in asked] == ["classes", "ages:10"]
    assert document_digest(asked) == document_digest(again) != document_digest(parse_questions("classes,ages:5"))
    assert json.loads(document(asked)) == {
        "questions": [{"name": "classes", "width": 0}, {"name": "ages", "width": 10}]
    }


@pytest.mark.parametrize("name", [name for name, kind in QUESTIONS.items() if kind.bins is not None])
def test_a_bin_is_at_least_as_wide_as_the_table_says(name):
    bins = QUESTIONS[name].bins
    assert bins.width in bins.widths
    assert min(bins.widths) == bins.least
    for width in bins.widths:
        assert SurveyQuestion(name, width).edges()[-1] == bins.high
    for width in (1, bins.least - 1, bins.least + 1, 0, -bins.least, 2 * (bins.high - bins.low)):
        with pytest.raises(ConfigError) as error:
            SurveyQuestion(name, width)
        assert error.value.code == "E-CFG-02"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "E-CFG-02"),
        ("classes,classes", "E-CFG-02"),
        ("ages:10,ages:5", "E-CFG-02"),
        ("classes:3", "E-CFG-02"),
        ("clases", "E-CFG-01"),
        ("ages:1e3", "E-CFG-01"),
        ("ages > 40", "E-CFG-01"),
        ("classes,", "E-CFG-01"),
    ],
)
def test_what_is_not_in_the_table_cannot_be_asked(text, code):
    with pytest.raises(ConfigError) as error:
        parse_questions(text)
    assert error.value.code == code


def test_cells_are_as_many_as_they_are_named():
    for name in QUESTIONS:
        question = SurveyQuestion.of(name)
        assert len(question.cells(("a", "b", "c"))) == question.count(3)
    assert SurveyQuestion.of("classes").cells(("a", "b")) == ("a", "b")
    assert SurveyQuestion.of("ages:60").cells(()) == ("0 to 60", "60 to 120", "120 or more", "not stated")
