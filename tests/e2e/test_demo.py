"""`coordinator demo` leaves nothing behind when it is interrupted, at whatever moment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from e2e.world import BIN, ENV, until


class Demo:
    """A demo in a process group of its own, with a temporary folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.scratch, self.out = folder / "tmp", folder / "out"
        self.scratch.mkdir()
        words = [str(BIN / "coordinator"), "demo", "--out", str(self.out), "--rounds", "500", "--json"]
        with (folder / "stderr").open("wb") as err:
            env = ENV | {"TMPDIR": str(self.scratch)}
            self.process = subprocess.Popen(words, env=env, stdout=err, stderr=err, start_new_session=True)

    def children(self) -> list[psutil.Process]:
        """Every process of the demo, also one that has lost its parent: its command line names the folder."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if process.pid != self.process.pid and str(self.scratch) in " ".join(process.info["cmdline"] or ()):
                found.append(process)
        return found

    def log(self) -> str:
        file = self.out / "demo.log"
        return file.read_text(errors="replace") if file.exists() else ""


@pytest.fixture
def demo(tmp_path: Path):
    made = Demo(tmp_path)
    yield made
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()
    for process in made.children():
        process.kill()


MOMENTS: dict[str, Callable[[Demo], object]] = {
    "first process": lambda demo: demo.children(),
    "enrolment": lambda demo: "serving" in demo.log() and any("silo" in p.name() for p in demo.children()),
    "training": lambda demo: "sent" in demo.log(),
}


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("moment", "signals"),
    [
        ("first process", [signal.SIGTERM]),
        ("enrolment", [signal.SIGINT, signal.SIGINT, signal.SIGTERM]),
        pytest.param("training", [signal.SIGINT], marks=pytest.mark.slow),
        pytest.param("training", [signal.SIGHUP, signal.SIGINT], marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_demo_leaves_no_process_and_no_folder(demo: Demo, moment: str, signals: list[int]) -> None:
    until(lambda: demo.process.poll() is not None or MOMENTS[moment](demo), moment, 400)
    assert demo.process.poll() is None, demo.log()
    for number in signals:
        demo.process.send_signal(number)
    assert demo.process.wait(60) == 128 + signals[0]
    assert demo.children() == []
    assert list(demo.scratch.glob("consilium-*")) == []  # torch keeps a cache of its own there
