"""Shared fixtures: where the real images lie, and a thread count that makes numbers repeat."""

from __future__ import annotations

from protos.tls import require_tls13

require_tls13()  # before anything imports gRPC

import os  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("ci", derandomize=True, max_examples=25, deadline=None)
settings.register_profile("nightly", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


def real_data(name: str) -> Path | None:
    """Find a folder or file of real images, or None: users bring their own copies, the project ships none."""
    given = os.environ.get("CONSILIUM_TEST_DATA")
    roots = [Path(given)] if given else [Path(__file__).resolve().parents[2] / "shared" / "data"]
    return next((root / name for root in roots if (root / name).exists()), None)


@pytest.fixture(scope="session")
def isic_root() -> Path:
    """Give the real Fed-ISIC2019 folder, or skip."""
    root = real_data("isic2019")
    if root is None:
        pytest.skip("no real Fed-ISIC2019 images: set CONSILIUM_TEST_DATA")
    return root
