"""Real images that a tester brings: where they lie."""

from __future__ import annotations

import os
from pathlib import Path


def real_data(name: str) -> Path | None:
    """Find a folder or file of real images, or None: users bring their own copies, the project ships none."""
    given = os.environ.get("CONSILIUM_TEST_DATA")
    roots = [Path(given)] if given else [Path(__file__).resolve().parents[2] / "shared" / "data"]
    return next((root / name for root in roots if (root / name).exists()), None)
