"""A share of something, drawn by the server: what is used, and what would come on top."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GaugeDrawing:
    """Percentages of the width. text: the same in words, for whoever does not see it   full: used is 1 or more."""

    used: float
    more: float
    text: str
    full: bool


def draw(used: float, more: float = 0.0) -> GaugeDrawing:
    """Draw a share `used` of 1, and `more` on top. Raises ValueError on one that is negative or no number."""
    if math.isnan(used) or math.isnan(more) or used < 0 or more < 0:
        raise ValueError(f"expected shares of at least 0, found {used} and {more}")
    shown = min(used, 1.0)
    text = f"{100 * min(used, 99):.0f} percent used"
    if more:
        text += f", {100 * min(more, 99):.0f} percent more would be"
    return GaugeDrawing(round(100 * shown, 2), round(100 * min(more, 1.0 - shown), 2), text, used >= 1)
