"""The clock of a coordinator's rounds."""

from __future__ import annotations

from functools import partial

import pytest

from coordinator.runs import run
from coordinator.runs.open_round import OpenRound
from tests.support.coordinator import Clock


@pytest.fixture
def round_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give the clock by which all rounds wait in this test."""
    found = Clock()
    monkeypatch.setattr(run, "OpenRound", partial(OpenRound, clock=found))
    return found
