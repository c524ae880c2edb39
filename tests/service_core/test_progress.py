"""Nobody waits in silence; without a terminal nothing is overwritten."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from io import StringIO

import pytest

from service_core.console import plain_console
from service_core.progress import Steps, still_working
from tests.support import until


def lines_of(steps_of: object, **how: float) -> list[str]:
    written = StringIO()
    console = plain_console()
    console.file = written
    with Steps(console, **how) as steps:  # type: ignore[arg-type]
        steps_of(steps)  # type: ignore[operator]
    return written.getvalue().splitlines()


def test_a_step_prints_its_first_and_its_last_line_and_no_control_codes() -> None:
    def train(steps: Steps) -> None:
        for done in range(101):
            steps.show("FedAvg", done, 100, f"{done} %\x1b[31m")
        steps.say("hospital0 joined\r")

    lines = lines_of(train, silence_s=60.0)
    assert lines == [r"FedAvg: 0 of 100, 0 %\x1b[31m", r"FedAvg: 100 of 100, 100 %\x1b[31m", r"hospital0 joined\r"]


def test_a_finished_step_is_not_said_twice_but_its_new_result_is() -> None:
    def train(steps: Steps) -> None:
        for note in ("measures", "measures", "98 %"):
            steps.show("FedAvg", 1, 1, note)

    assert lines_of(train, silence_s=60.0) == ["FedAvg: 1 of 1, measures", "FedAvg: 1 of 1, 98 %"]


def test_it_is_never_silent_for_longer_than_it_promises() -> None:
    written = StringIO()
    console = plain_console()
    console.file = written
    with Steps(console, silence_s=0.05) as steps:
        steps.show("Set-up", 0, 13, "loads PyTorch")
        until(lambda: written.getvalue().count("\n") > 3, "lines while nothing happens", seconds=60)
    assert re.search(r"^Set-up: 0 of 13, loads PyTorch, \d+ s so far$", written.getvalue(), re.MULTILINE)


def test_quiet_steps_print_nothing() -> None:
    written = StringIO()
    console = plain_console()
    console.file = written
    with Steps(console, quiet=True) as steps:
        steps.show("Set-up", 0, 13)
        steps.say("joined")
    assert written.getvalue() == ""


def at_a_terminal(code: str) -> str:
    """Run Python code whose standard error is a terminal, and return what it wrote there."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=follower, env=env)
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(leader, 4096):
            shown += piece
    except OSError:  # the other end was closed
        pass
    os.close(leader)
    assert process.wait(60) == 0, shown
    return shown.decode()


WORKING = (
    "import sys, time; from service_core import progress\n"
    "with progress.still_working('coordinator methods', after_s=0.05):\n    "
)


def test_a_command_that_is_silent_at_a_terminal_is_said_to_be_at_work_until_it_prints() -> None:
    code = f"{WORKING}time.sleep(1); print('an answer'); sys.stderr.write('noted\\n'); time.sleep(1); print('more')\n"
    before, _, after = at_a_terminal(code).partition("noted")
    assert "coordinator methods: " in before
    assert before.endswith("\r\x1b[K"), "the line is erased before anything else is written"
    assert "coordinator methods: " in after, "and stands again in the next silence"
    assert after.endswith("\r\x1b[K"), "and is erased at the end"


def test_a_service_that_waits_is_not_said_to_be_at_work_after_its_first_words() -> None:
    code = f"{WORKING}progress.silent_from_now(); time.sleep(0.5); sys.stderr.write('serving\\n'); time.sleep(1)\n"
    before, _, after = at_a_terminal(code).partition("serving")
    assert "coordinator methods: " in before
    assert "coordinator methods" not in after


def test_a_question_is_left_alone() -> None:
    code = f"{WORKING}sys.stderr.write('passphrase: '); time.sleep(0.5)\n"
    assert "coordinator methods" not in at_a_terminal(code).partition("passphrase")[2]


def test_a_command_that_answers_at_once_is_not_said_to_be_at_work() -> None:
    code = "from service_core.progress import still_working\nwith still_working('x', after_s=60): print('an answer')\n"
    assert at_a_terminal(code) == ""


def test_bars_are_drawn_at_a_terminal_alone() -> None:
    code = (
        "from service_core.progress import Steps\n"
        "with Steps() as steps:\n    steps.show('FedAvg [a]', 3, 20, '61 %'); steps.say('hospital0 joined')\n"
    )
    shown = at_a_terminal(code)
    assert "hospital0 joined" in shown
    assert "\x1b[" in shown
    assert re.search(r"FedAvg \[a\].*3/20.*61 %", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown))


def test_without_a_terminal_nothing_is_said_and_streams_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout.write
    with still_working("coordinator methods", after_s=0.01):
        time.sleep(0.1)
        assert sys.stdout.write == before
    assert capsys.readouterr() == ("", "")
