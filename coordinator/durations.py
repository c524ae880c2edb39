"""How durations are written for people."""

from __future__ import annotations


def span(seconds: float) -> str:
    """Write a duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
