"""Data sets read anew."""

from __future__ import annotations

import pytest

from fl_core.datasets.sources import arrays
from fl_core.datasets.sources import image_folders as trees_of_images


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing read for one test is kept for another; checksums of the real archives cannot hold for tiny copies."""
    for cached in (arrays._read, arrays._dealt, trees_of_images.scan, trees_of_images.shares):
        cached.cache_clear()
