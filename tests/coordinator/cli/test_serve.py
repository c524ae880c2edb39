"""`coordinator serve` as a process: what it does on SIGHUP, and with too few descriptors."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import until
from tests.support.coordinator import World
from tests.support.processes import ENV
from tests.support.warm import Warm


@contextmanager
def serving(home: Path, log: Path, descriptors: int = 0) -> Iterator[Warm]:
    limits = {resource.RLIMIT_NOFILE: descriptors} if descriptors else {}
    words = ["coordinator", "serve", "--bind", "127.0.0.1:0", "--home", str(home)]
    with log.open("wb") as out:
        process = Warm(words, out, out, env=ENV, limits=limits)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.integration
@pytest.mark.fault("an operator", "closes a coordinator's terminal, or sends it SIGHUP", "it continues and logs this")
def test_a_coordinator_goes_on_after_a_hangup_and_logs_it(tmp_path: Path) -> None:
    home, log = World.create(tmp_path / "home", ["north"]).home, tmp_path / "log"
    with serving(home, log) as process:
        until(lambda: b"serving on" in log.read_bytes() or process.poll() is not None, "the service", seconds=120)
        process.send_signal(signal.SIGHUP)
        until(lambda: b"SIGHUP ignored" in log.read_bytes(), "a line about it", seconds=60)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.integration
@pytest.mark.fault(
    "a system", "allows a coordinator only 24 file descriptors", "it refuses to start and names the required limit"
)
def test_a_coordinator_with_too_few_descriptors_ends_with_the_number_that_it_needs(tmp_path: Path) -> None:
    home, log = World.create(tmp_path / "home", ["north"]).home, tmp_path / "log"
    with serving(home, log, descriptors=24) as process:
        assert process.wait(120) == 1
    assert "E-STATE-63" in log.read_text()
    assert "LimitNOFILE" in log.read_text()
    assert "256" in log.read_text()


@pytest.mark.integration
def test_the_number_that_it_names_is_enough(tmp_path: Path) -> None:
    home, log = World.create(tmp_path / "home", ["north"]).home, tmp_path / "log"
    with serving(home, log, descriptors=256) as process:
        until(lambda: b"serving on" in log.read_bytes() or process.poll() is not None, "the service", seconds=120)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
