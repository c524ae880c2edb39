"""A run's progress in a notebook: the view of the terminal in one output of the cell, which is repainted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

from rich.console import Console, RenderableType

from consilium.lead.listing import rendered
from coordinator.lead.watcher import Watcher
from service_core.console import OUT

_EVERY_S = 0.25
_WIDTH = 120


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules


class NotebookWatcher(Watcher):
    """Shows a run in one output of the cell; warnings and refusals stay as lines of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._live = _CellOutput(self._display)


class _CellOutput:
    """An output that is repainted, at most four times a second; what it shows last stays."""

    console: Console = OUT

    def __init__(self, view: Callable[[], RenderableType]) -> None:
        self._view = view
        self._handle: Any = None
        self._painted = 0.0

    def start(self) -> None:
        from IPython.display import HTML, display

        self._handle = display(HTML(self._html()), display_id=True)  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        if time.monotonic() - self._painted >= _EVERY_S:
            self._paint()

    def stop(self) -> None:
        self._paint()

    def _paint(self) -> None:
        from IPython.display import HTML

        self._painted = time.monotonic()
        self._handle.update(HTML(self._html()))  # type: ignore[no-untyped-call]

    def _html(self) -> str:
        return f"<pre>{escape(rendered([self._view()], _WIDTH))}</pre>"
