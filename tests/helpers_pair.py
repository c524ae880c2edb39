"""The scalar network y = v u x of the body-and-head baselines: body u, head v, in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_core.types.values import AS_SCHEDULED, LossFn, SgdOptions


class Factor(nn.Module):
    """Multiplies by one trainable number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Pair(nn.Module):
    """u and v, both 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Factor(), Factor()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y

    @property
    def values(self) -> tuple[float, float]:
        return float(self.body.w.detach()), float(self.head.w.detach())


class PairData:
    """One example, x = 1 and y: every pass is one step of size 0.1 on (v u - y)^2 / 2."""

    lr, batch_size = 0.1, 1

    def __init__(self, y: float) -> None:
        self.y = y
        self.epochs: list[float | None] = []

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int:
        self.epochs.append(options.epochs)
        chosen = [p for name, p in model.named_parameters() if options.only is None or options.only(name)]
        objective = 0.5 * (model(torch.ones((), dtype=torch.float64)) - self.y).square()
        with torch.no_grad():
            for p, g in zip(chosen, torch.autograd.grad(objective, chosen), strict=True):
                p.sub_(self.lr * g)
        return 1

    def size(self) -> float:
        return 1.0
