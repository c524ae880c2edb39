"""Do what a GPU is needed for, the most valuable first, as far as the minutes reach; the next visit goes on.

    python -m benchmarks.gpu --data-root /data --out runs/gpu             ten minutes of one visit
    python -m benchmarks.gpu --dry-run                                    what that would do, with estimates
    python -m benchmarks.gpu --small --device cpu --minutes 2             the same steps on digits

1. skin         the whole of EfficientNet-Lite0 on four centres' images: the medical rows of FedMR and FedGELA
2. comparisons  of benchmarks/comparison, those whose settings name device: cuda
3. throughput   images per second of a silo's training, beside a bare loop of PyTorch, by precision and memory format
4. tests        those of the suite that look for a device
5. checks       runs on the device beside the same on the CPU: plain, bf16, the words for speed, private, deterministic,
                compiled

Skin and comparisons are kept run by run and go on from what the tree's stores or OUT have; each other step is done
once, and begins where its estimate fits into the minutes left. Missing images are told before anything is done.
OUT/steps.jsonl has a line per step, with device and date, written as they come; stores and tables lie beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from benchmarks import run_store, timing
from benchmarks.comparison import run, settings
from benchmarks.comparison.settings import Comparison
from benchmarks.gpu import checks, skin, throughput
from benchmarks.paper import images
from benchmarks.run_store import TimeUpError
from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_simulation
from fl_core import datasets
from fl_core.errors import FederationError
from fl_core.training.devices import choose_device

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/privacy/mechanisms/record/test_devices.py",
    "tests/fl_core/training/test_devices.py",
    "tests/consilium/research/engines/test_scale.py",
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
    results: Path
    jobs: int
    steps: Sequence[str] = ()

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def store(self, name: str) -> Path:
        """Return a store of runs in `results`, with what the tree has of it."""
        file, kept = self.results / name, run.RESULTS / name
        if not file.exists() and kept.exists() and not self.small:
            self.results.mkdir(parents=True, exist_ok=True)
            shutil.copy(kept, file)
        return file

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
        if name in done or (given.steps and not any(name.startswith(asked) for asked in given.steps)):
            continue
        if given.left <= (0.0 if name in BY_RUNS or given.small else SECONDS.get(name, 10.0)):
            print(f"not reached in time: {name}", flush=True)
            continue
        began = time.monotonic()
        try:
            found = dict(step(given))
        except TimeUpError as error:
            found = {"complete": False, "said": str(error)}
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
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, given.left), check=False)
    return {"tests": list(TESTS), "wrong": [found.stdout[-2000:]] if found.returncode else []}


def _check(name: str, given: Visit) -> Mapping[str, object]:
    return checks.check(name, given.device)


SMALL = ("data=digits", "model=digits_cnn", "federation=p5c2", "rounds=2", "train.max_steps=2")


def compared(small: bool) -> list[Comparison]:
    """List the comparisons that need a GPU; small: their methods, one variant at one rate and two seeds, on digits."""
    found = [asked for name in settings.names() if (asked := settings.load(name)).device != "cpu"]
    if not small:
        return found
    return [
        replace(
            asked,
            words=SMALL,
            lrs=asked.lrs[-1:],
            tuning_seeds=asked.tuning_seeds[:1],
            seeds=asked.seeds[:2],
            methods={method: variants[:1] for method, variants in asked.methods.items()},
        )
        for asked in found
    ]


def skin_rows(given: Visit) -> Mapping[str, object]:
    """Go on with the medical rows."""
    small = SMALL if given.small else ()
    skin.compare(given.data_root, given.results, given.jobs, given.deadline, given.device, small)
    return {"results": str(given.results)}


def comparisons(given: Visit) -> Mapping[str, object]:
    """Go on with the comparisons; their tables are written when all of their runs are there."""
    for asked in compared(given.small):
        at = replace(asked, device=given.device)
        run.compare(at, given.results, given.jobs, given.data_root, until=given.deadline)
    return {"results": str(given.results)}


def require_data(given: Visit) -> None:
    """Raise DataError or ConfigError where a comparison has no images, before a minute is spent on anything else."""
    for asked in compared(given.small):
        words = (*asked.words, *asked.methods[asked.baseline][0])
        spec = compose_simulation(images.resolved(words, given.data_root))
        for report in runner.read_silos(spec, images.root_of(words, given.data_root), datasets.check_all)[:1]:
            report.require_sound()


STEPS: Mapping[str, Callable[[Visit], Mapping[str, object]]] = {
    "skin": skin_rows,
    "comparisons": comparisons,
    "throughput": lambda v: throughput.measure(v.device, v.small, lambda: v.left),
    "tests": suite,
    **{f"check {name}": partial(_check, name) for name in checks.KINDS},
}
BY_RUNS = ("skin", "comparisons")
"""Steps that are kept run by run: they may begin whatever time is left."""
SECONDS_OF_A_RUN, SECONDS = 12.0, {"throughput": 60.0, "tests": 60.0, "check compiled": 60.0}
"""Of a ResNet-18's run where ten share an H100, and of other steps (10 where none is named); measured, roughly."""


def estimates(given: Visit) -> dict[str, float]:
    """Say how many seconds each step that is not done takes, in the order of `STEPS`."""
    done = {line["step"] for line in lines(given.out / "steps.jsonl") if line.get("complete")}
    missing = 0
    for asked in compared(given.small):
        counted = len(asked.methods) * len(asked.seeds)
        counted += sum(map(len, asked.methods.values())) * len(asked.lrs) * len(asked.tuning_seeds)
        missing += max(0, counted - len(run_store.read(given.store(f"{asked.name}.jsonl"))))
    found = {"skin": skin.seconds(given.store(skin.STORE)), "comparisons": SECONDS_OF_A_RUN * missing}
    return {name: found.get(name, SECONDS.get(name, 10.0)) for name in STEPS if name not in done}


def plan(given: Visit) -> str:
    """Write what a visit would do, step by step, with the seconds that it would begin after."""
    rows, after = [], 0.0
    for name, seconds in estimates(given).items():
        fits = after + (0 if name in BY_RUNS else seconds) < given.left
        when = f"after {after:4.0f} s" if fits else "next visit"
        rows.append(
            f"{name:22} {seconds:5.0f} s   {when}" + ("" if after + seconds <= given.left or not fits else ", in part")
        )
        after += seconds if fits else 0.0
    return "\n".join([*rows, f"{'in this visit':22} {min(after, given.left):5.0f} s of {given.left:.0f}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--results", type=Path, help="folder of stores and tables; OUT without it")
    parser.add_argument("--jobs", type=int, default=10, help="runs that share the device")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, with estimates, and stop")
    parser.add_argument(
        "--steps", nargs="*", default=(), help="these alone, by how their names begin: check, tests ..."
    )
    parser.add_argument("--data-root", type=Path, help="folder of the image sets; not needed with --small")
    parser.add_argument("--small", action="store_true", help="digits and a few rounds")
    given = parser.parse_args(argv)
    try:
        deadline = time.monotonic() + 60 * given.minutes
        results = given.results or given.out
        now = Visit(
            given.out, given.device, deadline, given.small, given.data_root, results, given.jobs, tuple(given.steps)
        )
        if given.dry_run:
            print(plan(now))
            return 0
        choose_device(given.device)
        require_data(now)
        estimates(now)  # the tree's stores are in the folder from here on
    except FederationError as error:
        print(error, file=sys.stderr)
        return 2
    wrong = visit(now)
    print(f"results: {now.out / 'steps.jsonl'} and {now.results}; the same command goes on", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
