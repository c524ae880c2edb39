"""A generator of features for given labels, and its training by the classifiers of the silos.

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, equations 4 to 7
and their released code. With one-hot y, noise e and v_kc = n_kc / sum_k n_kc,

    G(y, e) = V relu(BN(U [e, y] + u)) + v
    silos      sum_k mean_i v_{k,y_i} CE(head_k(G(y_i, e_i)), y_i)
    diversity  exp(-mean_{ij} mean (e_i - e_j)^2 mean |G_i - G_j|)      over all ordered pairs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot
from torch.optim import Adam

from fl_core import rng
from fl_core.types import tensor_maps
from fl_core.types.values import Tensors

ADAM = ("exp_avg", "exp_avg_sq")


class Generator(nn.Module):
    """Make features (n, d) from labels (n,) and noise (n, noise)."""

    def __init__(self, n_classes: int, noise: int, hidden: int, d: int) -> None:
        super().__init__()
        self.n_classes = n_classes
        self.first = nn.Linear(noise + n_classes, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, d)

    def forward(self, y: Tensor, e: Tensor) -> Tensor:
        label = one_hot(y, self.n_classes).to(e)
        z: Tensor = self.last(torch.relu(self.norm(self.first(torch.cat([e, label], 1)))))
        return z


@dataclass(frozen=True, slots=True)
class SiloClassifiers:
    """The classifiers of K silos: weight (K, C, d), bias (K, C), and their shares of each class, v (K, C)."""

    weight: Tensor
    bias: Tensor
    share: Tensor

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the classifiers' term for features z (n, d) made for labels y (n,)."""
        each = [
            cross_entropy(linear(z, w, b), y, reduction="none") for w, b in zip(self.weight, self.bias, strict=True)
        ]
        return weighted_loss(torch.stack(each), self.share, y)


def weighted_loss(losses: Tensor, share: Tensor, y: Tensor) -> Tensor:
    """Return sum_k mean_i v_{k,y_i} losses_ki, for losses (K, n), v (K, C) and y (n,)."""
    return (share[:, y] * losses).mean(1).sum()


def shares(counts: Tensor) -> Tensor:
    """Return v (K, C) from the silos' class counts (K, C); 0 for a class that no silo has."""
    return counts / counts.sum(0).clamp(min=1e-12)


def diversity(e: Tensor, z: Tensor) -> Tensor:
    """Return the diversity term for noise e (n, m) and features z (n, d)."""
    noise_distance = (e.unsqueeze(0) - e.unsqueeze(1)).square().mean(2)
    feature_distance = (z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2)
    return torch.exp(-(noise_distance * feature_distance).mean())


def draw_noise(n: int, size: int, kind: str, random: torch.Generator) -> Tensor:
    """Draw noise (n, size): "normal" as in the paper, or "uniform" in [0, 1) as released."""
    draw = torch.randn if kind == "normal" else torch.rand
    return draw(n, size, generator=random)


def draw_labels(n: int, known: Tensor, random: torch.Generator) -> Tensor:
    """Draw labels (n,), equally likely, of those that `known` (C,) marks."""
    valid = torch.nonzero(known > 0).squeeze(1)
    return valid[torch.randint(0, len(valid), (n,), generator=random)]


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """How a generator is trained: Adam steps, rate, decay, labels per step, noise, strength of diversity."""

    steps: int
    lr: float
    weight_decay: float
    batch: int
    noise: int
    kind: str
    diversity: float


def train(
    model: Generator,
    config: GeneratorConfig,
    classifiers: SiloClassifiers,
    known: Tensor,
    random: torch.Generator,
    moments: Mapping[str, Tensors] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Train a generator in place, on labels that `known` (C,) marks; return Adam's moments and step count.

    moments: as an earlier call returned them; None starts from zeros.
    """
    named = dict(model.named_parameters())
    before = fresh_moments(model) if moments is None else moments
    adam = Adam(named.values(), config.lr, weight_decay=config.weight_decay)
    for name, p in named.items():
        adam.state[p] = {**{key: before[key][name].clone() for key in ADAM}, "step": before["step"]["t"].clone()}
    model.train()
    with one_thread():
        for _ in range(config.steps):
            y, e = draw_labels(config.batch, known, random), draw_noise(config.batch, config.noise, config.kind, random)
            z = model(y, e)
            loss = classifiers.loss(z, y) + config.diversity * diversity(e, z)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    after = {key: {name: adam.state[p][key] for name, p in named.items()} for key in ADAM}
    return {**after, "step": {"t": adam.state[next(model.parameters())]["step"]}}


def fresh_moments(model: Generator) -> dict[str, dict[str, Tensor]]:
    zeros = tensor_maps.zeros(tensor_maps.trainable(model))
    return {**{key: dict(zeros) for key in ADAM}, "step": {"t": torch.zeros(())}}


def seeded(seed: int, n_classes: int, noise: int, hidden: int, d: int) -> Generator:
    with rng.torch_scope(seed, "generator"):
        return Generator(n_classes, noise, hidden, d)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that a server's training does not depend on its number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
