"""Attacks on updates and prototypes: infer a hospital's classes, a prototype's members, and the image of a member.

| attack | sees | score |
|---|---|---|
| class presence | one silo's update of the head | change of a class's bias: training pushes absent classes down |
| tracing | a prototype g and its public centre a | the cosine of f(x) - a and g - a for a candidate x |
| inversion | a prototype and the extractor f | the candidate nearest to an image optimised for f(image) = g |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from consilium.audit.epsilon_bounds import Floats, auc
from consilium.audit.target import AuditTarget, ListedExamples, losses
from consilium.audit.training import AuditTraining
from fl_core import rng
from fl_core.errors import ConfigError
from fl_core.methods.shared.prototypes import features_of
from fl_core.types import tensor_maps
from fl_core.types.values import ClassSums
from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise, SeededNoise
from privacy.mechanisms.record.class_sums import PrivacyUnits, class_sums

CANDIDATES = 50
"""Maximum number of non-members among the candidates for a prototype's members."""
MIN_IMAGES = 5
"""Minimum number of non-members. Classes with fewer are left out."""
HOSPITALS, PER_SILO = 8, 120
CASES = ((1, 0.0), (5, 0.0), (20, 0.0), (60, 0.0), (1, 2.0), (1, 8.0), (20, 8.0))
"""Prototypes to attack: (members, noise multiplier of the release)."""


@dataclass(frozen=True, slots=True)
class Presence:
    """Scores (silos, classes) from single updates and from their sum. truth: whether the silo has the class."""

    updates: Floats
    summed: Floats
    truth: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    @property
    def update_auc(self) -> float:
        return auc(self.updates[self.truth], self.updates[~self.truth])

    @property
    def sum_auc(self) -> float:
        """AUC if only the sum is visible. The sum has one score per class, the same for every silo."""
        return auc(self.summed[self.truth], self.summed[~self.truth])


def class_presence(
    training: AuditTraining, target: AuditTarget, seed: int = 0, noise_seed: int | None = None
) -> Presence:
    """Attack one round of at least `HOSPITALS` simulated hospitals, each with images of about a third of the classes.

    Every class is at the same number of hospitals. noise_seed: None for the operating system's entropy.
    """
    classes = torch.tensor(target.classes)
    draw = rng.stream(seed, "presence")
    classes = classes[torch.randperm(len(classes), generator=draw)]
    each, hospitals = max(1, round(0.3 * len(classes))), len(classes) * -(-HOSPITALS // len(classes))
    start = tensor_maps.trainable(target.network(seed))
    bias = max(name for name in start if start[name].shape == (target.n_classes,) and name.startswith("head"))
    moved, holds = [], []
    for k in range(hospitals):
        mine = classes.roll(-k)[:each]
        index = torch.nonzero(torch.isin(target.y, mine)).flatten()
        index = index[torch.randperm(len(index), generator=draw)[:PER_SILO]]
        model = target.network(seed)
        noise = None if noise_seed is None else SeededNoise(noise_seed, "presence", k)
        data = ListedExamples(target.x[index], target.y[index])
        training.run(model, data, losses, target.n_classes, noise, seed + k)
        moved.append((tensor_maps.trainable(model)[bias] - start[bias])[classes].double())
        holds.append(torch.isin(classes, mine))
    updates, present = torch.stack(moved).numpy(), torch.stack(holds).numpy()
    return Presence(updates, np.broadcast_to(updates.sum(0), updates.shape), present)


@dataclass(frozen=True, slots=True)
class TracingResult:
    """Results for prototypes of `members` images: AUC of tracing, top-1 rate of inversion and its chance level."""

    members: int
    noise: float
    tracing: float
    inversion: float
    chance: float

    @property
    def case(self) -> str:
        noise = f"noise {self.noise:g}" if self.noise else "bare"
        return f"{self.members} image{'s' * (self.members > 1)}, {noise}"


def prototypes(
    target: AuditTarget,
    cases: Sequence[tuple[int, float]] = CASES,
    repeats: int = 20,
    seed: int = 0,
    steps: int = 60,
    seeded: bool = True,
    extractor: AuditTraining | None = None,
) -> list[TracingResult]:
    """Attack prototypes of single classes. The extractor is trained on a third of all images, which count as public.

    The release is `privacy.mechanisms.record.class_sums` at the case's noise. Cases that need more images than any
    class has are left out; raises ConfigError (E-PRIV-29) if none is left.
    """
    order = torch.randperm(len(target.y), generator=rng.stream(seed, "tracing"))
    public, rest = order[: len(order) // 3], order[len(order) // 3 :]
    model = target.network(seed)
    training = extractor or AuditTraining(float("inf"), steps=150, lr=0.05, momentum=0.9)
    shown = ListedExamples(target.x[public], target.y[public])
    training.run(model, shown, losses, target.n_classes, None, seed)
    model.eval().requires_grad_(False)
    pools = {c: rest[target.y[rest] == c] for c in target.classes if bool((shown.labels == c).any())}

    def attacked(able: Sequence[int], n: int, z: float) -> TracingResult:
        inside, outside, hits, chance = list[float](), list[float](), 0, 0.0
        for repeat in range(repeats):
            c = able[repeat % len(able)]
            path = ("tracing", n, str(z), repeat)
            pool = pools[c][torch.randperm(len(pools[c]), generator=rng.stream(seed, *path, "pool"))]
            mine, others = pool[:n], pool[n : n + CANDIDATES]
            members_x = shown.x[shown.labels == c]
            centre = _unit_features(model, members_x).mean(0)
            noise = SeededNoise(seed, *path) if seeded else SecureNoise()
            g = centre + _offset(model, target.x[mine], centre, z, noise)
            inside += _scores(model, target.x[mine], centre, g)
            outside += _scores(model, target.x[others], centre, g)
            if steps:
                made = _inverted(model, g, members_x.mean(0), steps)
                hits += _nearest(made, torch.cat((target.x[mine[:1]], target.x[others]))) == 0
                chance += 1 / (1 + len(others)) / repeats
        return TracingResult(n, z, auc(inside, outside), hits / repeats if steps else float("nan"), chance)

    traced = []
    for n, z in cases:
        if able := [c for c, pool in pools.items() if len(pool) >= n + MIN_IMAGES]:
            traced.append(attacked(able, n, z))
    if not traced:
        raise ConfigError(
            "E-PRIV-29",
            f"{target.name} has no class with more than {MIN_IMAGES} images after a third of all images is set "
            "aside: use more data, or leave out the audit prototypes",
        )
    return traced


def _unit_features(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.normalize(features_of(model).features(x), dim=1)


def _offset(model: nn.Module, x: Tensor, centre: Tensor, z: float, noise: NoiseSource) -> Tensor:
    """Release the mean offset of members from a public centre: exact for z = 0, otherwise clipped and noisy."""
    data = ListedExamples(x, torch.zeros(len(x), dtype=torch.long))
    if z == 0:
        return (_unit_features(model, x) - centre).mean(0)
    query = ClassSums(lambda x, y: _unit_features(model, x) - centre, 1)  # noqa: ARG005
    sums = class_sums(query, data, PrivacyUnits.of(data), 1.0, 0.5, z, noise)
    return sums["sum"][0] / sums["count"][0].clamp(min=1.0)


def _scores(model: nn.Module, x: Tensor, centre: Tensor, g: Tensor) -> list[float]:
    """Score candidates by the cosine, because with a plain product, unusual images score high against any g."""
    moved = nn.functional.normalize(_unit_features(model, x) - centre, dim=1)
    return [float(v) for v in moved @ nn.functional.normalize(g - centre, dim=0)]


def _inverted(model: nn.Module, g: Tensor, start: Tensor, steps: int) -> Tensor:
    image = start.clone().unsqueeze(0).requires_grad_(True)
    optimizer = torch.optim.Adam([image], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        rough = (image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()) * 0.01
        ((_unit_features(model, image) - g).square().sum() + rough).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return image.detach()[0]


def _nearest(image: Tensor, candidates: Tensor) -> int:
    blur = nn.functional.avg_pool2d(torch.cat((image.unsqueeze(0), candidates)), 3, 1, 1).flatten(1)
    unit = nn.functional.normalize(blur - blur.mean(1, keepdim=True), dim=1)
    return int((unit[1:] @ unit[0]).argmax())
