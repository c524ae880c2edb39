"""`python -m consilium.audit`: attack training on digits, with and without privacy, and plot the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from consilium.audit import plots, step_checks
from consilium.audit.runner import AUDITS, AuditSettings, AuditVerdict, Outcome, save
from consilium.audit.step_checks import Step
from consilium.audit.target import AuditTarget

STEPS = {
    "per unit": Step("example"),
    "split": Step("split"),
    "micro": Step("micro"),
    "z = 0.5": Step("example", 0.5),
    "z = 2": Step("example", 2.0),
    "z = 5": Step("example", 5.0),
}
"""Steps for the bound on mu: each kind at z = 1, and other noise multipliers."""


def main(words: Sequence[str]) -> int:
    """Run the named audits, by default all; the exit status is 1 if one fails."""
    valid = ["step", *AUDITS]
    parser = argparse.ArgumentParser("python -m consilium.audit", description="Attack private training on digits.")
    parser.add_argument("audits", nargs="*", metavar="AUDIT", help=f"one of {', '.join(valid)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/audit"), help="folder of the plots and audit.json")
    parser.add_argument("--seeds", type=int, default=1, help="repetitions of every audit that trains")
    parser.add_argument("--runs", type=int, default=10_000, help="steps in each of the two worlds of mu")
    arguments = parser.parse_args(list(words))
    if unknown := sorted(set(arguments.audits) - set(valid)):
        parser.error(f"there is no audit {', '.join(unknown)}; valid: {', '.join(valid)}")
    if arguments.seeds < 1 or arguments.runs < 100:
        parser.error(f"expected at least 1 seed and 100 runs, found {arguments.seeds} and {arguments.runs}: raise them")
    arguments.out.mkdir(parents=True, exist_ok=True)
    setting, target = AuditSettings(seeds=arguments.seeds), AuditTarget.digits()
    failed = False
    for name in arguments.audits or valid:
        out = arguments.out
        outcome = steps(setting, arguments.runs, out) if name == "step" else AUDITS[name](target, setting, out)
        save(arguments.out / "audit.json", name, outcome.json())
        failed |= any(v.holds is False for v in outcome.verdicts)
        sys.stdout.write("".join(f"{v.line()}\n" for v in outcome.verdicts))
        sys.stdout.flush()
    return int(failed)


def steps(setting: AuditSettings, runs: int, out: Path) -> Outcome:
    scales = {k: step_checks.noise_scale(Step(k, 1.3), setting.noise("scale", k)) for k in step_checks.KINDS}
    moved = {
        f"{k}{', groups' * g}": step_checks.sensitivity(k, grouped=g) for k in step_checks.KINDS for g in (False, True)
    }
    refuted = {
        name: [
            float(
                step_checks.mu_bounds(
                    of,
                    runs,
                    [
                        (setting.noise("mu", name, seed, again, 0), setting.noise("mu", name, seed, again, 1))
                        for again in range(3)
                    ],
                )[-1]
            )
            for seed in range(setting.seeds)
        ]
        for name, of in STEPS.items()
    }
    plots.steps(scales, moved, refuted, out / "steps.png")
    verdicts = [
        *(AuditVerdict(f"noise, {k}", "1 +- 0.005 of the claim", f"{s.ratio:.4f}", s.holds) for k, s in scales.items()),
        *(
            AuditVerdict(f"sensitivity, {k}", "at most 1, reached", f"{m.furthest:.6f}", m.holds)
            for k, m in moved.items()
        ),
        *(
            AuditVerdict(f"mu, {name}", "at most 1", ", ".join(f"{v:.3f}" for v in values), max(values) <= 1)
            for name, values in refuted.items()
        ),
    ]
    numbers = {
        "noise": {k: asdict(s) for k, s in scales.items()},
        "sensitivity": {k: asdict(m) for k, m in moved.items()},
        "mu": refuted,
        "runs": runs,
    }
    return Outcome(numbers, verdicts, "steps.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
