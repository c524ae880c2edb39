"""A process of a service: however it behaves, it ends when it should, with all that it started, and says how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from service_core.workers.child import ChildProcess
from tests.support import until

STARTS_ANOTHER = """
import os, subprocess, sys
other = subprocess.Popen(["sleep", "600"])
print('{"started": %d}' % other.pid, flush=True)
"""


@pytest.fixture
def started() -> Iterator[list[ChildProcess]]:
    made: list[ChildProcess] = []
    yield made
    for child in made:
        child.kill()
        child.end()


def begin(started: list[ChildProcess], code: str) -> ChildProcess:
    words = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    started.append(
        ChildProcess(
            lambda: subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        )
    )
    return started[-1]


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("after", ["sys.stdin.read()", "import time; time.sleep(600)", ""])
def test_a_process_ends_with_all_that_it_started_whether_or_not_it_listens(
    started: list[ChildProcess], after: str
) -> None:
    child = begin(started, STARTS_ANOTHER + after)
    message = child.line.read()
    assert message is not None
    began = time.monotonic()
    child.end()
    assert time.monotonic() - began < 5
    assert not child.lives
    assert not runs(child.pid)
    until(lambda: not runs(message["started"]), "the end of what it started")


def test_a_process_that_ended_by_itself_leaves_nothing_once_that_is_noticed(started: list[ChildProcess]) -> None:
    child = begin(started, STARTS_ANOTHER)
    message = child.line.read()
    assert message is not None
    until(lambda: not child.lives, "its end")
    until(lambda: not runs(message["started"]), "the end of what it started")


def test_a_stopped_process_that_is_written_to_is_ended_by_another_thread(started: list[ChildProcess]) -> None:
    child = begin(started, "import time; time.sleep(600)")
    os.kill(child.pid, signal.SIGSTOP)
    failed = threading.Event()

    def fill() -> None:
        try:
            while True:
                child.line.send(much="x" * (1 << 16))
        except (OSError, ValueError):
            failed.set()

    threading.Thread(target=fill, daemon=True).start()
    began = time.monotonic()
    child.end()
    assert time.monotonic() - began < 5
    assert failed.wait(30)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os._exit(7)", "it ended with status 7"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed by SIGKILL"),
        ("import os; os.abort()", "it was killed by SIGABRT"),
    ],
)
def test_how_a_process_ended_is_said_in_words(started: list[ChildProcess], code: str, said: str) -> None:
    child = begin(started, code)
    assert child.line.read() is None
    assert child.ending() == said


def test_a_process_that_takes_too_long_is_killed_and_that_is_said(started: list[ChildProcess]) -> None:
    child = begin(started, "import time; time.sleep(600)")
    with child.within(0.1, "it was not ready"):
        assert child.line.read() is None
    assert child.ending() == "it was not ready"
    quick = begin(started, "print('{}', flush=True); input()")
    with quick.within(60, "it was not ready"):
        assert quick.line.read() == {}
    assert quick.lives
    assert quick.ending() == "it ended with status 1"


@pytest.mark.parametrize("said", ["{", "[]", "7", "[" * 100_000])
def test_a_line_that_is_no_message_is_an_error_and_half_a_line_an_end(started: list[ChildProcess], said: str) -> None:
    child = begin(started, f"import sys; sys.stdout.write({said!r} + chr(10) + '{{')")
    with pytest.raises(ValueError, match=r"not.* JSON"):
        child.line.read()
    assert child.line.read() is None
