"""Each attack of a hostile coordinator on private training as it is, and with the fault that the attack detects.

`python -m benchmarks.audit.hostile` writes hostile.json beside this file, goes on where it stopped, prints a table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.audit.faults import FAULTS
from consilium.audit import hostile
from consilium.audit.worlds import measure
from privacy.mechanisms.noise.sources import NoiseSource, SeededNoise

HERE = Path(__file__).parent
FAULT_OF: Mapping[str, str] = {
    "overflow": "finite check removed",
    "layer norm": "finite check removed",
    "prototype": "finite check removed",
    "low bits": "rounding removed",
    "augmentation": "draws by position",
    "dropout": "draws by position",
    "batch shape": "any batch shape",
    "convolution": "convolutions not clipped",
    "linear": "missing clip",
    "normalisation": "missing clip",
    "worst record": "halved noise",
    "moments": "moments not clipped",
    "class of one": "halved noise on moments",
    "centred release": "halved noise on moments",
}
"""The fault that each attack detects: how training was before, or a fault of its kind."""


class Repeating(SeededNoise):
    """Noise that repeats, so that the table does; layers draw from it as they do at a hospital."""

    private = True


def source(world: bool, trial: int) -> NoiseSource:
    return Repeating(0, "hostile", int(world), trial)


def main() -> int:
    """Measure what is missing; the exit status is 1 when a claim is refuted, or a fault is not seen."""
    torch.set_num_threads(1)
    file = HERE / "hostile.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for attack in hostile.attacks():
        if attack.name in found:
            continue
        fault = FAULT_OF[attack.name]
        sound = measure(attack, source)
        with FAULTS[fault]():
            faulty = measure(attack, source)
        found[attack.name] = {"sound": asdict(sound), "fault": fault, "faulty": asdict(faulty)}
        file.write_text(json.dumps(found, indent=1) + "\n")
        sys.stdout.write(f"{attack.name}: {sound.lower:.2f}, {sound.gaussian:.2f}; {fault}: {faulty.lower:.2f}\n")
        sys.stdout.flush()
    sys.stdout.write(table(found))
    return int(
        any(
            _bound(f["sound"]) > f["sound"]["printed"] or _bound(f["faulty"]) <= f["sound"]["printed"]
            for f in found.values()
        )
    )


def table(found: Mapping[str, Mapping[str, dict[str, float]]]) -> str:
    rows = [
        "| attack | epsilon printed | lower bound at 95 % | of the Gaussian | fault put in | lower bound then |",
        "|---|---|---|---|---|---|",
    ]
    for name, f in found.items():
        sound, faulty = f["sound"], f["faulty"]
        rows.append(
            f"| {name} | {sound['printed']:.2f} | {sound['lower']:.2f} | {sound['gaussian']:.2f} | {f['fault']} | "
            f"**{_bound(faulty):.1f}** |"
        )
    return "\n".join(rows) + "\n"


def _bound(measured: Mapping[str, float]) -> float:
    return max(measured["lower"], measured["gaussian"])


if __name__ == "__main__":
    sys.exit(main())
