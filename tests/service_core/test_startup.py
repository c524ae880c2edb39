"""Ctrl-C at any moment of start-up: exit code 130 and no traceback. Files are for their owner alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from service_core.storage.private_files import private_home
from tests.support import some

pytestmark = pytest.mark.integration

# Sends the signal to itself when a module is first looked for, and runs the program as its console script does.
INTERRUPTED = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from PROGRAM.cli.main import main
main()
raise SystemExit("MODULE was never imported")
"""
SERVE = ["serve", "--data", "digits/hospital0"]


@pytest.mark.parametrize(
    ("program", "module", "words"),
    some(
        [
            ("silo", "typer", ["status"]),
            ("silo", "cryptography.x509", ["status"]),
            ("silo", "silo.cli.status", ["status"]),
            ("silo", "silo.service.service", SERVE),
            ("silo", "numpy", SERVE),
            ("silo", "silo.service.workers", SERVE),
            ("silo", "grpc", SERVE),
            ("coordinator", "typer", ["status"]),
            ("coordinator", "coordinator.cli.runs", ["status"]),
            ("coordinator", "sqlalchemy", ["invite", "a"]),
            ("coordinator", "grpc", ["serve"]),
            ("coordinator", "coordinator.runs.scheduler", ["serve"]),
            ("coordinator", "coordinator.api.server", ["serve"]),
        ],
        2,
    ),
)
@pytest.mark.fault("an operator", "presses Ctrl-C while a program starts", "exit code 130, no traceback")
def test_an_interrupt_at_any_moment_of_the_start_ends_quietly(
    tmp_path: Path, program: str, module: str, words: list[str]
) -> None:
    script = INTERRUPTED.replace("MODULE", repr(module)).replace("PROGRAM", program)
    done = subprocess.run(
        [sys.executable, "-c", script, *words, "--home", str(tmp_path / "home")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.fault("another user", "reads a home or a database", "only the owner can: permissions are restricted")
def test_a_home_and_its_databases_are_closed_to_others_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    assert mode(private_home(home)) == 0o700
    assert caplog.text == ""
    files = [home / name for name in ("silo.db", "silo.db-wal", "silo.db-shm", "coordinator.sqlite", "ledger.db")]
    for path in files:
        path.touch()
        path.chmod(0o644)
    home.chmod(0o755)
    private_home(home)
    assert {mode(path) for path in files} == {0o600}
    assert mode(home) == 0o700
    assert all(f"tightened permissions of {path}:" in caplog.text for path in (home, *files))
    caplog.clear()
    private_home(home)
    assert caplog.text == ""


def test_what_a_program_writes_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        words = [sys.executable, "-m", "coordinator.cli.main", "init", "c", "--address", "localhost:1"]
        for more in (["--home", str(tmp_path / "home")],):
            subprocess.run([*words, *more], check=True, capture_output=True, cwd=Path(__file__).parents[2])
        out = tmp_path / "token"
        subprocess.run(
            [*words[:3], "invite", "a", "--out", str(out), "--home", str(tmp_path / "home")],
            check=True,
            capture_output=True,
            cwd=Path(__file__).parents[2],
        )
    finally:
        os.umask(before)
    assert mode(out) == 0o600
    assert out.read_text().startswith("consilium1.")
    assert mode(tmp_path / "home") == 0o700
    assert {mode(path) for path in (tmp_path / "home").glob("*.sqlite*")} == {0o600}
