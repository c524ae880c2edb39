"""What updates and prototypes show: which classes a hospital has, whose features a prototype holds, what it looks like.

| attack | sees | score |
|---|---|---|
| class presence | one silo's update of the head | movement of a class's bias: training pushes absent classes down |
| tracing | a prototype g and its public centre a | the cosine of f(x) - a and g - a for a candidate x |
| inversion | a prototype and the extractor f | the candidate nearest to an image made so that f(image) = g |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fl_core import rng, trees
from fl_core.methods.prototypes import features_of
from fl_core.models import build_model
from fl_core.types import ClassSums
from privacy.audit.bounds import Floats, auc
from privacy.audit.canaries import InMemory, Training, _cross_entropy, digits
from privacy.entropy import Noise, SeededNoise
from privacy.release import Units, class_sums

CANDIDATES = 51


@dataclass(frozen=True, slots=True)
class Presence:
    """Scores of (silo, class) pairs whose class is there, and of others, from updates and through a masked sum."""

    there: Floats
    absent: Floats
    masked_there: Floats
    masked_absent: Floats

    @property
    def alone(self) -> float:
        """Return the AUC of the attack on single updates."""
        return auc(self.there, self.absent)

    @property
    def masked(self) -> float:
        """Return the AUC where only the sum over silos is seen: every silo then has the same score."""
        return auc(self.masked_there, self.masked_absent)


def class_presence(training: Training, silos: int = 10, classes_each: int = 3, n: int = 120, seed: int = 0) -> Presence:
    """Attack one round of hospitals that hold `classes_each` classes of digits each, n images."""
    x, y, schema = digits()
    n_classes = len(schema.classes)
    start = trees.trainable(build_model("digits_mlp", {}, schema, seed))
    bias = max(name for name in start if start[name].shape == (n_classes,))
    draw = rng.stream(seed, "presence")
    moved, holds = [], []
    for k in range(silos):
        mine = torch.randperm(n_classes, generator=draw)[:classes_each]
        index = torch.nonzero(torch.isin(y, mine)).flatten()
        index = index[torch.randperm(len(index), generator=draw)[:n]]
        model = build_model("digits_mlp", {}, schema, seed)
        noise = SeededNoise(seed, "presence", k)
        training.run(model, InMemory(x[index], y[index]), _cross_entropy, n_classes, noise, seed + k)
        moved.append((trees.trainable(model)[bias] - start[bias]).double())
        holds.append(torch.isin(torch.arange(n_classes), mine))
    score, held = torch.stack(moved).numpy(), torch.stack(holds).numpy()
    summed = np.broadcast_to(score.sum(0), score.shape)
    # Which class is common in the federation shows in the sum; what a silo adds to that does not: compare per class.
    centred = summed - score.sum(0)
    return Presence(score[held], score[~held], centred[held], centred[~held])


@dataclass(frozen=True, slots=True)
class Tracing:
    """AUC of tracing and top-1 rate of inversion for prototypes of `members` images at noise multiplier `noise`."""

    members: int
    noise: float
    tracing: float
    inversion: float


def prototypes(
    cases: Sequence[tuple[int, float]], repeats: int = 20, seed: int = 0, steps: int = 60, invert: bool = True
) -> list[Tracing]:
    """Attack prototypes of one class with an extractor that was trained on other images; (members, noise) per case.

    Noise is that of the release under record-level privacy, which `privacy.release` makes. invert: also make images.
    """
    x, y, schema = digits()
    order = torch.randperm(len(y), generator=rng.stream(seed, "tracing"))
    public, rest = order[: len(y) // 3], order[len(y) // 3 :]
    model = build_model("digits_cnn", {}, schema, seed)
    Training(float("inf"), steps=150).run(
        model, InMemory(x[public], y[public]), _cross_entropy, len(schema.classes), None, seed
    )
    model.eval().requires_grad_(False)
    found = []
    for n, z in cases:
        inside, outside, hits = list[float](), list[float](), 0
        for repeat in range(repeats):
            c = repeat % len(schema.classes)
            noise = SeededNoise(seed, "tracing", n, str(z), repeat)
            pool = rest[y[rest] == c]
            pool = pool[torch.randperm(len(pool), generator=rng.stream(seed, "tracing", n, str(z), repeat, "pool"))]
            mine, others = pool[:n], pool[n : n + CANDIDATES - 1]
            centre = _unit_features(model, x[public[y[public] == c]]).mean(0)
            g = centre + _offset(model, x[mine], centre, z, noise)
            inside += _scores(model, x[mine], centre, g)
            outside += _scores(model, x[others], centre, g)
            if invert:
                made = _inverted(model, g, x[public[y[public] == c]].mean(0), steps)
                hits += _nearest(made, torch.cat((x[mine[:1]], x[others]))) == 0
        found.append(Tracing(n, z, auc(inside, outside), hits / repeats if invert else float("nan")))
    return found


def _unit_features(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.normalize(features_of(model).features(x), dim=1)


def _offset(model: nn.Module, x: Tensor, centre: Tensor, z: float, noise: Noise) -> Tensor:
    """Release the mean offset of members from a public centre: exact for z = 0, else clipped and noisy."""
    data = InMemory(x, torch.zeros(len(x), dtype=torch.long))
    if z == 0:
        return (_unit_features(model, x) - centre).mean(0)
    query = ClassSums(lambda x, y: _unit_features(model, x) - centre, 1)  # noqa: ARG005
    sums = class_sums(query, data, Units.of(data), 1.0, 0.5, z, noise)
    return sums["sum"][0] / sums["count"][0].clamp(min=1.0)


def _scores(model: nn.Module, x: Tensor, centre: Tensor, g: Tensor) -> list[float]:
    """Score candidates by the cosine: by the plain product, unusual images would score high against any g."""
    moved = nn.functional.normalize(_unit_features(model, x) - centre, dim=1)
    return [float(v) for v in moved @ nn.functional.normalize(g - centre, dim=0)]


def _inverted(model: nn.Module, g: Tensor, start: Tensor, steps: int) -> Tensor:
    """Make an image whose features are g, from the class's public mean, with a penalty on total variation."""
    image = start.clone().unsqueeze(0).requires_grad_(True)
    optimizer = torch.optim.Adam([image], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        rough = (image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()) * 0.01
        ((_unit_features(model, image) - g).square().sum() + rough).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return image.detach()[0]


def _nearest(image: Tensor, candidates: Tensor) -> int:
    """Return the candidate that correlates best with an image, both blurred."""
    blur = nn.functional.avg_pool2d(torch.cat((image.unsqueeze(0), candidates)), 3, 1, 1).flatten(1)
    unit = nn.functional.normalize(blur - blur.mean(1, keepdim=True), dim=1)
    return int((unit[1:] @ unit[0]).argmax())
