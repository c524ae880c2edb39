"""A coordinator that runs for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coordinator import World, running
from tests.support.federations import NAMES


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path / "home", NAMES) as found:
        yield found
