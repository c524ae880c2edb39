"""The digit that is left out is nowhere in training, and what is measured is measured."""

from __future__ import annotations

import pytest

from benchmarks.unknown_class.__main__ import OTHERS, OWN, digits, measure


def test_the_digit_that_is_left_out_is_in_no_split_and_all_others_are() -> None:
    (x, y), (_, z), unknown = digits(4)
    assert len(x) == len(y)
    assert set(y.tolist()) == set(z.tolist()) == set(range(9))
    assert len(y) + len(z) + len(unknown) == pytest.approx(1797 - 0.6 * 181, abs=15)


@pytest.mark.timeout(300)
def test_a_head_in_closed_form_finds_most_of_a_digit_that_it_was_not_taught() -> None:
    found = measure("analytic", 0)
    assert found.right > 0.95
    assert found.flagged == pytest.approx(0.1, abs=0.06)
    assert set(found.found) == {OWN, *OTHERS}
    assert found.found[OWN] > 0.8
