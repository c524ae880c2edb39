"""The audited training: through `DpSgdLocalData`, or `PlainLocalData` without privacy, as at hospitals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fl_core.training.local_data import PlainLocalData
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Examples, LossFn, RoundContext, SgdOptions
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan, SamplingSchedule
from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise
from privacy.mechanisms.record.private_data import DpSgdLocalData


@dataclass(frozen=True, slots=True)
class AuditTraining:
    """Settings of the audited training. epsilon: inf without privacy   batch: the expected size."""

    epsilon: float
    batch: int = 64
    steps: int = 300
    lr: float = 0.2
    clip: float = 1.0
    delta: float = 1e-5
    momentum: float = 0.0

    @property
    def private(self) -> bool:
        return not math.isinf(self.epsilon)

    def run(
        self,
        model: nn.Module,
        data: Examples,
        loss: LossFn,
        n_classes: int,
        noise: NoiseSource | None = None,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Train `model` in place, as a hospital does. noise: None for the operating system's entropy."""
        context = RoundContext(1, n_classes, 1, 0, 1).for_silo(0, seed)
        if not self.private:
            plain = PlainLocalData(RoundData(data, data, self.config, context, progress=progress))
            plain.sgd(model, loss, SgdOptions(steps=self.steps))
            return
        plan = self.plan(len(data))
        allowance = ReleaseAllowance(plan.training(self.steps))
        DpSgdLocalData(
            RoundData(data, data, self.config, context, progress=progress), plan, allowance, noise or SecureNoise()
        ).sgd(model, loss, SgdOptions(steps=self.steps))

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(lr=self.lr, momentum=self.momentum, weight_decay=0.0, batch_size=self.batch, epochs=1)

    def plan(self, units: int) -> ReleasePlan:
        terms = RecordDpConfig(
            epsilon=self.epsilon, delta=self.delta, clip=self.clip, test_data="public", physical_batch=512
        )
        return ReleasePlan(terms, SamplingSchedule(self.config, units), 1, Coupling.EXAMPLE, (self.steps,), 0, False)


def memorising(steps: int = 1500) -> AuditTraining:
    return AuditTraining(math.inf, steps=steps, lr=0.1, momentum=0.9)
