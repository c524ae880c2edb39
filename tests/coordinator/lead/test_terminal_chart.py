"""A curve in a few lines of text."""

from __future__ import annotations

import math

import pytest

from coordinator.lead.terminal_chart import chart


def heights(lines: list[str]) -> list[float]:
    """Read how many lines high each column is."""
    bars = [line.split("│")[-1].split("┤")[-1] for line in lines]
    return [sum(" ▁▂▃▄▅▆▇█".index(bar[k]) / 8 for bar in bars) for k in range(len(bars[0]))]


def test_columns_are_as_high_as_their_shares_over_an_axis_in_percent() -> None:
    lines = chart([0.0, 0.25, 0.5, 1.0], width=4, height=4)
    assert lines[0].startswith(" 100 %")
    assert lines[-1].startswith("   0 %")
    assert heights(lines) == [0.125, 1, 2, 4]  # a share of 0 is still seen


def test_more_rounds_than_columns_are_averaged_and_fewer_are_widened() -> None:
    assert heights(chart([0.0, 0.5, 0.5, 1.0], width=2, height=4)) == [1, 3]
    assert heights(chart([0.0, 1.0], width=5, height=1)) == [0.125, 0.125, 1, 1]


def test_what_is_no_share_is_a_gap() -> None:
    found = heights(chart([0.5, None, math.nan, 7.0, -1.0, 1.0], width=6, height=4))
    assert found[1:5] == [0, 0, 0, 0]
    assert found[5] == 4


@pytest.mark.parametrize("values", [[], [0.5], [None, None], [math.nan, 0.5]])
def test_without_two_values_there_is_no_chart(values: list[float | None]) -> None:
    assert chart(values) == []


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    assert "".join(chart([0.1, 0.9], ascii_only=True)).isascii()


def test_a_long_run_fits_the_width() -> None:
    lines = chart([k / 5000 for k in range(5000)], width=60)
    assert {len(line) for line in lines} == {68}
