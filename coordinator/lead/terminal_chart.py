"""A curve of shares in a few lines of a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ASCII = " ....####"
_STEP = 10
"""The axis ends at multiples of so many percent."""


def chart(values: Sequence[float | None], width: int = 60, height: int = 6, ascii_only: bool = False) -> list[str]:
    """Draw shares of [0, 1] as columns over an axis in percent, oldest left; empty without two of them.

    values: None leaves a gap. Where there are more values than columns, a column is the mean of its values.
    """
    shares = [v if v is not None and math.isfinite(v) and 0 <= v <= 1 else None for v in values]
    known = [v for v in shares if v is not None]
    if len(known) < 2 or width < 1 or height < 1:
        return []
    bottom = _STEP * math.floor(100 * min(known) / _STEP)
    top = max(_STEP * math.ceil(100 * max(known) / _STEP), bottom + _STEP)
    columns, blocks = _columns(shares, width), _ASCII if ascii_only else _EIGHTHS
    lines = []
    for row in reversed(range(height)):
        label = f"{top} %" if row == height - 1 else f"{bottom} %" if row == 0 else ""
        cells = [_cell(share, bottom, top, height) - 8 * row for share in columns]
        bar = "|" if ascii_only else "┤" if label else "│"
        lines.append(f"{label:>6} {bar}" + "".join(blocks[min(8, max(0, cell))] for cell in cells))
    return lines


def _cell(share: float | None, bottom: float, top: float, height: int) -> int:
    """Return how many eighths of a line a column is high; a known share has one at least."""
    if share is None:
        return 0
    return max(1, round(8 * height * (100 * share - bottom) / (top - bottom)))


def _columns(shares: Sequence[float | None], width: int) -> list[float | None]:
    if len(shares) <= width:
        return [share for share in shares for _ in range(width // len(shares))]
    ends = [len(shares) * k // width for k in range(width + 1)]
    found: list[float | None] = []
    for begin, end in pairwise(ends):
        known = [v for v in shares[begin:end] if v is not None]
        found.append(sum(known) / len(known) if known else None)
    return found
