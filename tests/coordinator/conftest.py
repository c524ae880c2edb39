"""A coordinator that runs for one test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.runs import run
from coordinator.runs.open_round import OpenRound
from tests.support.coordinator import Clock, World, running
from tests.support.federations import NAMES


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path / "home", NAMES) as found:
        yield found


@pytest.fixture
def round_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give the clock by which all rounds wait in this test."""
    found = Clock()
    monkeypatch.setattr(run, "OpenRound", partial(OpenRound, clock=found))
    return found
