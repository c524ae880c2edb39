"""The demo ends every process that it has started, at whatever moment it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from consilium.research.demo import processes as module
from consilium.research.demo.processes import Processes, Signals
from fl_core.errors import UnavailableError

SCRIPTS = {
    "waits": 'echo $$ > "$1"; exec sleep 600',
    "answers": """echo 'a line before'; echo '{"words": "'"$*"'"}'""",
    "fails": "echo 'E-TST-01 the reason' >&2; exit 3",
}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    for name, body in SCRIPTS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setattr(module, "BIN", tmp_path)
    with Signals() as signals:
        made = Processes(tmp_path / "log", signals)
        yield made
        made.stop()


class Forked(subprocess.Popen[bytes]):
    """Gets a signal to end while it is made: the process runs, and nobody has been told its id."""

    ids: ClassVar[list[int]] = []

    def _execute_child(self, *given: object, **named: object) -> None:
        super()._execute_child(*given, **named)  # type: ignore[misc]
        self.ids.append(self.pid)
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("way", [Processes.start, Processes.call])
def test_a_signal_while_a_process_is_made_leaves_none_behind(
    started: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[..., object]
) -> None:
    monkeypatch.setattr(Forked, "ids", [])
    monkeypatch.setattr(subprocess, "Popen", Forked)
    try:
        with pytest.raises(KeyboardInterrupt), started.signals.raising():
            way(started, "waits", str(tmp_path / "pid"))
        assert [process.pid for process in started.running] == Forked.ids
        started.stop()
        assert len(Forked.ids) == 1
        assert not psutil.pid_exists(Forked.ids[0])
    finally:
        for left in filter(psutil.pid_exists, Forked.ids):
            psutil.Process(left).kill()


def test_a_signal_while_a_command_runs_leaves_none_behind(
    started: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    communicate = subprocess.Popen.communicate

    def interrupted(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        return communicate(process)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt), started.signals.raising():
        started.call("waits", str(tmp_path / "pid"))
    (running,) = started.running
    started.stop()
    assert running.returncode is not None
    assert started.running == []


def test_a_call_reads_the_last_line_and_is_not_taken_for_a_process_that_ended(started: Processes) -> None:
    assert started.call("answers", "one", "two") == {"words": "one two --json"}
    started.check()


def test_a_call_that_fails_says_why(started: Processes) -> None:
    with pytest.raises(UnavailableError, match=r"fails it failed: E-TST-01 the reason"):
        started.call("fails", "it")
    started.check()


def test_a_process_that_ends_by_itself_is_told_with_the_end_of_its_log(started: Processes) -> None:
    started.log.write_bytes(b"")
    started.start("fails", "it")
    started.running[0].wait()
    with pytest.raises(
        UnavailableError, match=r"a process of the demo ended unexpectedly: .*fails it\nE-TST-01 the reason"
    ):
        started.check()
