"""A run's progress in a notebook: one output, repainted, with what others say escaped."""

from __future__ import annotations

import sys

import IPython.display
import pytest

from consilium.lead.run import NotebookWatcher
from coordinator.lead.watcher import show_events
from protos.consilium.v1 import federation_pb2 as pb
from service_core.console import in_notebook

BAD = "<script>alert(1)</script>\x1b[31m"


class Handle:
    """In the place of IPython's: what the cell shows, one after the other."""

    def __init__(self) -> None:
        self.shown = list[str]()

    def update(self, html: IPython.display.HTML) -> None:
        self.shown.append(str(html.data))


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Handle:
    handle = Handle()

    def display(html: IPython.display.HTML, display_id: bool) -> Handle:
        handle.update(html)
        return handle

    monkeypatch.setattr(IPython.display, "display", display)
    return handle


def events(state: str) -> list[pb.Event]:
    info = pb.RunInfo(run_id="r1", state="running", method="fedmr", rounds=3, accuracy=-1, best_accuracy=-1)
    ended = pb.RunInfo(run_id="r1", state=state, method="fedmr", rounds=3, closed=3, accuracy=-1, best_accuracy=-1)
    many = [pb.Event(kind="arrived", silo=BAD, round=k % 3, text="5 bytes", info=info) for k in range(500)]
    return [*many, pb.Event(kind="warning", text=BAD), pb.Event(kind="ended", text=state, info=ended)]


def test_many_events_are_one_output_whose_last_state_stays(cell: Handle, capsys: pytest.CaptureFixture[str]) -> None:
    show_events(events("finished"), view=NotebookWatcher)
    assert len(cell.shown) < 100
    assert "finished  round 3/3" in cell.shown[-1]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1  # the warning
    assert "warning" in lines[0]


def test_what_others_say_is_no_markup_of_the_page(cell: Handle) -> None:
    show_events(events(BAD), view=NotebookWatcher)
    for text in cell.shown:
        assert "<script" not in text
        assert "\x1b" not in text
    assert "&lt;script&gt;" in cell.shown[-1]


def test_an_interrupt_leaves_the_last_state(cell: Handle) -> None:
    def interrupted():  # type: ignore[no-untyped-def]
        yield from events("running")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_events(interrupted(), view=NotebookWatcher)
    assert "r1" in cell.shown[-1]


def test_a_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", pytest)
    assert in_notebook()
    monkeypatch.delitem(sys.modules, "ipykernel")
    assert not in_notebook()
