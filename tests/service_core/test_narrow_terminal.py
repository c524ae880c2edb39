"""On a terminal of 80 columns no line is longer, no word is broken, and nothing that is known is left out."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table

from consilium.report.comparison import ComparedRun, compare
from consilium.research.reports import _compared
from coordinator.cli.runs import detail_lines
from coordinator.lead import tables
from coordinator.lead.watcher import Watcher
from protos.consilium.v1 import federation_pb2 as pb
from service_core import console
from service_core.console import make_table, plain_console, print_parts, wrap_parts
from silo.cli.main import run as silo
from tests.support.gallery import survey
from tests.support.hospital import furnished
from tests.support.made_up_service import FEDAVG, FEDMR, MASKED, MEASURED, PRIVATE, every_kind

WIDTH = 80
SERVICE = every_kind()
WORDS = st.text("abcäß漢:-/ ", max_size=30).map(lambda text: " ".join(text.split()))


def terminal(width: int = WIDTH) -> Console:
    out = plain_console(width=width)
    out.file, out._force_terminal = io.StringIO(), True
    return out


def printed(items: Iterable[RenderableType], width: int = WIDTH) -> str:
    out = terminal(width)
    for item in items:
        out.print(item)
    return out.file.getvalue()  # type: ignore[attr-defined]


@given(st.lists(st.lists(WORDS, min_size=5, max_size=5), min_size=2, max_size=4), st.integers(40, 120))
def test_a_table_breaks_no_word_and_is_no_wider_than_the_terminal(rows: list[list[str]], width: int) -> None:
    head, *cells = rows
    text = printed([make_table("title", head, cells)], width)
    assert all(cell_len(line.rstrip()) <= width for line in text.splitlines())
    words = set(text.replace("│", " ").replace("┃", " ").replace(":", " : ").split())
    for cell in (cell for row in cells for cell in row if cell not in ("", "-")):
        assert set(cell.replace(":", " : ").split()) <= words


def test_a_table_that_fits_stays_one_and_one_that_does_not_has_its_rows_as_lines() -> None:
    table = make_table("Runs", ("run", "state", "why"), [("run-1", "failed", "-"), ("run-2", "finished", "in time")])
    assert "│ run-2 │ finished │ in time │" in printed([table])
    assert printed([table], 20).splitlines() == [
        "Runs",
        "run-1",
        "  state: failed",
        "run-2",
        "  state: finished",
        "  why: in time",
    ]


def test_parts_fill_lines_and_long_ones_are_broken_between_words() -> None:
    assert wrap_parts(["one", "two", "three four five six"], 12) == ["one  two", "  three four", "    five six"]
    assert wrap_parts([], 12) == []
    out = terminal(20)
    print_parts(out, "2026-11-26", "\x1b[2J started", "x" * 30)
    assert out.file.getvalue() == "2026-11-26\n  \\x1b[2J started\n  " + "x" * 30 + "\n"  # type: ignore[attr-defined]


def compared() -> Iterable[str | Table]:
    return _compared(compare([ComparedRun.of(SERVICE.show(run)) for run in (FEDAVG, FEDMR, MASKED, PRIVATE)]))


SHOWN = {
    "runs": lambda: [tables.runs_table(SERVICE.runs())],
    "silos": lambda: [tables.silos_table(SERVICE.silos().silos)],
    "show": lambda: detail_lines(SERVICE.show(FEDMR)),
    "private": lambda: detail_lines(SERVICE.show(PRIVATE)),
    "evaluate": lambda: detail_lines(SERVICE.show(MEASURED)),
    "compare": compared,
    "survey": lambda: survey().lines(),
}


@pytest.mark.parametrize("name", SHOWN)
def test_tables_of_the_lead_fit_80_columns(name: str) -> None:
    found = [item for item in SHOWN[name]() if isinstance(item, Table)]
    assert found
    text = printed(found)
    assert max(map(cell_len, text.splitlines())) <= WIDTH
    seen = set(text.replace("│", " ").replace("┃", " ").split())
    for column in (column for table in found for column in table.columns):
        assert {word for cell in column.cells if cell != "-" for word in str(cell).split()} <= seen


def test_what_is_watched_fits_80_columns_and_begins_with_what_a_lead_needs() -> None:
    piped = Console(file=io.StringIO(), width=WIDTH)
    shown, run, watcher = terminal(), SERVICE.show(FEDMR), Watcher(piped)
    for closed in run.rounds:
        watcher.show(pb.Event(kind="closed", round=closed.round, at_unix=1e9, info=run.info, closed=closed))
    watcher.show(pb.Event(kind="ended", at_unix=1e9, info=run.info, text="E-RUN-15: " + "a reason of many words " * 9))
    shown.print(watcher._display())
    lines = [line for out in (piped, shown) for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert max(map(cell_len, lines)) <= WIDTH
    after = [below for line, below in pairwise(lines) if "  closed  " in line]
    assert len(after) == len(run.rounds)
    assert all(line.strip().removeprefix("model before the round: ").startswith("balanced accuracy") for line in after)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(furnished(tmp_path_factory.mktemp("furnished") / "home").path)


@pytest.mark.parametrize("command", ["status", "approve", "ledger show --entries", "log show", "doctor"])
def test_what_a_hospital_reads_fits_80_columns(
    command: str, home: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.OUT, "_force_terminal", True)
    monkeypatch.setattr(console.OUT, "_width", WIDTH)
    silo([*command.split(), "--home", home])
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert lines
    drawn = [
        line for line in lines if line[:1] in "┏┃┡│└" or line.startswith("  ") or command in ("log show", "doctor")
    ]
    assert [line for line in drawn if cell_len(line) > WIDTH and " " in line.strip()] == []
