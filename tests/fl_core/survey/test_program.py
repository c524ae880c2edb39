"""A survey as a run: it sums what hospitals tell, alike with masks and without, and trains nothing."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from consilium import simulate
from coordinator.cli.main import program
from coordinator.lead.survey_answers import SurveyAnswers
from fl_core.errors import ConfigError, FederationError
from fl_core.methods import METHODS, build_method, build_written, programs
from fl_core.survey.program import SurveyProgram
from fl_core.training.local_data import PlainLocalData
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from tests.support.federations import CONTEXT, Given

ASKED = "classes,images,sizes:64,intensity:64"


def asked(**more) -> SurveyAnswers:
    return simulate("survey", "digits", "hospitals6", method__questions=ASKED, **more).survey


def cell(found: SurveyAnswers, question: str, name: str):
    answer = next(a for a in found.answers if a.question == question)
    return next(c for c in answer.cells if c.name == name)


def test_the_sum_is_that_of_all_records_where_nobody_holds_anything_back():
    found = asked()
    assert found.hospitals == 6
    classes = next(a for a in found.answers if a.question == "classes")
    assert [c.patients for c in classes.cells] == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # the publisher's
    assert cell(found, "images", "training").images + cell(found, "images", "test").images == 1797
    assert cell(found, "sizes:64", "0 to 64").images == 1797
    assert found.implausible == ()
    grey = next(a for a in found.answers if a.question == "intensity:64")
    assert sum(c.images for c in grey.cells) == pytest.approx(1797, rel=2e-3)
    assert dict(grey.quantiles)["95 %"] == "192 to 256"


@pytest.mark.integration
def test_masks_change_no_number():
    assert asked(secagg="on").as_json() == asked().as_json()


def test_noise_is_shown_with_its_interval_and_what_it_promises():
    found = asked(privacy="dp_record", privacy__epsilon=2.0, privacy__rng="test")
    assert (found.epsilon, found.delta) == (2.0, 1e-5)
    one = cell(found, "images", "training")
    assert one.images is None
    assert one.half_width > 10
    assert abs(one.patients - 1438) < 3 * one.half_width
    assert one.patients != 1438


def test_answers_are_kept_apart_only_where_the_run_says_so_and_never_under_masks():
    found = asked(method__by_hospital=True)
    assert list(found.by_hospital) == [f"hospital{k}" for k in range(6)]
    each = [answers[1].cells[0].images for answers in found.by_hospital.values()]
    assert sum(each) == 1438
    assert cell(found, "images", "training").images == 1438
    with pytest.raises(ConfigError, match="by_hospital=false"):
        asked(method__by_hospital=True, secagg="on")


@pytest.mark.parametrize("more", [{"aggregator": "norm_clipped"}, {"train__freeze": "features"}])
def test_what_would_change_numbers_on_their_way_is_refused(more):
    with pytest.raises(ConfigError, match=r"survey|frozen|freeze"):
        asked(**more)


def test_a_survey_has_no_model_and_is_no_method_that_trains():
    assert set(programs()) - set(METHODS) == {"survey"}
    result = simulate("survey", "digits", "hospitals6")
    with pytest.raises(FederationError):
        _ = result.model
    with pytest.raises(ConfigError, match="survey"):
        build_method("survey", {}).exported({})


def test_the_noisy_form_without_noise_tells_nothing():
    """A manifest that asks for it in a run without privacy would go round the floor."""
    given = Given(torch.rand(30, 1, 8, 8), torch.zeros(30, dtype=torch.long))
    data = PlainLocalData(RoundData(given, given, TrainConfig(), CONTEXT))
    found = data.sum(SurveyProgram(release="noisy").query(4))
    assert not found["patients"].any()
    assert bool((found["held"] == 1).all())


def test_a_simulated_survey_shows_its_answers_and_no_accuracy():
    words = ["simulate", "method=survey", "method.questions='classes,patients'", "aggregator=mean"]
    result = CliRunner().invoke(program().build(words), [*words, "data=digits", "federation=hospitals6"])
    assert result.exit_code == 0
    shown = result.output
    assert "6 hospitals answered" in shown
    assert "No hospital has patient IDs" in shown
    assert "accuracy" not in shown


def test_a_survey_of_0_1_0_is_read_with_the_option_that_did_nothing():
    """Manifests keep it, so that their digests stay; a new survey has no such option."""
    written = {"questions": "classes", "release": "exact", "by_hospital": False, "weights": "samples"}
    assert build_written("survey", written) == SurveyProgram(questions="classes")
    with pytest.raises(ConfigError, match="weights"):
        build_method("survey", written)
