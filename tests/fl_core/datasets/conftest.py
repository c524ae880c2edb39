"""Data sets are read again for every test."""

from __future__ import annotations

import pytest

from fl_core.datasets.sources import arrays, image_folders


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing read for one test is kept for another; checksums of the real archives cannot hold for tiny copies."""
    for cached in (arrays._read, arrays._partition, image_folders.scan, image_folders.shares):
        cached.cache_clear()
