"""Do everything that a GPU is needed for, in order, as far as the minutes reach; the next visit goes on.

python -m benchmarks.gpu --minutes 25 --data-root /data
python -m benchmarks.gpu --small --device cpu --minutes 2     # the same steps on digits, to see that they work

1. checks      runs on the device beside the same on the CPU: plain, bf16, the words for speed, private, deterministic,
               compiled
2. tests       those of the suite that look for a device
3. throughput  images per second of a silo's training, beside a bare loop of PyTorch, by precision and memory format
4. runs        FedAvg, FedMR (four forms), FedGELA, FedProx, MOON on CIFAR10 P5C2 and P10C3 with the papers' settings

Each of 1 to 3 is done once; 4 takes turns of a few rounds, the run with the fewest rounds first, until there is no time
for one more round. Missing images are told before anything is done.
OUT/steps.jsonl has a line per step and OUT/rounds.jsonl one per round, both with device and date, written as they come.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from benchmarks import timing
from benchmarks.gpu import checks, runs, throughput
from fl_core.errors import FederationError
from fl_core.training.devices import choose_device

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/privacy/mechanisms/record/test_devices.py",
    "tests/fl_core/training/test_devices.py",
    "tests/fl_core/simulation/test_scale.py",
    "tests/fl_core/test_rng.py",
)


@dataclass(frozen=True, slots=True)
class Visit:
    """What one call may do. deadline: of `time.monotonic`."""

    out: Path
    device: str
    deadline: float
    small: bool
    data_root: Path | None
    images: str

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def note(self, file: str, line: Mapping[str, object]) -> None:
        """Append a line of results, with device and date."""
        self.out.mkdir(parents=True, exist_ok=True)
        facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **timing.machine(self.device)}
        with (self.out / file).open("a") as lines:
            lines.write(json.dumps({**line, **facts}, sort_keys=True) + "\n")


def lines(file: Path) -> list[dict[str, object]]:
    """Read results; a last line that a killed visit did not finish is left out."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def visit(given: Visit, steps: Mapping[str, Callable[[Visit], Mapping[str, object]]] | None = None) -> int:
    """Do the steps that are not done, then further rounds; return 1 where a step found something wrong."""
    wrong = 0
    done = {line["step"] for line in lines(given.out / "steps.jsonl") if line.get("complete")}
    for name, step in (STEPS if steps is None else steps).items():
        if name in done:
            continue
        if given.left <= 0:
            print(f"not reached in time: {name}", flush=True)
            continue
        began = time.monotonic()
        try:
            found = dict(step(given))
        except (FederationError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            found = {"complete": False, "wrong": [f"{type(error).__name__}: {error}"[:2000]]}
        found = {"step": name, "complete": True, "seconds": round(time.monotonic() - began, 1), **found}
        given.note("steps.jsonl", found)
        print(json.dumps(found), flush=True)
        wrong |= bool(found.get("wrong"))
    return wrong


def suite(given: Visit) -> Mapping[str, object]:
    """Run the tests that look for a device; the small mode collects them."""
    how = ["--collect-only", "-qq"] if given.small else ["-q", "-x"]
    command = [sys.executable, "-m", "pytest", *how, *TESTS]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, given.left / 4), check=False
    )
    return {"tests": list(TESTS), "wrong": [found.stdout[-2000:]] if found.returncode else []}


def _check(name: str, given: Visit) -> Mapping[str, object]:
    return checks.check(name, given.device)


STEPS: Mapping[str, Callable[[Visit], Mapping[str, object]]] = {
    **{f"check {name}": partial(_check, name) for name in checks.KINDS},
    "tests": suite,
    "throughput": lambda v: throughput.measure(v.device, v.small, lambda: v.left),
    "runs": lambda v: runs.go_on(runs.listed(v.small, v.images), v),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--data-root", type=Path, help="of CIFAR10; not needed with --small")
    parser.add_argument("--images", default="data=cifar10", help="or images=cifar10-5000-1000, from JPEG files")
    parser.add_argument("--small", action="store_true", help="digits and a few rounds")
    given = parser.parse_args(argv)
    try:
        choose_device(given.device)
        deadline = time.monotonic() + 60 * given.minutes
        now = Visit(given.out, given.device, deadline, given.small, given.data_root, given.images)
        runs.require_data(runs.listed(now.small, now.images)[0], now)
    except FederationError as error:
        print(error, file=sys.stderr)
        return 2
    wrong = visit(now)
    print(f"results: steps.jsonl and rounds.jsonl in {now.out}; the same command goes on", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
