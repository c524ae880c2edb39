"""Private doors on a few made images, silent unless a test brings noise, and courses that plan what they release."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers_core import SCHEMA, Given
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.types.values import Losses, RoundContext, TrainConfig
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan
from privacy.dp_sgd.private_data import DpSgdLocalData
from privacy.noise.sources import SeededNoise

TURN = RoundContext(3, 4, rounds=5, round=0, cohort=3).for_silo(0, 7)
PLAIN = TrainConfig(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=1000, epochs=3)


class Silent(SeededNoise):
    """Samples as usual, adds nothing."""

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        return torch.zeros(shape, dtype=torch.long)


def examples(n: int = 24, groups: bool = False) -> Given:
    g = torch.Generator().manual_seed(n)
    made = Given(torch.rand(n, 1, 8, 8, generator=g), torch.arange(n) % 4)
    if groups:
        made.groups = tuple(f"patient {i // 3}" for i in range(n))
    return made


def model_of(seed: int = 0) -> nn.Module:
    return build_model("digits_cnn", {}, SCHEMA, seed)


def course_of(
    terms: RecordDpConfig, train: TrainConfig = PLAIN, units: int = 24, method: str = "fedavg", **options: object
) -> ReleasePlan:
    return ReleasePlan.of(terms, train, 5, units, build_method(method, options), model_of(), SCHEMA)


def doors(course: ReleasePlan, data: Given, noise: object = None, round: int = 0, **more: object) -> DpSgdLocalData:
    context = replace(TURN, round=round)
    spend = ReleaseAllowance([r for _ in range(3) for r in course.releases(round, True)])
    source = Silent(1, "sampling") if noise is None else noise
    return DpSgdLocalData(data, data, course.rates.train, context, course, spend, source, **more)  # type: ignore[arg-type]


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    return Losses(cross_entropy(model(x), y, reduction="none"))
