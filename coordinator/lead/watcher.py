"""Live progress of a run, with its curve in a few lines of a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from statistics import fmean
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.lead import accuracy
from coordinator.lead.tables import awaited, changed_parts, doing, measured_parts, place, size
from fl_core.kinds import kind_of
from privacy.accounting.measures import ACCURACY
from privacy.accounting.uncertainty import NOTHING
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import (
    OUT,
    error_text,
    format_duration,
    local_time,
    make_table,
    pluralize,
    printable,
    wrap_parts,
)

_CHART_WIDTH, _CHART_MARGIN = 60, 8


_SAID_ABOVE = ("warning", "refused", "classes", "clear")
"""Kinds of events that are printed above the repainted view, which does not show them."""


class RunReader(Protocol):
    """A program that receives a run's progress, such as a tracker."""

    def note(self, info: pb.RoundInfo) -> None:
        """Receive a closed round."""
        ...

    def end(self, state: str) -> None:
        """Receive the run's final state."""
        ...


class RepaintedView(Protocol):
    """A view of a run that is repainted, for instance on a terminal. console: for lines that stay."""

    console: Console

    def start(self) -> None: ...

    def refresh(self) -> None: ...

    def stop(self) -> None: ...


class Watcher:
    """Live progress of one run: a repainted table and chart on a terminal; a line per change if piped or not `live`."""

    def __init__(self, console: Console = OUT, live: bool = True) -> None:
        self._console = console
        self._info = pb.RunInfo(accuracy=-1, best_accuracy=-1)
        self._silos: dict[str, str] = {}
        self._closed: dict[int, pb.RoundInfo] = {}
        self._heard = time.monotonic()
        repainted = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._display)
        self._live: RepaintedView | None = repainted if live and console.is_terminal else None

    def __enter__(self) -> Watcher:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, event: pb.Event) -> None:
        if event.HasField("info"):
            self._info, self._heard = event.info, time.monotonic()
        if event.HasField("closed"):
            self._closed[event.closed.round] = event.closed
        for silo in event.silos:
            self._silos[silo.name] = doing(silo)
        if event.silo and event.kind != "software":
            self._silos[event.silo] = event.kind if not event.text else f"{event.kind}: {event.text}"
        if self._live:
            if event.kind in _SAID_ABOVE:
                self._print(self._live.console, event)
            self._live.refresh()
        elif event.kind not in ("silo", "software"):
            self._print(self._console, event)

    def _print(self, console: Console, event: pb.Event) -> None:
        first, *others = error_text(event.text).split("\n")  # a reason may have a line for each hospital
        parts = [printable(part) for part in (*self._parts(event), first) if part]
        for texts in (parts, *([other] for other in others)):
            for line in wrap_parts(texts, console.width):
                console.print(line, soft_wrap=True)

    def _left(self) -> str:
        info = self._info
        if not info.closed or info.state != "running":
            return ""
        return format_duration((time.time() - info.created_unix) / info.closed * (info.rounds - info.closed))

    def _parts(self, event: pb.Event) -> list[str]:
        info = self._info
        parts = [f"{local_time(event.at_unix)}  {event.kind:<9} {place(event, info.rounds)}".rstrip(), event.silo]
        if event.kind == "closed":
            measured = self._measured(event.closed)
            if measured and event.round < info.rounds:
                measured[0] = f"model before the round: {measured[0]}"
            parts += [*measured, *changed_parts([event.closed])]
            parts += [f"left {left}"] if (left := self._left()) else []
        return parts

    def _measured(self, closed: pb.RoundInfo) -> list[str]:
        """Describe a round's evaluation, if the run measures its model."""
        measures = kind_of(self._info.method, self._info.rounds).measures
        return measured_parts(accuracy.result_of(closed)) if measures else []

    def _reached(self) -> list[str]:
        newest = accuracy.newest(self._info)
        return [] if newest == NOTHING else [f"accuracy {newest.text()}"]

    def _display(self) -> Group:
        points = {k: ACCURACY.estimate(accuracy.result_of(r)).point for k, r in self._closed.items()}
        values = [points.get(number) for number in range(max(points, default=-1) + 1)]
        width = min(_CHART_WIDTH, self._console.width - _CHART_MARGIN)
        lines = chart(values, width, ascii_only=self._console.options.ascii_only)
        caption = [f"        accuracy over {pluralize(len(values) - 1, 'round')} of training"] if lines else []
        title = (Text(line, no_wrap=True) for line in wrap_parts(map(printable, self._title()), self._console.width))
        return Group(*title, self._table(), *(Text(line, no_wrap=True) for line in (*lines, *caption)))

    def _title(self) -> list[str]:
        info, left = self._info, self._left()
        return [
            info.run_id,
            info.state,
            f"round {info.closed}/{info.rounds}",
            *(self._measured(self._closed[max(self._closed)]) if self._closed else self._reached()),
            *changed_parts(self._closed.values()),
            f"up {size(info.bytes_up)}",
            f"down {size(info.bytes_down)}",
            *([f"left {left}"] if left else []),
        ]

    def _table(self) -> Table:
        info = self._info
        passed, rows = time.monotonic() - self._heard, dict(self._silos)
        for silo in info.waiting.silos:
            left = pb.AwaitedSilo()
            left.CopyFrom(silo)
            left.left_s = max(0.0, silo.left_s - passed)
            rows[silo.name] = f"{rows.get(silo.name, '-')}; awaited ({awaited(left)})"
        return make_table("", ("silo", "doing"), sorted(rows.items()))


def show_events(events: Iterable[pb.Event], quiet: bool = False, view: Callable[[], Watcher] = Watcher) -> None:
    """Show events as they come, until the run ends. quiet: show nothing   view: makes the view."""
    with nullcontext() if quiet else view() as watcher:
        for event in events:
            if watcher is not None:
                watcher.show(event)


# ---- the curve ------------------------------------------------------------------------------------------------------

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ASCII = " ....####"
_STEP = 10
"""The axis ends at multiples of this percentage."""


def chart(values: Sequence[float | None], width: int = 60, height: int = 6, ascii_only: bool = False) -> list[str]:
    """Draw shares of [0, 1] as columns over an axis in percent, oldest left; empty for fewer than two.

    values: None leaves a gap. With more values than columns, a column is the mean of its values.
    """
    shares = [v if v is not None and math.isfinite(v) and 0 <= v <= 1 else None for v in values]
    measured = [v for v in shares if v is not None]
    if len(measured) < 2 or width < 1 or height < 1:
        return []
    bottom = _STEP * math.floor(100 * min(measured) / _STEP)
    top = max(_STEP * math.ceil(100 * max(measured) / _STEP), bottom + _STEP)
    columns, blocks = _columns(shares, width), _ASCII if ascii_only else _EIGHTHS
    lines = []
    for row in reversed(range(height)):
        label = f"{top} %" if row == height - 1 else f"{bottom} %" if row == 0 else ""
        cells = [_cell(share, bottom, top, height) - 8 * row for share in columns]
        bar = "|" if ascii_only else "┤" if label else "│"
        lines.append(f"{label:>6} {bar}" + "".join(blocks[min(8, max(0, cell))] for cell in cells))
    return lines


def _cell(share: float | None, bottom: float, top: float, height: int) -> int:
    """Return the height of a column in eighths of a line; a known share has at least one."""
    if share is None:
        return 0
    return max(1, round(8 * height * (100 * share - bottom) / (top - bottom)))


def _columns(shares: Sequence[float | None], width: int) -> list[float | None]:
    if len(shares) <= width:
        return [share for share in shares for _ in range(width // len(shares))]
    ends = [len(shares) * k // width for k in range(width + 1)]
    measured = ([v for v in shares[begin:end] if v is not None] for begin, end in pairwise(ends))
    return [fmean(values) if values else None for values in measured]
