"""What tests share: one module for each thing that is set up, and here how they wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def until(condition: Callable[[], Any], what: str = "", seconds: float = 200.0, every: float = 0.005) -> Any:
    """Wait for a condition with a deadline, and return its value.

    every: seconds between two looks. After a while they are rarer, ten a second at least: each takes time from those
    who are waited for.
    """
    began, pause = time.monotonic(), threading.Event()
    while not (value := condition()):
        waited = time.monotonic() - began
        assert waited < seconds, f"waited {seconds} s in vain {what}"
        pause.wait(max(every, min(waited / 8, 0.1)))
    return value


def some(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Give all values to `parametrize`, and mark all but each `every`-th as slow."""
    return [value if k % every == 0 else _slow(value) for k, value in enumerate(values)]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
