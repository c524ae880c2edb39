"""Both programs as an operator meets them: exit statuses, logs, signals; as processes, through a shell."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from coordinator.cli.main import program as coordinator_program
from coordinator.lead.client import ADDRESS_FILE
from fl_core.errors import DataError, RefusedError, UnavailableError
from service_core.loopback import LoopbackAddress
from service_core.operations.exit_status import status_of
from silo.cli.main import run
from tests.support import until
from tests.support.coordinator import World
from tests.support.fake_coordinator import enrolled
from tests.support.pages import get
from tests.support.warm import Warm

pytestmark = pytest.mark.integration

PROGRAMS = {name: Path(sys.executable).with_name(name) for name in ("coordinator", "silo")}
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "no_proxy": "*"}


def call(program: str, *words: str) -> int:
    return run(list(words)) if program == "silo" else coordinator_program().run(words)


@contextmanager
def serving(log: Path, program: str, *words: str) -> Iterator[Warm]:
    """A service with its standard error in a file, ended with the block."""
    with log.open("wb") as err:
        process = Warm([program, "serve", *words], None, err, env=ENV)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["doctor", "--home", "{home}", "--json"], 0),
        (["doctor", "--home", "{home}", "--jsn"], 2),
        (["nonsense"], 2),
        (["serve", "--home", "{home}", "--log-format", "xml"], 2),
    ],
)
def test_statuses_are_the_same_for_both_programs(program, words, status, tmp_path):
    assert call(program, *(word.format(home=tmp_path / "home") for word in words)) == status
    assert not (tmp_path / "home").exists()


def test_an_error_is_one_line_with_a_code_and_its_status_says_whose_turn_it_is(tmp_path, capsys):
    for program, words, status in (
        ("coordinator", ["status", "--home", str(tmp_path)], 1),
        ("coordinator", ["explain", "E-XYZ-99"], 2),
        ("silo", ["status", "--home", str(tmp_path)], 1),
        ("silo", ["join", "nonsense", "--home", str(tmp_path)], 2),
        ("silo", ["data", "check", "folder:/nowhere", "--classes", "a,b"], 2),
    ):
        capsys.readouterr()
        assert call(program, *words) == status
        err = capsys.readouterr().err
        assert err.startswith("E-")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (SystemExit(3), 3),
        (SystemExit(None), 0),
        (SystemExit("words"), 1),
        (KeyboardInterrupt(), 130),
        (DataError("E-DATA-08", "x"), 2),
        (RefusedError("E-ID-12", "x"), 1),
        (UnavailableError("E-NET-01", "x"), 1),
        (OSError(28, "No space left on device"), 1),
        (sqlite3.OperationalError("disk I/O error"), 1),
    ],
)
def test_each_end_has_its_status(end, status, capsys):
    def command() -> None:
        raise end

    assert status_of(command) == status
    assert "Traceback" not in capsys.readouterr().err


def test_the_page_for_operators_has_the_statuses():
    page = (Path(__file__).resolve().parents[2] / "docs/operations/README.md").read_text()
    for status in ("0", "1", "2", "130", "143"):
        assert f"\n| {status} |" in page


@pytest.mark.fault("a pipe's reader", "closes the pipe while a command prints", "exit status 1, no traceback")
def test_a_reader_that_has_gone_is_no_traceback():
    process = subprocess.Popen(
        [str(PROGRAMS["silo"]), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == b""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_a_service_at_once(tmp_path, number, status):
    program = (
        "import os, signal, sys\n"
        "from service_core.operations.exit_status import ShutdownSignals\n"
        "with ShutdownSignals():\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    sys.exit(5)\n"
    )
    done = subprocess.run(["/bin/sh", "-c", f"{sys.executable} -c '{program}'; exit $?"], env=ENV, check=False)
    assert done.returncode == status


def metrics_in(log: Path) -> LoopbackAddress:
    """Find in a service's log where its metrics are."""
    found = re.search(r"metrics on http://127\.0\.0\.1:(\d+)/metrics", log.read_text())
    assert found, log.read_text()
    return LoopbackAddress("127.0.0.1", int(found[1]))


def test_the_log_of_a_coordinator_is_json_line_by_line_also_where_a_stranger_calls(tmp_path):
    world = World.create(tmp_path / "home", [])
    words = ["--home", str(world.home), "--bind", "127.0.0.1:0", "--metrics", "0", "--log-format", "json"]
    with serving(tmp_path / "log", "coordinator", *words) as process:
        until((world.home / ADDRESS_FILE).exists, seconds=60)
        port = json.loads((world.home / ADDRESS_FILE).read_text())["port"]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(20)
            with suppress(ConnectionResetError):
                stranger.recv(100)
        assert "consilium_coordinator_ready 1.0" in get(metrics_in(tmp_path / "log"), "/metrics")[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert "coordinator.api.server" in {line["logger"] for line in lines}
    assert all(line["at"] and line["level"] for line in lines)


def test_the_log_of_a_silo_is_json_line_by_line(tmp_path):
    home = enrolled(tmp_path / "home")
    words = ["--data", "digits/hospital0", "--home", str(home.path), "--device", "cpu", "--log-format", "json"]
    words += ["--metrics", "0"]
    with serving(tmp_path / "log", "silo", *words) as process:
        until(lambda: '"serving"' in (tmp_path / "log").read_text() or process.poll() is not None, seconds=60)
        assert "consilium_silo_connected 0.0" in get(metrics_in(tmp_path / "log"), "/metrics")[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    events = [line for line in lines if "event" in line]
    assert [line["event"] for line in events[:3]] == ["metrics", "privacy", "serving"]
    serving_line = events[2]
    assert (serving_line["silo"], serving_line["logger"]) == ("center1", "silo")
