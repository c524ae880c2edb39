"""What every registered method owes, whatever it computes: the checks that others run on their own methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from consilium.testing.methods import CHECKS, MethodCase
from fl_core.methods import METHODS
from tests.support.federations import METHOD_OPTIONS


@cache
def case(name: str) -> MethodCase:
    return MethodCase(name, METHOD_OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_method_keeps(check: Callable[[MethodCase], None], name: str) -> None:
    check(case(name))
