"""Answers to a survey as the lead reads them: what is suppressed is no number, and what nobody can have is said."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from rich.table import Table

from consilium.research.plots import survey_picture
from coordinator.cli.survey import survey_words
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from coordinator.lead.survey_answers import SurveyAnswers
from coordinator.lead.surveys import answers_of
from fl_core.errors import ConfigError, FederationError, ProtocolError

NAMES = ["north", "south", "west"]


def manifest(*words: str):
    made = compose_spec(survey_words(["classes", "ages:60", "data=digits", *words]))
    return manifest_from(made, NAMES, [100.0] * 3)


RUN = manifest()
CELLS = 10 + 4


def state(hospitals: float = 3.0, **cells: dict[int, float]):
    """Make a state whose cells are 20 images of 15 patients that nobody suppresses, but for those that are named."""
    usual = {"images": 20.0, "patients": 15.0, "held": 0.0, "unnamed": 0.0}
    found = {name: torch.full((CELLS,), value, dtype=torch.float64) for name, value in usual.items()}
    for name, values in cells.items():
        for k, value in values.items():
            found[name][k] = value
    return {"w": {}, "survey": {**found, "hospitals": torch.tensor(hospitals, dtype=torch.float64)}}


def text(found: SurveyAnswers) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    for item in found.lines():
        console.print(item, soft_wrap=not isinstance(item, Table))
    return console.export_text()


def test_a_number_that_nobody_told_is_none_and_never_0():
    empty = {"images": {3: 0.0}, "patients": {3: 0.0}}
    found = answers_of(RUN, state(**empty, held={3: 3.0}))
    zero = answers_of(RUN, state(**empty))
    cell, other = found.answers[0].cells[3], zero.answers[0].cells[3]
    assert (cell.images, cell.patients, cell.held) == (None, None, 3)
    assert (other.images, other.patients, other.held) == (0.0, 0.0, 0)
    assert "│ 3 │ -      │ -        │ 3 of 3        │" in text(found)
    assert "│ 3 │ 0      │ 0        │ -             │" in text(zero)
    assert found.as_json()["answers"][0]["cells"][3]["patients"] is None


@pytest.mark.parametrize(
    ("unnamed", "counts", "said"),
    [
        (0.0, "patients", ""),
        (3.0, "images", "No hospital has patient IDs: their records count as one patient each"),
        (2.0, "patients or images", "2 of 3 hospitals have no patient IDs: their records count as one patient each"),
    ],
)
def test_images_are_called_patients_by_nobody(unnamed, counts, said):
    found = answers_of(RUN, state(unnamed=dict.fromkeys(range(CELLS), unnamed)))
    assert {answer["counts"] for answer in found.as_json()["answers"]} == {counts}
    assert said in text(found)
    heads = {part.head[2] for part in found.parts() if not isinstance(part, str)}
    assert heads == {"images counted" if counts == "images" else counts}
    assert counts.encode() in survey_picture(found, "svg")


def test_answers_of_an_earlier_version_do_not_say_what_they_count():
    older = state()
    del older["survey"]["unnamed"]
    assert {answer.counts for answer in answers_of(RUN, older).answers} == {"patients or images"}


def test_a_question_that_all_hold_back_is_one_line():
    found = answers_of(RUN, state(held=dict.fromkeys(range(10, 14), 3.0)))
    assert "Age, years: suppressed by all hospitals" in text(found)
    assert found.answers[1].quantiles == {}


def test_tables_fit_eighty_columns():
    rows = [line for line in text(answers_of(RUN, state())).splitlines() if line.startswith("│")]
    assert len(rows) == 14
    assert max(map(len, rows)) <= 80


def test_quantiles_are_bins_of_what_was_told():
    images = {10: 90.0, 11: 9.0, 12: 1.0, 13: 1000.0}  # the last are not stated
    found = answers_of(RUN, state(images=images)).answers[1]
    assert dict(found.quantiles) == {
        "5 %": "0 to 60", "25 %": "0 to 60", "50 %": "0 to 60", "75 %": "0 to 60", "95 %": "60 to 120",
    }  # fmt: skip


@pytest.mark.fault("a hospital", "answers a survey with impossible numbers", "shown to the lead as implausible")
@pytest.mark.parametrize(
    "cells", [{"images": {0: 3.0}}, {"patients": {0: -4.0}}, {"images": {0: -1.0}}, {"held": {0: -1.0}}]
)
def test_numbers_that_no_records_give_are_named(cells):
    found = answers_of(RUN, state(**cells))
    assert found.implausible == ("classes, 0",)
    assert "the numbers of classes, 0 are impossible" in text(found)
    assert answers_of(RUN, state()).implausible == ()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_state_of_another_form_is_refused(value):
    broken = state()
    broken["survey"]["images"] = broken["survey"]["images"][1:]
    for bad in (broken, {"w": {}}, state(images={0: value})):
        with pytest.raises(ProtocolError) as error:
            answers_of(RUN, bad)
        assert error.value.code == "E-WIRE-06"
    with pytest.raises(ConfigError):
        answers_of(replace(RUN, method=replace(RUN.method, name="fedavg")), state())


def test_a_picture_shows_what_is_held_back_apart():
    svg = survey_picture(answers_of(RUN, state(held={0: 1.0, 1: 3.0})), "svg")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    plain = survey_picture(answers_of(RUN, state()), "svg")
    assert (b"<pattern" in svg, b"<pattern" in plain) == (True, False)  # hatches


def test_words_become_a_run_of_one_round_that_adds_as_it_is():
    made = compose_spec(survey_words(["ages:5", "classes", "data=folder", "data.classes=[a,b]", "secagg=on"]))
    assert (made.rounds, made.aggregator["name"], made.secagg.name) == (1, "mean", "on")
    assert made.method["questions"] == "classes,ages:5"
    assert (made.model["name"], made.data["image_size"]) == ("simple_cnn", 32)
    assert made.secagg.min_contributors == 1
    apart = compose_spec(survey_words(["classes", "data=digits"], by_hospital=True))
    assert (apart.secagg.name, apart.secagg.min_contributors) == ("off", 1)
    for words in (["data=digits"], ["ages:1", "data=digits"], ["clases"], ["classes", "classes"]):
        with pytest.raises(FederationError):
            survey_words(words)
