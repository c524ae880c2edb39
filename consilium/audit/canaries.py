"""Canaries: audit examples that are added to a training run like a hospital's, to test whether they can be detected.

White box ("Dirac"): the gradient of canary i is along its own coordinate, as large as the clip allows; the attacker
sees the weights after every step. Black box: canaries are images with wrong labels; the attacker sees losses of the
final model. Each canary is included with probability 1/2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from consilium.audit.epsilon_bounds import CONFIDENCE, Floats, Guesses, auc, one_run
from consilium.audit.target import AuditTarget, ListedExamples, losses, negative_losses
from consilium.audit.training import AuditTraining
from fl_core import rng
from fl_core.types.values import Losses
from privacy.mechanisms.noise.sources import NoiseSource

CANARIES = 500
PUSH = 1e3
"""Size of a Dirac canary's gradient before clipping."""
MEMBERS = 200
"""Images to train on for the comparison of losses. A model memorises few images better."""


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """Scores of all canaries, which of them were included, and the best guesses. score: the score that gave them."""

    scores: Floats
    present: NDArray[np.bool_]
    guesses: Guesses
    score: str

    @property
    def auc(self) -> float:
        return auc(self.scores[self.present], self.scores[~self.present])


def dirac(
    training: AuditTraining,
    canaries: int = CANARIES,
    records: int = 1000,
    seed: int = 0,
    noise: NoiseSource | None = None,
) -> CanaryResult:
    """Audit with one white-box run. records: in total; those without a canary have no gradient.

    Two scores share the confidence: how far a coordinate moved (detects missing noise or clip), and how unsteadily
    (detects repeated noise).
    """
    present = _drawn(canaries, seed)
    x = torch.zeros(records, canaries)
    chosen = np.flatnonzero(present)
    x[torch.arange(len(chosen)), torch.from_numpy(chosen)] = -PUSH  # descent then moves the coordinate up
    model = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(model.weight)
    places = [np.zeros(canaries)]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:  # noqa: ARG001
        return Losses(model(x).squeeze(1))

    def watch(done: int, total: int) -> None:  # noqa: ARG001
        places.append(model.weight.detach().double().numpy().ravel().copy())

    data = ListedExamples(x, torch.zeros(records, dtype=torch.long))
    training.run(model, data, loss, 1, noise, seed, watch)
    scores = {"distance": places[-1], "unsteadiness": np.diff(np.stack(places), axis=0).std(0)}
    results = {n: one_run(s, present, training.delta, CONFIDENCE / len(scores)) for n, s in scores.items()}
    best = max(results, key=lambda name: results[name].epsilon)
    return CanaryResult(scores[best], present, results[best], best)


def mislabelled(
    training: AuditTraining,
    target: AuditTarget,
    canaries: int = CANARIES,
    seed: int = 0,
    noise: NoiseSource | None = None,
) -> CanaryResult:
    """Audit with one black-box run: adds images with wrong labels, scored by minus the final loss.

    canaries: their number, limited to half of the images.
    """
    x, y, n_classes = target.x, target.y, target.n_classes
    m = min(canaries, len(y) // 2)
    order = torch.randperm(len(y), generator=rng.stream(seed, "canaries", "order"))
    audited, rest = order[:m], order[m:]
    shift = torch.randint(1, n_classes, (m,), generator=rng.stream(seed, "canaries", "labels"))
    wrong = (y[audited] + shift) % n_classes
    present = _drawn(m, seed)
    kept = torch.from_numpy(present)
    data = ListedExamples(torch.cat((x[rest], x[audited][kept])), torch.cat((y[rest], wrong[kept])))
    model = target.network(seed)
    training.run(model, data, losses, n_classes, noise, seed)
    scores = negative_losses(model, x[audited], wrong).numpy()
    return CanaryResult(scores, present, one_run(scores, present, training.delta), "loss")


def members(
    training: AuditTraining, target: AuditTarget, seed: int = 0, noise: NoiseSource | None = None
) -> tuple[Floats, Floats]:
    """Return minus the losses of training images and of as many others, for a loss-threshold attack.

    Yeom, Giacomelli, Fredrikson and Jha, "Privacy Risk in Machine Learning", CSF 2018.
    """
    order = torch.randperm(len(target.y), generator=rng.stream(seed, "members"))
    n = min(MEMBERS, len(order) // 2)
    inside, outside = order[:n], order[n : 2 * n]
    model = target.network(seed)
    data = ListedExamples(target.x[inside], target.y[inside])
    training.run(model, data, losses, target.n_classes, noise, seed)
    trained, others = (negative_losses(model, target.x[i], target.y[i]).numpy() for i in (inside, outside))
    return trained, others


def _drawn(n: int, seed: int) -> NDArray[np.bool_]:
    return (torch.rand(n, generator=rng.stream(seed, "canaries", "present")) < 0.5).numpy()
