"""Attacks on two worlds, with and without one record. Their scores may refute an epsilon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from consilium.audit.epsilon_bounds import CONFIDENCE, Floats, epsilon_bound, mu_bound
from consilium.audit.step_checks import ZeroNoise
from fl_core import rng
from fl_core.methods.disjoint.analytic import Analytic
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import ClassSums, Examples, Losses, LossFn, MomentSums, RoundContext, SgdOptions
from privacy.accounting.accountant import Mechanism, epsilon_of
from privacy.accounting.dry_run import dry_run
from privacy.accounting.gaussian import epsilon_of as gaussian_epsilon
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan, SamplingSchedule
from privacy.mechanisms.noise.sources import NoiseSource, SecureNoise
from privacy.mechanisms.record.private_data import DpSgdLocalData

DELTA = 1e-5
CONTEXT = RoundContext(1, 4, 1, 0, 1).for_silo(0, 0)
Score = Callable[[Tensor], float]


@dataclass(frozen=True)
class Attack:
    """One attack: the coordinator's model and records, and its score of a release.

    Attributes:
        others, both: the records without and with the target record
        noise: z of the step
        score: of a release; by default its projection on the target record's effect
        query: attack a release of class sums or moments instead of a step
        method: attack all exchanges of this method, each in its own round with its planned share of 1 / z^2
    """

    name: str
    model: Callable[[], nn.Module]
    others: Examples
    both: Examples
    noise: float = 10.0
    score: Score | None = None
    augment: bool = False
    query: ClassSums | MomentSums | None = None
    method: Analytic | None = None
    trials: int = 300
    loss: LossFn = field(default=lambda m, x, y: Losses(cross_entropy(m(x), y, reduction="none")))

    @property
    def printed(self) -> float:
        return epsilon_of([Mechanism(self.noise)], DELTA)

    def released(self, with_record: bool, noise: NoiseSource, mean: Tensor | None = None) -> Tensor:
        """Return everything that the coordinator sees, flattened; for exchanges also the mean of the last request.

        mean: use this mean in the last request, instead of the released one.
        """
        data = self.both if with_record else self.others
        if self.method is not None:
            return self._exchanged(self.method, data, noise, mean)
        local_data = self._opened(data, noise, CONTEXT)
        if self.query is not None:
            sums = local_data.sum(self.query)
            return torch.cat([value.flatten() for value in sums.values()])
        with rng.torch_scope(0, "audit", "model"):
            model = self.model()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        local_data.sgd(model, self.loss, SgdOptions(steps=1))
        return torch.cat([(before[name] - p.detach()).flatten() for name, p in model.named_parameters()]) * 128

    @cached_property
    def shares(self) -> Mapping[int, float]:
        """Share of 1 / z^2 of each round's release of moments."""
        if self.method is None:
            return {0: 1.0}
        shape = tuple(self.both.batch(torch.arange(1))[0].shape[1:])
        schema = Schema(shape, tuple(str(c) for c in range(CONTEXT.n_classes)))
        return dry_run(self.method, self.model(), schema, TrainConfig(), lambda _: 1).moments

    def _opened(self, data: Examples, noise: NoiseSource, context: RoundContext) -> DpSgdLocalData:
        config = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=128, augment=self.augment)
        terms = RecordDpConfig(prototype_noise=self.noise, test_data="public")
        schedule, rounds = SamplingSchedule(config, 128), len(self.shares)
        plan = ReleasePlan(terms, schedule, rounds, Coupling.EXAMPLE, (1,), 1, False, moment_shares=self.shares)
        plan.__dict__["noise"] = self.noise  # in place of the noise solved for an epsilon
        allowance = ReleaseAllowance(plan.releases(context.round, True))
        return DpSgdLocalData(RoundData(data, data, config, context), plan, allowance, noise)

    def _exchanged(self, method: Analytic, data: Examples, noise: NoiseSource, mean: Tensor | None) -> Tensor:
        model, seen = self.model(), list[Tensor]()
        server = method.init_server(model, CONTEXT)
        for t in range(method.exchanges):
            context = replace(CONTEXT, round=t, rounds=method.exchanges)
            if mean is not None and t == method.exchanges - 1:
                server = {**server, "asked": {**server["asked"], "mean": mean}}
            request = method.broadcast(server)
            sent = method.local(model, request, {}, self._opened(data, noise, context), context).bundle
            seen += [value.flatten() for value in sent["moments"].total.values()]
            server = method.merge(server, sent, context)
        return torch.cat([*seen, request["asked"]["mean"]])


@dataclass(frozen=True, slots=True)
class AttackResult:
    """Lower bounds on epsilon at 95 % confidence, for any mechanism and for the charged Gaussian."""

    attack: str
    printed: float
    lower: float
    gaussian: float

    @property
    def holds(self) -> bool:
        return max(self.lower, self.gaussian) <= self.printed


def measure(
    attack: Attack, source: Callable[[bool, int], NoiseSource] | None = None, trials: int | None = None
) -> AttackResult:
    score = attack.score or _along(_direction(attack))
    worlds = [
        np.array(
            [
                score(attack.released(world, source(world, trial) if source else SecureNoise()))
                for trial in range(trials or attack.trials)
            ]
        )
        for world in (False, True)
    ]
    return judged(attack, worlds[0], worlds[1])


def judged(attack: Attack, without: Floats, with_record: Floats) -> AttackResult:
    a, b = (np.nan_to_num(s, nan=1e300, posinf=1e300, neginf=-1e300) for s in (without, with_record))
    lower = max(epsilon_bound(a, b, DELTA, CONFIDENCE / 2), epsilon_bound(-a, -b, DELTA, CONFIDENCE / 2))
    mu = mu_bound(a, b)
    curve = gaussian_epsilon(mu, DELTA) if mu > 0 else 0.0
    return AttackResult(attack.name, attack.printed, lower, curve)


def _direction(attack: Attack) -> Tensor:
    worlds = [torch.nan_to_num(attack.released(world, ZeroNoise(torch.zeros(0))).double()) for world in (True, False)]
    moved = worlds[0] - worlds[1]
    unit: Tensor = moved / moved.norm().clamp(min=1e-30)
    return unit


def _along(direction: Tensor) -> Score:
    return lambda released: float(torch.nan_to_num(released.double()) @ direction)
