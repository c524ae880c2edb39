"""Leave each digit out of training in turn, and count how many of it are found at one false flag in ten.

python -m benchmarks.unknown_class [--methods analytic,fedgela,fedmr]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn

from consilium import simulate
from consilium.extending import ArrayData
from consilium.model import conformal
from consilium.model.calibration import CalibrationRequest, calibrate

FALSE_FLAGS, CLASSES, TRAINING = 0.1, 10, 0.6
NETWORK = {"model": "digits_cnn", "rounds": 20, "train.epochs": 2, "train.batch_size": 32}
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "analytic": {"model": "random_features", "model.kind": "cosine", "method.ridge": 1e-3, "rounds": 1},
    "fedgela": {**NETWORK, "train.lr": 0.1},
    "fedmr": {**NETWORK, "train.lr": 0.05},
}
OTHERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "largest logit": lambda z: -z.max(1).values,
    "energy": lambda z: -torch.logsumexp(z, 1),
    "largest probability": lambda z: -torch.softmax(z, 1).max(1).values,
}
"""Scores of literature that need no examples but the threshold's; the larger the less an example is like any class."""
OWN = "distances"
Images = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(frozen=True)
class Found:
    """Of one digit that was left out: shares right and falsely flagged of known digits, and found, by score."""

    right: float
    flagged: float
    found: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(SETTINGS))
    torch.set_num_threads(1)
    print("| method | right, of known digits | falsely flagged | " + " | ".join((OWN, *OTHERS)) + " |")
    print("|---" * (4 + len(OTHERS)) + "|")
    for method in parser.parse_args().methods.split(","):
        runs = [measure(method, left_out) for left_out in range(CLASSES)]
        shares = [_share([run.right for run in runs]), _share([run.flagged for run in runs])]
        shares += [_mean_and_worst([run.found[name] for run in runs]) for name in (OWN, *OTHERS)]
        print(f"| `{method}` | {' | '.join(shares)} |", flush=True)


def measure(method: str, left_out: int) -> Found:
    """Train without a digit, calibrate with half of the other digits' held-out images, and look at the rest."""
    train, test, unknown = digits(left_out)

    class Known(ArrayData):
        shape = (1, 8, 8)
        classes = tuple(str(c) for c in range(CLASSES) if c != left_out)

        def read(self, root: Path | None) -> tuple[Images, Images]:
            del root
            return train, test

    result = simulate(method=method, data=Known, federation="p5c2", seed=0, **SETTINGS[method])
    answers = _answers(result.model.eval())
    x, y = torch.tensor(test[0]), torch.tensor(test[1])
    half = len(y) // 2
    logits, features = answers(x)
    z, h = answers(torch.tensor(unknown))
    own = calibrate(
        CalibrationRequest("m" * 64, str(left_out), Known.classes), logits[:half], features[:half], y[:half]
    )
    scores = {OWN: (own.facts.threshold, own.score(features[half:], logits[half:]), own.score(h, z))}
    for name, score in OTHERS.items():
        scores[name] = (conformal.quantile(score(logits[:half]), 1 - FALSE_FLAGS), score(logits[half:]), score(z))
    return Found(
        float((logits[half:].argmax(1) == y[half:]).float().mean()),
        float((scores[OWN][1] > scores[OWN][0]).float().mean()),
        {name: float((of_unknown > threshold).float().mean()) for name, (threshold, _, of_unknown) in scores.items()},
    )


def digits(left_out: int) -> tuple[Images, Images, NDArray[np.float32]]:
    """Return training and test examples of nine digits, and test images of the tenth."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x, y = (found.images[order, None] / 16).astype(np.float32), found.target[order]
    known, training = y != left_out, np.arange(len(y)) < TRAINING * len(y)
    place = np.array([c - (c > left_out) for c in range(CLASSES)])
    train, test = ((x[known & part], place[y[known & part]]) for part in (training, ~training))
    return train, test, x[~known & ~training]


def _answers(model: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return what gives a model's logits and features."""
    classifier = model if hasattr(model, "features") else model.classifier

    def answers(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return model(x), classifier.features(x)  # type: ignore[operator]

    return answers


def _share(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.0f} %"


def _mean_and_worst(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.0f} % ({100 * min(values):.0f})"


if __name__ == "__main__":
    main()
