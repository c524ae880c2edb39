"""What commands make for the lead's page, where one of them fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from consilium.pages.lead.exports import Exporter
from coordinator.lead.client import LeadClient
from coordinator.lead.survey_answers import SurveyAnswers
from fl_core.errors import StateError
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import until

RUN = pb.RunInfo(run_id="run-1", model_digest="ab", model_object="ab")
ANSWERS = SurveyAnswers("d" * 64, 2, None, None, (), {})


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Exporter, list[float]]]:
    """An exporter whose first reading fails, and its clock."""
    now, answers = [0.0], iter([StateError("E-RUN-11", "expected a coordinator, found none"), ANSWERS])

    def read(*_: object) -> SurveyAnswers:
        answer = next(answers)
        if isinstance(answer, StateError):
            raise answer
        return answer

    monkeypatch.setattr(Exporter, "_read", read)
    with closing(Exporter(Path(), unreachable, clock=lambda: now[0])) as made:
        yield made, now


def unreachable() -> LeadClient:
    raise AssertionError("nothing is fetched")


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
