"""Several ways to do the same work, timed in turn, so that other load on the machine affects all of them."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from fl_core.training.devices import choose_device

Value = str | int | float | Sequence[object] | Mapping[str, object]
Found = Mapping[str, Value]


@dataclass(slots=True)
class Timed:
    """Seconds of one way, turn by turn: by the clock, and of the processor over all threads of this process."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, work: Callable[[], object], device: torch.device | None = None) -> None:
        """Do the work once and note how long it took, a GPU's part included."""
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def interleaved(
    ways: Mapping[str, Callable[[], object]], turns: int, warm_up: int = 1, device: torch.device | None = None
) -> dict[str, Timed]:
    """Do each way once per turn, a different one first every time; the first `warm_up` turns are not noted."""
    found, names = {name: Timed() for name in ways}, list(ways)
    for turn in range(turns + warm_up):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            (found[name] if turn >= warm_up else Timed()).add(ways[name], device)
    return found


def milliseconds(timed: Mapping[str, Timed], per: float = 1.0) -> dict[str, Value]:
    """Return the median of each way in ms, by the clock and of the processor; per: units of work in one turn."""
    found: dict[str, Value] = {f"{name}_ms": round(1e3 * median(t.wall) / per, 3) for name, t in timed.items()}
    return found | {f"{name}_cpu_ms": round(1e3 * median(t.cpu) / per, 3) for name, t in timed.items()}


def ratio(subject: Timed, reference: Timed) -> dict[str, Value]:
    """Return the medians over turns of subject / reference in the same turn, by the clock and of the processor."""
    return {
        "ratio": round(median(a / b for a, b in zip(subject.wall, reference.wall, strict=True)), 3),
        "cpu_ratio": round(median(a / b for a, b in zip(subject.cpu, reference.cpu, strict=True)), 3),
    }


def machine(device: str = "cpu") -> dict[str, Value]:
    """Describe what numbers were computed on; device: cpu, cuda, cuda:N or auto."""
    chosen = choose_device(device)
    return {
        "processor": platform.machine(),
        "device": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(found: Found, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value}")
