"""The commands of README and pages are run, verbatim but for an address and, in a simulation, the number of rounds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import until
from tests.support.processes import BIN, ENV, ROOT, free_port

pytestmark = pytest.mark.integration

README, TWO_HOSPITALS, OPERATIONS, RESEARCH = (
    (ROOT / name).read_text()
    for name in ("README.md", "docs/tutorials/two-hospitals.md", "docs/operations/README.md", "docs/research.md")
)
QUICKSTART = TWO_HOSPITALS + OPERATIONS
"""What a first run needs, and what the same two machines do after it."""
BLOCK = re.compile(r'```sh(?: { data-test="([a-z ]+)" })?\n(.*?)```', re.DOTALL)


def blocks(text: str) -> list[tuple[list[str], str]]:
    return [(match[1].split() if match[1] else [], match[2]) for match in BLOCK.finditer(text)]


def images(folder: Path, classes: dict[str, tuple[int, int, int]], each: int = 20) -> None:
    """Make images of a colour for each class, of other shades and with grain."""
    draw = np.random.default_rng(0)
    for name, colour in classes.items():
        (folder / name).mkdir(parents=True)
        for k in range(each):
            grain = draw.normal(np.array(colour) + k % 20, 8, (40, 48, 3))
            Image.fromarray(np.uint8(grain.clip(0, 255))).save(folder / name / f"{k}.jpg")


class Machine:
    """A home folder and a checkout: what a person at one of the two machines has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.env = {**ENV, "HOME": str(folder), "PATH": f"{BIN}{os.pathsep}{ENV['PATH']}"}
        self.services: list[subprocess.Popen[bytes]] = []

    def run(self, script: str) -> str:
        words = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def start(self, script: str) -> Path:
        """Start what runs until it is stopped; return what it prints to."""
        log = self.folder / f"service{len(self.services)}.log"
        with log.open("wb") as out:
            words = ["bash", "-c", f"exec {script.strip()}"]
            self.services.append(subprocess.Popen(words, cwd=self.folder, env=self.env, stdout=out, stderr=out))
        return log

    def serve(self, script: str) -> None:
        """Start a service and wait until it takes part: the coordinator serves, a hospital is connected to it."""
        log, ready = self.start(script), b"connected to" if script.startswith("silo") else b"serving on"
        until(lambda: ready in log.read_bytes(), script, 300)

    def stop(self) -> None:
        for service in reversed(self.services):
            service.send_signal(signal.SIGTERM)
        for service in self.services:
            assert service.wait(120) is not None


@pytest.mark.timeout(900)
def test_every_command_of_the_quickstart_works(tmp_path: Path) -> None:
    port = free_port()
    machines = {"north": Machine(tmp_path / "north"), "south": Machine(tmp_path / "south")}
    images(tmp_path / "north/images", {"melanoma": (60, 20, 20), "nevus": (120, 80, 40)})
    images(tmp_path / "south/images", {"nevus": (120, 80, 40), "keratosis": (200, 180, 150)})
    ran = 0
    try:
        for words, script in blocks(QUICKSTART):
            script = script.replace("consilium.example.org:8443", f"127.0.0.1:{port}")
            script = script.replace("0.0.0.0:8443", f"127.0.0.1:{port}")
            if words == ["both"]:
                subprocess.run(["make", "--dry-run", "setup"], cwd=ROOT, check=True, capture_output=True)
                assert script.splitlines()[0] == "make setup"
            elif "service" in words:
                machines[words[0]].serve(script)
            else:
                token = tmp_path / "north/south.token"
                if words == ["south"] and not (tmp_path / "south/south.token").exists():
                    (tmp_path / "south/south.token").write_text(token.read_text())
                machines[words[0]].run(script)
            ran += 1
        assert list((tmp_path / "north/models").glob("*.safetensors"))
    finally:
        for machine in machines.values():
            machine.stop()
    assert ran == QUICKSTART.count("```sh")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ["2", "20"])
def test_every_command_for_researchers_works(rounds: str, tmp_path: Path) -> None:
    (script,) = [script for words, script in blocks(RESEARCH) if words == ["simulate"]]
    assert "rounds=20" in script
    assert "global accuracy" in Machine(tmp_path / "r").run(script.replace("rounds=20", f"rounds={rounds}"))


def test_no_command_of_the_readme_is_without_a_test() -> None:
    commands = [["make demo"], ['pip install ".[research]"', "consilium demo"], ["make setup", "make test"]]
    assert [script.splitlines() for _, script in blocks(README)] == commands
    assert {" ".join(words) for words, _ in blocks(TWO_HOSPITALS)} == {
        *("both", "north", "north service", "south", "south service")
    }
    assert {" ".join(words) for words, _ in blocks(OPERATIONS)} == {"north", "south"}


def test_the_readme_shows_a_picture_and_the_first_command_before_450_words() -> None:
    above, _, below = README.partition("| topic | pages |")
    words = re.sub(r"\]\([^)]*\)", "]", above).split()
    assert len(words) <= 450
    assert README.index("make demo") < 320
    picture = re.search(r"!\[[^]]+\]\(([^)]+)\)", above)
    assert picture is not None
    assert (ROOT / picture[1]).stat().st_size <= 200_000
    assert "## Licence and citation" in below
