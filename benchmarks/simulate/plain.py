"""FedAvg as a plain loop: every silo's steps with PyTorch alone, then the mean of their models by examples.

No layout and no fixed-point format. The batches are those of the federation, drawn from its streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from consilium.research.engines.in_process import SiloShare
from fl_core import rng
from fl_core.models import build_model
from fl_core.rounds.manifest import RunManifest


class Plain:
    """The loop, round by round."""

    def __init__(self, manifest: RunManifest, shares: Sequence[SiloShare]) -> None:
        self._seed, self._train, self.shares = manifest.seed, manifest.train, shares
        self.model = build_model(manifest.model.name, manifest.model.options, manifest.schema, manifest.seed)
        self.weights: dict[str, Tensor] = {name: v.clone() for name, v in self.model.state_dict().items()}
        self.steps, self.rounds = 0, manifest.rounds

    def round(self, t: int) -> None:
        total = {name: torch.zeros_like(v) for name, v in self.weights.items()}
        examples = 0
        for k, share in enumerate(self.shares):
            self.train_at(t, k)
            examples += len(share.train)
            with torch.no_grad():
                for name, v in self.model.state_dict().items():
                    total[name] += len(share.train) * v
        self.weights = {name: v / examples for name, v in total.items()}

    def train_at(self, t: int, k: int) -> None:
        """Train the averaged model at one silo; `model` is then that silo's."""
        share = self.shares[k]
        self.model.load_state_dict(self.weights)
        config, n = self._train, len(share.train)
        optimizer = torch.optim.SGD(
            self.model.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        order = rng.stream(self._seed, "round", t, "silo", k, "sgd", 0, "order")
        self.model.train()
        for _ in range(int(config.epochs)):
            for index in torch.split(torch.randperm(n, generator=order), config.batch_size):
                x, y = share.train.batch(index)
                optimizer.zero_grad()
                cross_entropy(self.model(x), y).backward()
                optimizer.step()
                self.steps += 1

    def evaluate(self) -> float:
        """Evaluate the averaged model at every silo, as the federation's rounds do; return the accuracy over all."""
        found = [self.evaluate_at(k) for k in range(len(self.shares))]
        return sum(correct for correct, _ in found) / sum(examples for _, examples in found)

    def evaluate_at(self, k: int) -> tuple[int, int]:
        """Return correct answers and test images of the averaged model at one silo."""
        share = self.shares[k]
        self.model.load_state_dict(self.weights)
        self.model.eval()
        with torch.no_grad():
            x, y = share.test.batch(torch.arange(len(share.test)))
            return int((self.model(x).argmax(1) == y).sum()), len(y)
