"""`python -m privacy.audit`: attack training on digits, with and without privacy, and draw what was found.

It audits the software: its doors, clips and noise are those that hospitals use. No hospital's records are read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from privacy.audit import attacks, canaries, plots
from privacy.audit.bounds import auc
from privacy.audit.canaries import Training
from privacy.entropy import SeededNoise

EPSILONS = (math.inf, 8.0, 1.0)
FLAGGED, QUIET = 2.0, 0.8
"""Non-private training must be refuted up to at least 2; private training never above its claim, at 1 not above 0.8."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one audit expects and what it found."""

    audit: str
    expected: str
    found: str
    holds: bool


def main(words: Sequence[str]) -> int:
    """Run the named audits (all without a name); the exit status is 1 when one finds what must not be."""
    parser = argparse.ArgumentParser("python -m privacy.audit", description="Attack private training on digits.")
    parser.add_argument("audits", nargs="*", metavar="AUDIT", help=f"of {', '.join(AUDITS)}; all without a name")
    parser.add_argument("--out", type=Path, default=Path("runs/audit"), help="folder of the plots and report.json")
    parser.add_argument("--seeds", type=int, default=1, help="repetitions of the canary audits")
    given = parser.parse_args(list(words))
    if unknown := sorted(set(given.audits) - set(AUDITS)):
        parser.error(f"there is no audit {', '.join(unknown)}; valid: {', '.join(AUDITS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    found = [v for name in given.audits or AUDITS for v in AUDITS[name](given.out, max(1, given.seeds))]
    (given.out / "report.json").write_text(json.dumps([asdict(v) for v in found], indent=1) + "\n", encoding="utf-8")
    for v in found:
        sys.stdout.write(f"{'holds ' if v.holds else 'FAILS '} {v.audit}: expected {v.expected}, found {v.found}\n")
    return 0 if all(v.holds for v in found) else 1


def white_box(out: Path, seeds: int) -> list[Verdict]:
    """AU-4: canaries that push a coordinate of their own."""
    found = {
        _name(e): [
            canaries.dirac(Training(e, steps=200), seed=s, noise=SeededNoise(s, "audit", "dirac")) for s in range(seeds)
        ]
        for e in EPSILONS
    }
    return _canaries("white-box canaries", found, out / "canaries_white_box.png")


def black_box(out: Path, seeds: int) -> list[Verdict]:
    """AU-5: images under wrong labels, scored by the final loss."""
    found = {
        _name(e): [
            canaries.mislabelled(
                Training(e, steps=1500, lr=0.1, momentum=0.9) if math.isinf(e) else Training(e, steps=400, lr=0.2),
                seed=s,
                noise=SeededNoise(s, "audit", "mislabelled"),
            )
            for s in range(seeds)
        ]
        for e in EPSILONS
    }
    return _canaries("black-box canaries", found, out / "canaries_black_box.png")


def membership(out: Path, seeds: int) -> list[Verdict]:  # noqa: ARG001
    """AU-7: the loss of an image tells whether it was trained on."""
    pairs = {
        _name(e): canaries.members(
            Training(e, steps=400 if math.isinf(e) else 100, lr=0.3), noise=SeededNoise(0, "audit", "members")
        )
        for e in EPSILONS
    }
    plots.curves(pairs, out / "membership.png")
    found = {name: auc(*pair) for name, pair in pairs.items()}
    quiet = max(abs(a - 0.5) for name, a in found.items() if name != _name(math.inf))
    return [Verdict("membership by loss", "AUC of 0.5 +- 0.08 under privacy", _said(found), quiet < 0.08)]


def presence(out: Path, seeds: int) -> list[Verdict]:  # noqa: ARG001
    """AU-8: an update shows which classes a hospital has."""
    found = {_name(e): attacks.class_presence(Training(e, steps=20, lr=0.3)) for e in (math.inf, 8.0)}
    plots.presence(found, out / "class_presence.png")
    alone = {name: f.alone for name, f in found.items()}
    masked = {name: f.masked for name, f in found.items()}
    return [
        Verdict("class presence, updates seen", "AUC > 0.98 without privacy", _said(alone), alone["no privacy"] > 0.98),
        Verdict(
            "class presence, sum seen",
            "AUC 0.5 +- 0.1",
            _said(masked),
            all(abs(a - 0.5) <= 0.1 for a in masked.values()),
        ),
    ]


def prototypes(out: Path, seeds: int) -> list[Verdict]:  # noqa: ARG001
    """AU-9: a prototype of few images traces them, and an image can be made from it."""
    cases = [(1, 0.0), (5, 0.0), (20, 0.0), (60, 0.0), (1, 2.0), (1, 8.0), (20, 8.0)]
    found = attacks.prototypes(cases)
    plots.tracing(found, 1 / attacks.CANDIDATES, out / "prototypes.png")
    by = {f"{f.members} images, noise {f.noise:g}": f.tracing for f in found}
    one, hidden = by["1 images, noise 0"], by["1 images, noise 8"]
    return [
        Verdict(
            "prototype tracing", "1 image: AUC > 0.95 bare, < 0.75 at noise 8", _said(by), one > 0.95 and hidden < 0.75
        )
    ]


AUDITS: Mapping[str, Callable[[Path, int], list[Verdict]]] = {
    "white-box": white_box,
    "black-box": black_box,
    "membership": membership,
    "presence": presence,
    "prototypes": prototypes,
}


def _canaries(name: str, found: Mapping[str, Sequence[canaries.Found]], file: Path) -> list[Verdict]:
    plots.bounds(found, {_name(e): e for e in EPSILONS if not math.isinf(e)}, file)
    verdicts = []
    for epsilon in EPSILONS:
        refuted = [f.guesses.epsilon for f in found[_name(epsilon)]]
        said = ", ".join(f"{e:.2f}" for e in refuted)
        if math.isinf(epsilon):
            verdicts.append(Verdict(f"{name}, no privacy", f"at least {FLAGGED}", said, min(refuted) >= FLAGGED))
        else:
            most = QUIET if epsilon == 1 else epsilon
            verdicts.append(Verdict(f"{name}, epsilon {epsilon:g}", f"at most {most:g}", said, max(refuted) <= most))
    return verdicts


def _name(epsilon: float) -> str:
    return "no privacy" if math.isinf(epsilon) else f"epsilon {epsilon:g}"


def _said(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
