"""The audits of training on digits at five seeds, and what each of them sees of faults put in on purpose.

`python -m benchmarks.audit` writes audit.json, faults.json and pictures beside this file; `faults`: only the second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.audit.faults import FAULTS, Missing, Repeated
from consilium.audit import __main__ as program
from consilium.audit import canaries, step_checks
from consilium.audit.step_checks import Step
from consilium.audit.training import AuditTraining
from privacy.mechanisms.noise.sources import SeededNoise

HERE = Path(__file__).parent
SEEDS, RUNS, SHORT = 5, 3000, 600
CASES: dict[str, tuple[str, str, type[SeededNoise]]] = {
    "none": ("micro", "none", SeededNoise),
    "halved noise": ("micro", "halved noise", SeededNoise),
    "small sensitivity": ("micro", "small sensitivity", SeededNoise),
    "missing clip": ("micro", "missing clip", SeededNoise),
    "dealt by place": ("micro", "dealt by place", SeededNoise),
    "missing noise": ("example", "none", Missing),
    "repeated noise": ("example", "none", Repeated),
}
"""By fault: the kind of step that AU-1 to AU-3 look at, what is wrong with training, and the source of noise."""


def scale(kind: str, source: type[SeededNoise], seed: int) -> float:
    """AU-1: noise over the claim's."""
    return step_checks.noise_scale(Step(kind), source(seed, "noise")).ratio


def moved(kind: str, source: type[SeededNoise], seed: int) -> float:  # noqa: ARG001
    """AU-2: the furthest move over the sensitivity."""
    return step_checks.sensitivity(kind, trials=60, seed=seed).furthest


def mu(kind: str, source: type[SeededNoise], seed: int) -> float:
    """AU-3: the lower bound on mu over the claim's."""
    return step_checks.mu(Step(kind), SHORT, (source(seed, "mu", 0), source(seed, "mu", 1)))


def dirac(kind: str, source: type[SeededNoise], seed: int) -> float:  # noqa: ARG001
    """AU-4: what is refuted of training that claims epsilon 1."""
    return canaries.dirac(AuditTraining(1.0, steps=100, lr=0.1), seed=seed, noise=source(seed, "dirac")).guesses.epsilon


MEASURES: dict[str, Callable[[str, type[SeededNoise], int], float]] = {
    "AU-1": scale,
    "AU-2": moved,
    "AU-3": mu,
    "AU-4": dirac,
}


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    file = HERE / "faults.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for name, (kind, fault, source) in CASES.items():
        for audit, measure in MEASURES.items():
            if audit in found.get(name, {}):
                continue
            with FAULTS[fault]():
                values = [round(measure(kind, source, seed), 4) for seed in range(SEEDS)]
            found.setdefault(name, {})[audit] = values
            file.write_text(json.dumps(found, indent=1) + "\n")
            sys.stdout.write(f"{name:18} {audit}  {values}\n")
            sys.stdout.flush()
    if words == ["faults"]:
        return 0
    return program.main([*words, "--seeds", str(SEEDS), "--runs", str(RUNS), "--out", str(HERE)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
