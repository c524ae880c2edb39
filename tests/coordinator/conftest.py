"""A coordinator that runs for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_core import NAMES
from helpers_grpc import World, running


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path / "home", NAMES) as found:
        yield found
