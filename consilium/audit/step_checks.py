"""Compare one step of private training with its charge to the ledger, to detect wrong factors.

| audit | measures | detects |
|---|---|---|
| AU-1 | the noise of a step in which no record has a gradient | noise of another scale or shape |
| AU-2 | the effect of one more or one less unit, without noise | missing clip, too small sensitivity, shifted records |
| AU-3 | many steps with and without the worst record | both, like an attacker: mu = 1 / z |

The claim is never a constant of the audit: z comes from the release that is charged to the ledger, and the sensitivity
is the noise's standard deviation divided by z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import kstest
from torch import Tensor, nn

from consilium.audit.epsilon_bounds import Floats, mu_bound
from consilium.audit.target import ListedExamples
from fl_core import rng
from fl_core.types.enums import Coupling
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import Losses, RoundContext, SgdOptions
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import ReleaseAllowance, ReleasePlan, SamplingSchedule
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.sources import NoiseSource, UnitKeys
from privacy.mechanisms.record.private_data import DpSgdLocalData

KINDS = ("example", "split", "micro")
"""How gradients are clipped: per unit; per unit and per microbatch; only per microbatch."""
COORDINATES = 500_000
_FAR = 1e3
_TRIALS = 300


class ZeroNoise:
    """Draws every unit, assigns unit i to microbatch `groups[i]`, and adds no noise."""

    private = False

    def __init__(self, groups: Tensor) -> None:
        self._groups = groups

    def uniform(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.float64)

    def uniform_of(self, units: UnitKeys, *about: str | int) -> Tensor:
        return self._groups.double() if about[-1] == "groups" else self.uniform(len(units))

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:  # noqa: ARG002
        return torch.zeros(shape, dtype=torch.long)

    def seed(self, *about: str | int) -> int:
        return rng.derive(0, *about)


@dataclass(frozen=True, slots=True)
class Step:
    """A full-batch step (q = 1) of one kind at noise multiplier z, with a declared number of units in M microbatches.

    The model is linear without a bias. So the gradient of a record's loss is the record itself, and that of a coupled
    term is the sum over its microbatch.
    """

    kind: str
    noise: float = 1.0
    units: int = 4
    groups: int = 1
    clip: float = 1.0

    def plan(self, steps: int = 1) -> ReleasePlan:
        config = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=self.units, epochs=1)
        terms = RecordDpConfig(
            clip=self.clip,
            coupled="off" if self.kind == "example" else self.kind,
            microbatch=max(1, self.units // self.groups),
            test_data="public",
            physical_batch=512,
        )
        coupling = Coupling.EXAMPLE if self.kind == "example" else Coupling.BATCH
        made = ReleasePlan(terms, SamplingSchedule(config, self.units), 1, coupling, (steps,), 0, False)
        made.__dict__["noise"] = self.noise  # in place of the noise solved for an epsilon
        return made

    def sums(self, x: Tensor, groups: Sequence[str] | None, noise: NoiseSource, steps: int = 1) -> Tensor:
        """Take steps over records x (n, d) and return their releases (steps, d): noisy clipped sums."""
        plan, coupled = self.plan(steps), self.kind != "example"
        model = nn.Linear(x.shape[1], 1, bias=False, dtype=x.dtype)
        nn.init.zeros_(model.weight)
        places = [torch.zeros(x.shape[1], dtype=x.dtype)]

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Losses:  # noqa: ARG001
            rows = model(x).squeeze(1)
            return Losses(rows, rows.sum() if coupled else None)

        def watch(done: int, total: int) -> None:  # noqa: ARG001
            places.append(model.weight.detach()[0].clone())

        data = ListedExamples(x, torch.zeros(len(x), dtype=torch.long), groups)
        context = RoundContext(1, 1, 1, 0, 1).for_silo(0, 0)
        allowance = ReleaseAllowance(plan.training(steps))
        private = DpSgdLocalData(
            RoundData(data, data, plan.rates.train, context, progress=watch), plan, allowance, noise
        )
        private.sgd(model, loss, SgdOptions(steps=steps))
        divisor = plan.groups if self.kind == "micro" else plan.batch
        return -torch.diff(torch.stack(places), dim=0) * divisor

    def charged(self) -> float:
        (release,) = self.plan().training(1)
        return release.mechanism.noise

    def sensitivity(self) -> float:
        """Return the accountant's bound on one unit's effect on the sum: the noise's std divided by the charged z."""
        return self.plan().std / self.charged()


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """AU-1: the noise's standard deviation over the claimed one, and the p-value of a test for that Gaussian."""

    ratio: float
    p: float

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) < 5e-3 and self.p > 1e-4


def noise_scale(step: Step, noise: NoiseSource) -> NoiseScale:
    """AU-1: take one step in which no record has a gradient, and compare the change with N(0, (z Delta)^2)."""
    bound = {"example": 1.0, "split": 1.0 + 2 * step.plan().terms.coupled_clip_ratio, "micro": 2.0}[step.kind]
    moved = step.sums(torch.zeros(2, COORDINATES), None, noise)[0].double().numpy()
    claimed = step.charged() * bound * step.clip * (1 + grid.SLACK)
    return NoiseScale(float(moved.std() / claimed), float(kstest(moved / claimed, "norm").pvalue))


@dataclass(frozen=True, slots=True)
class SensitivityCheck:
    """AU-2: a unit's largest effect on the sum, over the accountant's sensitivity: in all and in worst-case trials."""

    furthest: float
    worst: float

    @property
    def holds(self) -> bool:
        return self.furthest <= 1 and self.worst > 1 - 2 * grid.SLACK


def sensitivity(kind: str, grouped: bool = False, trials: int = _TRIALS, seed: int = 0) -> SensitivityCheck:
    """AU-2: remove a unit (a record, or a patient's three) from random and worst-case data, without noise."""
    draw, furthest, worst = rng.stream(seed, "sensitivity", kind), 0.0, 0.0
    for trial in range(trials):
        x, assignment, groups, gone = (_worst, _shifting, _random)[trial % 3](draw)
        step, rest = Step(kind, units=3 * len(x), groups=groups), torch.arange(len(x)) != gone
        whole = step.sums(*_units(x, grouped), ZeroNoise(assignment))
        less = step.sums(*_units(x[rest], grouped), ZeroNoise(assignment[rest]))
        moved = float((whole - less).norm()) / step.sensitivity()
        furthest = max(furthest, moved)
        worst = worst if trial % 3 else max(worst, moved)
    return SensitivityCheck(furthest, worst)


_Case = tuple[Tensor, Tensor, int, int]
"""Records (n, d), their assignment to microbatches (n,) in [0, 1), the number of these, and the record to remove."""


def _worst(draw: torch.Generator) -> _Case:
    """Make all records of the only microbatch equal, except one that reverses their sum."""
    n = int(torch.randint(2, 8, (), generator=draw))
    gone = int(torch.randint(0, n, (), generator=draw))
    x = torch.ones(n, 1, dtype=torch.float64)
    x[gone] = -_FAR
    return x, torch.full((n,), 0.5), 1, gone


def _shifting(draw: torch.Generator) -> _Case:
    """Make pairs that add up to 1. A further record in front must not change which records are paired."""
    blocks = 2 * int(torch.randint(4, 9, (), generator=draw))
    pattern = torch.tensor([10.0, -9, -2, 3], dtype=torch.float64).repeat(blocks // 2)
    x = torch.cat((torch.zeros(1, dtype=torch.float64), pattern)).unsqueeze(1)
    assignment = torch.cat((torch.zeros(1), torch.arange(blocks).repeat_interleave(2)))
    return x, (assignment + 0.5) / blocks, blocks, 0


def _random(draw: torch.Generator) -> _Case:
    n, groups = int(torch.randint(2, 8, (), generator=draw)), 3
    size = 10 ** (4 * torch.rand(n, 1, generator=draw, dtype=torch.float64) - 2)
    assignment = (torch.randint(0, groups, (n,), generator=draw) + 0.5) / groups
    gone = int(torch.randint(0, n, (), generator=draw))
    return torch.randn(n, 4, generator=draw, dtype=torch.float64) * size, assignment, groups, gone


def _units(x: Tensor, grouped: bool) -> tuple[Tensor, list[str] | None]:
    if not grouped:
        return x, None
    return x.repeat_interleave(3, 0), [f"patient {i // 3}" for i in range(3 * len(x))]


def mu(step: Step, runs: int, noises: tuple[NoiseSource, NoiseSource]) -> float:
    """AU-3: bound mu z from `runs` steps without and with the worst record; above 1 refutes the claim mu = 1 / z."""
    others = torch.full((step.units - 1, 1), 2 * step.clip, dtype=torch.float64)
    worst = torch.cat((others, torch.full((1, 1), -_FAR * step.clip, dtype=torch.float64)))
    without, with_record = (
        step.sums(x, None, n, runs)[:, 0].numpy() for x, n in zip((others, worst), noises, strict=True)
    )
    return mu_bound(-without, -with_record) * step.charged()


def mu_bounds(step: Step, runs: int, noises: Sequence[tuple[NoiseSource, NoiseSource]]) -> Floats:
    """Repeat AU-3 until it does not refute the claim, at most three times: a correct step is refuted in 5 of 100."""
    bounds: list[float] = []
    for pair in noises[:3]:
        bounds.append(mu(step, runs, pair))
        if bounds[-1] <= 1:
            break
    return np.array(bounds)
