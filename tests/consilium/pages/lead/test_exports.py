"""What commands make for the lead's page, where one of them fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from consilium.pages.lead.exports import Exporter
from coordinator.lead.survey_answers import SurveyAnswers
from fl_core.errors import StateError
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until

RUN = pb.RunInfo(run_id="run-1", model_digest="ab", model_object="ab")
TOLD = {"run": "run-1", "manifest_digest": "cd", **SurveyAnswers("d" * 64, 2, None, None, (), {}).as_json()}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Exporter, list[float]]]:
    """An exporter whose command fails once, and its clock."""
    now, answers = [0.0], iter([StateError("E-RUN-11", "expected a coordinator, found none"), json.dumps(TOLD)])

    def command(*_: object) -> str:
        found = next(answers)
        if isinstance(found, StateError):
            raise found
        return found

    monkeypatch.setattr(Exporter, "_command", command)
    with closing(Exporter((), clock=lambda: now[0])) as made:
        yield made, now


def test_answers_that_could_not_be_read_are_read_again_and_not_at_once(
    exporter: tuple[Exporter, list[float]],
) -> None:
    made, now = exporter
    assert "found none" in str(made.answers(RUN))
    now[0] = 30.0
    assert "found none" in str(made.answers(RUN))
    until(lambda: made.surveys_read == 1, "the first reading")
    now[0] = 30.1
    found = made.answers(RUN)
    assert isinstance(found, SurveyAnswers)
    assert found.hospitals == 2
    until(lambda: made.surveys_read == 2, "the second reading")
    now[0] = 1000.0
    assert made.answers(RUN) == found
    assert made.surveys_read == 2
