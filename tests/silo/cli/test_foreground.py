"""What `silo serve` prints, also where nobody takes it."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from silo.cli.foreground import Printer
from silo.events import event


@contextmanager
def room(size: int) -> Iterator[None]:
    """Let this process write no file beyond a size: half of a line may be taken, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.fault(
    "a disk",
    "is full when `silo serve` prints a line",
    "the service continues and says later how many lines are missing",
)
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("half", [0, 10])
def test_a_line_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool, half: int
) -> None:
    shown = tmp_path / "log"
    with shown.open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        printer = Printer(as_json)
        printer.show_event(event("one", "the first"))
        with room(shown.stat().st_size + half):
            for number in range(2000):
                printer.show_event(event("lost", f"line {number} of a long time without room"))
        printer.show_event(event("last", "there is room again"))
    first, *torn, missing, last = shown.read_text().splitlines()
    assert [len(line) for line in torn] == ([half] if half else [])
    if as_json:
        assert json.loads(first)["text"] == "the first"
        assert json.loads(missing)["lines"] == 2000
        assert json.loads(last)["text"] == "there is room again"
    else:
        assert first.endswith("  the first")
        assert missing.endswith("  2000 lines before this one could not be written")
        assert last.endswith("  there is room again")


def test_a_reader_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `silo serve | tee FILE` once tee is no more."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        printer = Printer(as_json=False)
        for _ in range(3):
            printer.show_event(event("one", "for nobody"))
