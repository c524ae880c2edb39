"""`silo health` is true: of a service that lives, hangs, lost its session, or is gone, and of a file that lies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from service_core.operations.exit_status import READY, notify
from silo.cli.main import run
from silo.events import event
from silo.operations.liveness import FILE, Health, Liveness, since_boot
from silo.storage.home import Home
from tests.support import until
from tests.support.fake_coordinator import enrolled


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path)
    with made.locked():
        yield made


def test_it_is_connected_or_says_since_when_and_why_not(home, capsys):
    heart = Liveness(home)
    heart.beat()
    assert run(["health", "--home", str(home.path)]) == 0
    assert run(["health", "--home", str(home.path), "--connected"]) == 1
    heart.note(event("connected", "connected"))
    heart.beat()
    assert run(["health", "--home", str(home.path), "--connected"]) == 0
    assert "connected since" in capsys.readouterr().out
    heart.note(event("disconnected", "gone", facts={"code": "E-NET-12"}))
    heart.beat()
    found = Health.of(home)
    assert (found.alive, found.connected, found.why) == (True, False, "E-NET-12")


def test_without_a_service_it_is_not_alive(tmp_path):
    Liveness(Home(tmp_path)).beat()
    assert not Health.of(Home(tmp_path)).alive
    assert run(["health", "--home", str(tmp_path)]) == 1


@pytest.mark.fault("a service", "hangs, or its machine was restarted", "`silo health` reports that it is not alive")
@pytest.mark.parametrize("age", [31.0, 1e9, -1.0, float("nan"), float("inf")])
def test_a_beat_of_another_time_is_none(home, age):
    Liveness(home, lambda: 100.0).beat()
    assert Health.of(home, lambda: 110.0).alive
    assert not Health.of(home, lambda: 100.0 + age).alive


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"beat": "x"}', '{"beat": 1e999, "connected": 1}', "\xff"])
def test_a_file_with_anything_in_it_is_no_life(home, text):
    (home.path / FILE).write_text(text)
    assert not Health.of(home).alive


def test_a_disk_that_takes_nothing_ends_no_service(home, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        Liveness(home).beat()
    assert not Health.of(home).alive


@pytest.mark.parametrize("address", ["", "nonsense", "/nowhere/socket", "@" + "x" * 300, "/" + "y" * 300])
def test_no_service_fails_for_its_manager(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify(READY)


@pytest.mark.integration
@pytest.mark.fault("an operator", "stops a service with SIGSTOP", "`silo health` reports that it is not alive")
def test_a_service_tells_its_manager_and_lives_until_it_is_stopped(tmp_path):
    home = enrolled(tmp_path / "home")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(100)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "no_proxy": "*", "NOTIFY_SOCKET": str(tmp_path / "notify")}
        line = [str(Path(sys.executable).with_name("silo")), "serve", "--data", "digits/hospital0", "--device", "cpu"]
        process = subprocess.Popen([*line, "--home", str(home.path)], stdout=subprocess.DEVNULL, env=env)
        try:
            assert manager.recv(100) == b"READY=1"
            until(lambda: Health.of(home).alive, seconds=30)
            assert not Health.of(home).connected
            process.send_signal(signal.SIGSTOP)
            assert not Health.of(home, lambda: since_boot() + 60).alive  # half a minute of silence later
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    assert not Health.of(home).alive
