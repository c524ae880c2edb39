"""FedAvg as a plain loop: every silo's steps with PyTorch alone, then the mean of their models by examples.

No layout and no fixed-point format. The batches are those of the federation, drawn from its streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_core import rng
from fl_core.models import build_model
from fl_core.rounds.manifest import RunManifest
from fl_core.simulation.in_process import SiloShare


class Plain:
    """The loop, round by round."""

    def __init__(self, manifest: RunManifest, shares: Sequence[SiloShare]) -> None:
        self._seed, self._train, self._shares = manifest.seed, manifest.train, shares
        self._model = build_model(manifest.model.name, manifest.model.options, manifest.schema, manifest.seed)
        self.weights: dict[str, Tensor] = {name: v.clone() for name, v in self._model.state_dict().items()}
        self.steps = 0

    def round(self, t: int) -> None:
        total = {name: torch.zeros_like(v) for name, v in self.weights.items()}
        examples = 0
        for k, share in enumerate(self._shares):
            self._model.load_state_dict(self.weights)
            self._fit(t, k, share)
            examples += len(share.train)
            with torch.no_grad():
                for name, v in self._model.state_dict().items():
                    total[name] += len(share.train) * v
        self.weights = {name: v / examples for name, v in total.items()}

    def _fit(self, t: int, k: int, share: SiloShare) -> None:
        config, n = self._train, len(share.train)
        optimizer = torch.optim.SGD(
            self._model.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        order = rng.stream(self._seed, "round", t, "silo", k, "sgd", 0, "order")
        self._model.train()
        for _ in range(int(config.epochs)):
            for index in torch.split(torch.randperm(n, generator=order), config.batch_size):
                x, y = share.train.batch(index)
                optimizer.zero_grad()
                cross_entropy(self._model(x), y).backward()
                optimizer.step()
                self.steps += 1

    def evaluate(self) -> float:
        """Evaluate the averaged model at every silo, as the federation's rounds do; return the accuracy over all."""
        correct = examples = 0
        self._model.load_state_dict(self.weights)
        self._model.eval()
        with torch.no_grad():
            for share in self._shares:
                x, y = share.test.batch(torch.arange(len(share.test)))
                correct += int((self._model(x).argmax(1) == y).sum())
                examples += len(y)
        return correct / examples
