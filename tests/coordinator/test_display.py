"""What a person sees of numbers."""

from __future__ import annotations

import pytest

from coordinator.display import percent


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "0.00 %"), (0.923, "92.30 %"), (1.0, "100.00 %"), (-1.0, "-"), (-0.031, "-3.10 % (noise)"),
     (1.2, "120.00 % (noise)")],
)  # fmt: skip
def test_an_accuracy_that_noise_moved_out_of_its_range_is_shown_and_marked(share: float, shown: str) -> None:
    assert percent(share) == shown
