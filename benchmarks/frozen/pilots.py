"""What two ideas add to the closed form, before either is built: measured on validation images, by numpy alone.

    python -m benchmarks.frozen.pilots fmnist ROOT                 Fashion-MNIST, all 60,000, on patch features
    python -m benchmarks.frozen.pilots cifar10 ROOT                CIFAR-10, all 50,000
    python -m benchmarks.frozen.pilots isic LITE0.npz LITE2.npz    Fed-ISIC2019, on features of EfficientNet-Lite2

expand: D cosine or ReLU features of the standardised features (Rahimi and Recht, NIPS 2007), then ridge.
residual: layers z + relu(z G) M, each M in closed form from the last layer's residuals, as in DeepAFL (ICLR 2026).
Every figure is the best lambda of a grid on the very images that it is read on: what a pilot cannot reach so, it cannot
reach honestly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.frozen import isic, limits
from benchmarks.frozen import patches as rows
from fl_core import rng

LAMBDAS = tuple(10.0 ** (k / 2) for k in range(-10, 5))
LENGTHS = (0.5, 1.0, 2.0)
_AT_ONCE = 4096
Split = tuple[Tensor, Tensor, Tensor, Tensor]
"""Features (n, d) and classes (n,) that train, and those of validation images."""


def standardised(split: Split) -> Split:
    z, y, of_test, truth = split
    mean, spread = z.mean(0), z.std(0)
    spread[spread == 0] = 1
    return (z - mean) / spread, y, (of_test - mean) / spread, truth


def solved(z: Tensor, targets: Tensor, w: Tensor) -> Iterator[Tensor]:
    """Give W (d, C) of weighted ridge on centred features for each lambda, in units of a feature's variance."""
    A, B = (torch.zeros(z.shape[1], k, dtype=torch.float64) for k in (z.shape[1], targets.shape[1]))
    for part in torch.split(torch.arange(len(z)), _AT_ONCE):
        weighed = z[part] * w[part].unsqueeze(1)
        A += (weighed.T @ z[part]).double()
        B += (weighed.T @ targets[part]).double()
    values, vectors = torch.linalg.eigh(A)
    q = vectors.T @ B
    for ridge in LAMBDAS:
        yield (vectors @ (q / (values.clamp(min=0.0) + ridge * w.sum()).unsqueeze(1))).float()


def best(split: Split, weighed: bool) -> tuple[float, Tensor, Tensor]:
    """Return the best (balanced) accuracy on validation images, its W, and the targets (n, C), centred."""
    z, y, of_test, truth = split
    classes = int(y.max()) + 1
    counts = torch.bincount(y, minlength=classes).float()
    w = (len(y) / (classes * counts))[y] if weighed else torch.ones(len(y))
    one_hot = torch.nn.functional.one_hot(y, classes).float()
    base = (w @ one_hot) / w.sum()
    centre = (w @ z) / w.sum()
    found = [(-1.0, torch.empty(0))]
    for W in solved(z - centre, one_hot - base, w):
        right = ((of_test - centre) @ W + base).argmax(1) == truth
        of_class = [right[truth == c].float().mean() for c in truth.unique()] if weighed else [right.float().mean()]
        found.append((100 * float(torch.stack(of_class).mean()), W))
    return (*max(found, key=lambda one: one[0]), one_hot - base)


def expanded(split: Split, width: int, kind: str, length: float, seed: int) -> Split:
    z, y, of_test, truth = split
    generator = rng.stream(seed, "expand", kind)
    G = torch.randn(z.shape[1], width, generator=generator) / (length * z.shape[1] ** 0.5)
    phase = 2 * torch.pi * torch.rand(width, generator=generator)
    of = (lambda x: torch.cos(x @ G + phase)) if kind == "cosine" else (lambda x: torch.relu(x @ G))
    return of(z), y, of(of_test), truth


def deeper(split: Split, W: Tensor, targets: Tensor, width: int, gamma: float, seed: int) -> Split:
    """Add a residual layer: M minimises |R - F M W|^2 + gamma n |M|^2, with F = relu(z G) and the residuals R."""
    z, y, of_test, truth = split
    G = torch.randn(z.shape[1], width, generator=rng.stream(seed, "residual")) / z.shape[1] ** 0.5
    F, of_F = (torch.relu(x @ G) for x in (z, of_test))
    a, U = torch.linalg.eigh((F.T @ F).double())
    b, V = torch.linalg.eigh((W @ W.T).double())
    right = (F.T @ ((targets - (z - z.mean(0)) @ W) @ W.T)).double()
    scale = gamma * len(z) * float(b.max())
    M = (U @ ((U.T @ right @ V) / (a.clamp(min=0.0).unsqueeze(1) * b.clamp(min=0.0) + scale)) @ V.T).float()
    return z + F @ M, y, of_test + of_F @ M, truth


def patches(data: str, width: int, root: Path) -> Split:
    """Patch features of a run's training images, of which a fifth are validation images."""
    words = (*rows.WORDS, f"images={data}-{6000 if data == 'fmnist' else 5000}-1000", f"model.width={width}")
    (z, y, _), _ = limits.of_patches(words, 0, root)
    apart = np.isin(np.arange(len(y)), rng.numpy_stream(0, "pilots").permutation(len(y))[: len(y) // 5])
    return _parted(z, y, apart)


def lesions(columns: slice, seed: int) -> Split:
    """Features of a seed's training images of ISIC, of whose lesions a fifth are validation."""
    found = isic.read()
    train = ~isic.validation(found["lesion"], seed)
    z, y, lesion = found["z"][train][:, columns], found["y"][train], found["lesion"][train]
    return _parted(z, y, isic.validation(lesion, seed))


def _parted(z: NDArray[np.float32], y: NDArray[np.int64], apart: NDArray[np.bool_]) -> Split:
    a, b, c, d = map(torch.from_numpy, (z[~apart], y[~apart], z[apart], y[apart]))
    return a, b.long(), c, d.long()


def show(text: str, figures: list[float], start: float) -> None:
    spread = f" +- {np.std(figures, ddof=1):.1f}" if len(figures) > 1 else ""
    print(f"{text}: {np.mean(figures):.1f}{spread} %   ({time.process_time() - start:.0f} CPU s)", flush=True)


def layered(name: str, splits: list[Split], weighed: bool, layers: int, start: float) -> None:
    """Show ridge on some features, and behind residual layers of as many hidden units."""
    plain = [best(split, weighed) for split in splits]
    show(name, [score for score, _, _ in plain], start)
    for gamma in (1e-3, 1e-1):
        now = list(zip(splits, plain, strict=True))
        for layer in range(layers):
            deep = [
                standardised(deeper(split, W, targets, split[0].shape[1], gamma, 100 * seed + layer))
                for seed, (split, (_, W, targets)) in enumerate(now)
            ]
            now = [(split, best(split, weighed)) for split in deep]
            show(f"{name}, {layer + 1} residual layers, gamma {gamma:g}", [found[0] for _, found in now], start)


def main() -> None:
    of_isic, start = sys.argv[1] == "isic", time.process_time()
    if of_isic:
        isic.use([Path(word) for word in sys.argv[2:]])
        splits = [standardised(lesions(slice(isic.WIDTH, 2 * isic.WIDTH), seed)) for seed in range(3)]
        name, width, layers = "1,280 features of Lite2", 2048, 2
    else:
        data, root = sys.argv[1], Path(sys.argv[2])
        splits = [standardised(patches(data, 1152, root))]
        name, width, layers = "1,152 patch features", 2304, 3
    layered(name, splits, of_isic, layers, start)
    for kind, length in (*(("cosine", length) for length in LENGTHS), ("relu", 1.0)):
        made = (expanded(split, width, kind, length, seed) for seed, split in enumerate(splits))
        show(f"{width} {kind} features, length {length:g}", [best(split, of_isic)[0] for split in made], start)
    if not of_isic:
        layered("2,304 patch features", [standardised(patches(data, 2304, root))], of_isic, layers, start)


if __name__ == "__main__":
    main()
