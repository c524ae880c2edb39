"""`coordinator demo` writes what it found, and leaves nothing behind when it is interrupted, at whatever moment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import until
from tests.support.processes import BIN, ENV

pytestmark = pytest.mark.integration


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
        pytest.param("first process", [signal.SIGTERM], marks=pytest.mark.slow),
        ("enrolment", [signal.SIGINT, signal.SIGINT, signal.SIGTERM]),
        pytest.param("training", [signal.SIGINT], marks=pytest.mark.slow),
        pytest.param("training", [signal.SIGHUP, signal.SIGINT], marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_demo_leaves_no_process_and_no_folder(demo: Demo, moment: str, signals: list[int]) -> None:
    until(lambda: demo.process.poll() is not None or MOMENTS[moment](demo), moment, seconds=400)
    assert demo.process.poll() is None, demo.log()
    for number in signals:
        demo.process.send_signal(number)
    assert demo.process.wait(60) == 128 + signals[0]
    assert demo.children() == []
    assert list(demo.scratch.glob("consilium-*")) == []  # torch keeps a cache of its own there


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_a_terminal_the_demo_says_in_plain_lines_what_it_does_and_ends_with_its_page_and_a_table(
    tmp_path: Path,
) -> None:
    words = [str(BIN / "consilium"), "demo", "--out", str(tmp_path / "out"), "--rounds", "1"]
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    lines = done.stderr.splitlines()
    assert lines[0] == "Set-up: 0 of 13, loads PyTorch"
    assert [
        k for k in range(6) if not re.search(rf"^hospital{k} +process \d+ +joined", done.stderr, re.MULTILINE)
    ] == []
    bars = [f"{name}: {n} of {n}, " for name, n in (("Set-up", 13), ("FedAvg", 1), ("FedGELA", 1), ("analytic", 1))]
    for bar in (*bars, "analytic, epsilon 8: 2 of 2, "):
        assert any(line.startswith(bar) for line in lines), bar
    assert not any(" accepted " in line for line in lines), "events are for --verbose"
    assert done.stdout.startswith(f"The results, as a page: {(tmp_path / 'out/index.html').as_uri()}\n")
    assert done.stdout.count("classified correctly") == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_summary_tells_what_the_private_row_cost_each_hospital(tmp_path: Path) -> None:
    words = [str(BIN / "coordinator"), "demo", "--out", str(tmp_path), "--rounds", "2", "--json"]
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert json.loads(done.stdout) == summary
    names = [f"hospital{k}" for k in range(6)]
    assert 0 < summary["private_global_accuracy"] <= summary["private_best_global_accuracy"] <= 1
    assert set(summary["accuracy_by_round"]) == {"fedavg", "fedgela", "analytic", "analytic-private"}
    assert sorted(summary["epsilon"]) == sorted(summary["delta"]) == names
    for silo in summary["silos"]:
        assert silo["epsilon"] == summary["epsilon"][silo["name"]]
        assert silo["epsilon"] == pytest.approx(summary["epsilon_projected"][silo["name"]], rel=1e-9)
        assert 5 < silo["epsilon"] <= 8
        assert silo["delta"] == 1e-5
    assert set(summary["model"].values()) == {"digits_cnn", "random_features"}
    assert summary["analytic_global_accuracy"] > 0.96
    assert all(0 < sum(count > 0 for count in held) <= 2 for held in summary["training_images"].values())
    assert (tmp_path / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "index.html").read_text()
    assert page.count("<table") >= 6
    assert not re.findall(r"(?:src|href|action)=", page), "it needs nothing but itself"
