"""The search behind the demo's private profile: private FedAvg on `digits_linear`, written a second time for speed.

    python -m benchmarks.privacy_budget.search        the settings of SEARCH, four seeds each, as a Markdown table

The gradient of softmax regression behind a linear projection is a sum of outer products, so that the norms which
clipping needs come from two vectors per layer (Goodfellow, "Efficient Per-Example Gradient Computations", 2015) and a
round of all hospitals is a few matrix products: a twentieth of a simulated run. It shares the accountant and the data
with the rest, and nothing else; a test holds both to the same result where noise is negligible. FedMR's terms are not
in it: what it found was confirmed with the real thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import mean, stdev

import numpy as np
import torch
from numpy.typing import NDArray

from fl_core import datasets
from fl_core.models import build_model
from privacy.accounting.accountant import Mechanism, solve_noise
from privacy.accounting.record_config import round_to_two_digits

Array = NDArray[np.float64]
Split = tuple[Array, NDArray[np.int64]]
EPS = 1e-5
MOMENTUM = 0.9
DELTA = 1e-5


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the search; batch is the expected one per hospital, d the projection's width (0: none)."""

    federation: str = "hospitals6"
    epsilon: float = 8.0
    lr: float = 5.0
    rounds: int = 20
    batch: int = 300
    d: int = 16
    clip: float = 1.0

    def __str__(self) -> str:
        """Name the federation, epsilon and the rate, and of the rest what is not the default."""
        rest = [f.name for f in fields(self)[3:] if getattr(self, f.name) != f.default]
        changed = "".join(f", {name} {getattr(self, name):g}" for name in rest)
        return f"{self.federation}, epsilon {self.epsilon:g}, lr {self.lr:g}{changed}"


SEARCH = (
    *(Setting(lr=lr) for lr in (3.0, 4.0, 5.0, 8.0)),
    *(Setting(lr=lr, d=0) for lr in (3.0, 5.0, 8.0)),
    *(Setting(d=d) for d in (8, 24, 32)),
    *(Setting(lr=lr, clip=c) for lr, c in ((8.0, 0.5), (2.5, 2.0), (2.0, 3.0))),
    *(Setting(lr=lr, rounds=r) for lr, r in ((5.0, 10), (4.0, 30))),
    *(Setting(lr=lr, batch=b) for lr, b in ((1.0, 150), (0.6, 100), (0.2, 32))),
    *(Setting(epsilon=math.inf, lr=lr, batch=b) for lr, b in ((0.5, 300), (0.03, 32), (0.1, 32))),
    *(Setting("p5c2", math.inf, lr, batch=50) for lr in (0.05, 0.1, 0.2)),
    *(Setting("p5c2", 8.0, lr) for lr in (2.0, 4.0, 5.0, 6.0, 8.0)),
    *(Setting("p5c2", 4.0, lr) for lr in (2.0, 3.0, 4.0, 5.0)),
    *(Setting("p5c2", 2.0, lr) for lr in (1.0, 2.0, 3.0, 4.0)),
    *(Setting("p5c2", 1.0, lr) for lr in (0.5, 1.0, 2.0, 3.0)),
)
SEEDS = tuple(range(10, 14))


def run(setting: Setting, seed: int, noisy: bool = True) -> list[float]:
    """Train and return the accuracy on all test images after 1, 2, ... rounds; noisy: False adds no noise."""
    silos, test = _data(setting.federation)
    draw = np.random.default_rng(seed)
    weights = _initial(setting.d, seed)
    sizes = [round_to_two_digits(len(y)) for _, y in silos]
    found = []
    for _ in range(setting.rounds):
        total = [np.zeros_like(w) for w in weights]
        for silo, n in zip(silos, sizes, strict=True):
            trained = _train(setting, silo, n, weights, draw, noisy)
            total = [t + n * (new - old) for t, new, old in zip(total, trained, weights, strict=True)]
        weights = [w + t / sum(sizes) for w, t in zip(weights, total, strict=True)]
        found.append(float((_logits(weights, test[0])[0].argmax(1) == test[1]).mean()))
    return found


def _train(
    setting: Setting, silo: Split, n: int, start: Sequence[Array], draw: np.random.Generator, noisy: bool
) -> list[Array]:
    """Take one hospital's steps of a round: Poisson samples, clipped sums, noise, a constant divisor, momentum."""
    x, y = silo
    rate = min(1.0, setting.batch / n)
    steps = max(1, round(1 / rate))
    z = _noise(setting.epsilon, rate, steps * setting.rounds) if noisy else 0.0
    weights, speed = list(start), [np.zeros_like(w) for w in start]
    clip = math.inf if math.isinf(setting.epsilon) else setting.clip
    for _ in range(steps):
        drawn = draw.random(len(y)) < rate
        for i, g in enumerate(_clipped_sum(weights, x[drawn], y[drawn], clip)):
            noise = draw.normal(size=g.shape) * (z * setting.clip) if z else 0.0
            speed[i] = MOMENTUM * speed[i] + (g + noise) / (rate * n)
            weights[i] = weights[i] - setting.lr * speed[i]
    return weights


def _logits(weights: Sequence[Array], x: Array) -> tuple[Array, Array]:
    """Return logits (n, C) and features (n, d); weights are W, b of the projection, if any, and of the head."""
    h = x @ weights[0].T + weights[1] if len(weights) == 4 else x
    return h @ weights[-2].T + weights[-1], h


def _clipped_sum(weights: Sequence[Array], x: Array, y: NDArray[np.int64], clip: float) -> list[Array]:
    """Sum per-example gradients of the cross entropy, each shortened to `clip`; |a b^T|^2 = |a|^2 |b|^2."""
    o, h = _logits(weights, x)
    e = np.exp(o - o.max(1, keepdims=True))
    up = e / e.sum(1, keepdims=True)
    up[np.arange(len(y)), y] -= 1.0
    below = up @ weights[-2]
    square = (up**2).sum(1) * (1 + (h**2).sum(1))
    if len(weights) == 4:
        square = square + (below**2).sum(1) * (1 + (x**2).sum(1))
    factor = np.minimum(1.0, clip / np.sqrt(square + 1e-30))[:, None]
    head = [(factor * up).T @ h, (factor * up).sum(0)]
    return [(factor * below).T @ x, (factor * below).sum(0), *head] if len(weights) == 4 else head


@lru_cache
def _noise(epsilon: float, rate: float, steps: int) -> float:
    return 0.0 if math.isinf(epsilon) else solve_noise(epsilon, DELTA, lambda z: [Mechanism(z, rate, steps)])


def _initial(d: int, seed: int) -> list[Array]:
    schema = datasets.schema_of("digits")
    model = build_model("digits_linear", {"projection": [d] if d else []}, schema, seed)
    return [p.detach().double().numpy() for p in model.parameters()]


@lru_cache
def _data(federation: str) -> tuple[list[Split], Split]:
    """Load every hospital's training images and all test images, standardised as `digits_linear` does."""
    sets = [datasets.load(reference) for reference in datasets.federation("digits", federation)]
    train = [_split(s.train) for s in sets]
    test = [_split(s.test) for s in sets]
    return train, (np.concatenate([x for x, _ in test]), np.concatenate([y for _, y in test]))


def _split(examples: object) -> Split:
    pixels, labels = examples.batch(torch.arange(len(examples)))  # type: ignore[attr-defined, arg-type]
    x = pixels.flatten(1).double().numpy()
    x = x - x.mean(1, keepdims=True)
    return x / np.sqrt(x.var(1, keepdims=True) + EPS), labels.numpy()


def main() -> None:
    print("| setting | last accuracy, % |\n|---|---|")
    for setting in SEARCH:
        last = [100 * run(setting, seed)[-1] for seed in SEEDS]
        print(f"| {setting} | {mean(last):.1f} ± {stdev(last):.1f} |", flush=True)


if __name__ == "__main__":
    main()
