"""Every mechanism behind the private data: bounded by force, noisy as charged, apart from all others, exact without.

Training steps of each kind are audited in test_audit_steps.py, silo-level privacy in test_central.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.methods import METHODS
from fl_core.rounds.manifest import NamedOptions
from fl_core.rounds.run_setup import RunSetup
from fl_core.training.evaluation import evaluate
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import Coupling, Split
from fl_core.types.interfaces import RoundData
from fl_core.types.records import TrainConfig
from fl_core.types.values import ClassSums, Losses, RoundContext
from privacy.accounting.record_config import RecordDpConfig
from privacy.accounting.release_plan import Release, ReleaseAllowance, ReleasePlan, SamplingSchedule
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.noise import grid
from privacy.mechanisms.noise.sources import SecureNoise, SeededNoise
from privacy.mechanisms.record.private_data import DpSgdLocalData
from privacy.release_log import InMemoryReleaseLog
from tests.support.federations import Given, manifest, shares
from tests.support.privacy import NoNoise, ce

pytestmark = pytest.mark.integration

CONTEXT = RoundContext(1, 4, 1, 0, 1).for_silo(0, 0)
TRAIN = TrainConfig(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=24, epochs=2)


class Scaled(SeededNoise):
    """Noise of a wrong scale."""

    factor = 1.0

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        return super().discrete_gaussian(shape, sigma * self.factor)


def data_of(n: int = 24, grouped: bool = False) -> Given:
    made = Given(torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 4)
    if grouped:
        made.groups = tuple(f"patient {i // 3}" for i in range(n))
    return made


def without(data: Given, gone: Tensor) -> Given:
    rest = torch.nonzero(~gone).flatten()
    made = Given(data.x[rest], data.labels[rest])
    made.groups = None if data.groups is None else tuple(data.groups[i] for i in rest.tolist())
    return made


def plan_of(coupling: Coupling = Coupling.EXAMPLE, **terms: object) -> ReleasePlan:
    plan = ReleasePlan(RecordDpConfig(**terms), SamplingSchedule(TRAIN, 24), 1, coupling, (2,), 1, True)  # type: ignore[arg-type]
    plan.__dict__["noise"] = 1.0
    return plan


def private_data(data: Given, noise: object, coupling: Coupling = Coupling.EXAMPLE, **terms: object) -> DpSgdLocalData:
    plan = plan_of(coupling, **terms)
    allowance = ReleaseAllowance([r for _ in range(9) for r in plan.releases(0, True)])
    return DpSgdLocalData(RoundData(data, data, TRAIN, CONTEXT), plan, allowance, noise)  # type: ignore[arg-type]


PIXELS = ClassSums(lambda x, y: 5 * (x.flatten(1) - 0.5), 4)
RIGHT = ClassSums(lambda x, y: (x.flatten(1).sum(1) > 32).float().unsqueeze(1), 4)


@dataclass(frozen=True)
class Mechanism:
    """A sum over records: how it is asked for, whether it is clipped in one vector, and what it is charged as."""

    ask: Callable[[DpSgdLocalData], dict[str, Tensor]]
    charged: Callable[[ReleasePlan], Release]
    bound: float
    weight: float

    def vector(self, private: DpSgdLocalData) -> Tensor:
        """Return what is released in the units in which one record moves it by at most `delta`."""
        found = self.ask(private)
        return torch.cat([found["sum"].flatten().double(), self.weight * found["count"].flatten().double()])

    @property
    def delta(self) -> float:
        return float(torch.tensor([self.bound, self.weight], dtype=torch.float64).norm())


MECHANISMS = {
    "prototypes": Mechanism(lambda d: dict(d.sum(PIXELS)), lambda c: c.prototypes, 1.0, 0.5),
    "evaluation": Mechanism(lambda d: dict(d.sum(RIGHT, bound=1.0, split=Split.TEST)), lambda c: c.metrics, 1.0, 1.0),
    "class counts": Mechanism(
        lambda d: {"sum": torch.zeros(4), "count": d.class_counts()}, lambda c: c.class_counts, 0.0, 1.0
    ),
}
each = pytest.mark.parametrize("name", MECHANISMS)


@each
@pytest.mark.parametrize("grouped", [False, True], ids=["records", "groups"])
def test_brute_force_sensitivity_of_every_record_and_group(name: str, grouped: bool) -> None:
    """Add and remove each unit through the mechanism itself, without noise; the bound is reached by a record."""
    mechanism, data = MECHANISMS[name], data_of(24, grouped)
    units = list(dict.fromkeys(data.groups)) if data.groups else list(range(24))
    whole, moved = mechanism.vector(private_data(data, NoNoise(0))), []
    for unit in units:
        gone = torch.tensor([(data.groups[i] if data.groups else i) == unit for i in range(24)])
        moved.append(float((whole - mechanism.vector(private_data(without(data, gone), NoNoise(0)))).norm()))
    assert max(moved) <= mechanism.delta * (1 + 1e-6)  # float32 is what leaves; the integers are within delta
    if not grouped:
        assert max(moved) > 0.999 * mechanism.delta


@each
def test_noise_of_every_sum_is_what_is_charged_and_not_two_thirds_or_three_halves_of_it(name: str) -> None:
    """Residuals of repeated releases over z Delta, by Kolmogorov and Smirnov; enough records that none is cut at 0."""
    mechanism, data = MECHANISMS[name], data_of(1200)
    exact = mechanism.vector(private_data(data, NoNoise(0)))
    noise = Scaled(3, name)

    def residuals(factor: float) -> Tensor:
        noise.factor = factor
        z = mechanism.charged(plan_of()).mechanism.noise
        found = [mechanism.vector(private_data(data, noise)) - exact for _ in range(4)]
        kept = torch.cat(found) / (z * mechanism.delta)
        return kept[kept != 0]

    times = 1 if name == "prototypes" else 40
    right = torch.cat([residuals(1.0) for _ in range(times)]).numpy()
    assert len(right) >= 320
    assert kstest(right, "norm").pvalue > 1e-3
    for factor in (2 / 3, 3 / 2):
        wrong = torch.cat([residuals(factor) for _ in range(times)]).numpy()
        assert kstest(wrong, "norm").pvalue < 1e-4


def test_noise_is_distinct_for_every_part_step_round_and_silo() -> None:
    """Through the data that hospitals open: all noise of three silos and three rounds, and again for secure noise."""
    run = manifest("fedproc", {})
    members = tuple(replace(m, units=14) for m in run.members)
    for rng in ("test", "secure"):
        private = replace(run, members=members, privacy=NamedOptions("dp_record", {"rng": rng, "prototype_every": 1}))
        drawn: list[Tensor] = []

        class Noted:
            def __init__(self, source: SeededNoise | SecureNoise, out: list[Tensor]) -> None:
                self._source, self._out, self.private = source, out, source.private
                self.uniform, self.uniform_of, self.seed = source.uniform, source.uniform_of, source.seed

            def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
                self._out.append(self._source.discrete_gaussian(shape, 1e12).flatten())  # so wide that none comes twice
                return self._out[-1].reshape(shape)

        for silo, share in enumerate(shares()):
            opened = CompiledRun.of(private).profile.data_factory(silo, InMemoryReleaseLog())
            for round in range(3):
                context = RoundContext(3, 4, 5, round, 3).for_silo(silo, run.seed)
                local_data = opened(RoundData(share.train, share.test, run.train, context))
                local_data._noise = Noted(local_data._noise, drawn)
                local_data.sgd(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), ce)
                local_data.sum(PIXELS)
                evaluate(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), local_data, 4)
        assert len(drawn) >= 9 * (2 + 2 + 2)
        heads = torch.stack([d[:4] for d in drawn])  # every part has at least 4 numbers
        assert len(torch.unique(heads, dim=0)) == len(drawn)
        assert len(torch.unique(torch.cat(drawn))) == sum(len(d) for d in drawn)


def mixed(model: nn.Module, x: Tensor, y: Tensor) -> Losses:
    """A loss with a term that mixes the examples."""
    z = model(x)
    return Losses(cross_entropy(z, y, reduction="none"), 0.05 * (z - z.mean(0)).square().sum(1).mean())


@pytest.mark.parametrize("grouped", [False, True], ids=["records", "groups of one"])
@pytest.mark.parametrize("kind", ["example", "split", "micro"])
def test_with_infinite_clip_and_no_noise_the_private_step_equals_the_plain_one(
    kind: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q = 1, one microbatch: the plain full batch. A group of one record is a record."""
    monkeypatch.setattr(grid, "ROUNDING", 1e-18)
    data = data_of()
    if grouped:
        data.groups = tuple(str(i) for i in range(24))
    terms = {} if kind == "example" else {"coupled": kind}
    loss = ce if kind == "example" else mixed
    coupling = Coupling.EXAMPLE if kind == "example" else Coupling.BATCH
    private, plain = (nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).double() for _ in range(2))
    plain.load_state_dict(private.state_dict())
    data.x = data.x.double()
    private_data(data, NoNoise(0), coupling, clip=1e4, coupled_clip_ratio=1.0, microbatch=24, **terms).sgd(
        private, loss
    )
    PlainLocalData(RoundData(data, data, TRAIN, CONTEXT)).sgd(plain, loss)
    for name, value in tensor_maps.copy_state(plain).items():
        assert torch.allclose(tensor_maps.copy_state(private)[name], value, rtol=1e-9, atol=1e-12), name


@each
def test_without_noise_and_with_room_every_sum_equals_the_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "ROUNDING", 1e-12)
    data = data_of()
    private, plain = (
        private_data(data, NoNoise(0), prototype_bound=1e3),
        PlainLocalData(RoundData(data, data, TRAIN, CONTEXT)),
    )
    found = MECHANISMS[name].ask(private)
    exact = MECHANISMS[name].ask(plain)  # type: ignore[arg-type]
    for part, value in exact.items():
        assert torch.allclose(found[part].double(), value.double(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_t_42_epsilon_infinity_is_the_plain_run_bit_for_bit(method: str) -> None:
    plain = manifest(method, {}, rounds=1)
    infinite = replace(plain, privacy=NamedOptions("dp_record", {"epsilon": float("inf")}))
    assert not CompiledRun.of(infinite).private
    a, b = (simulate(RunSetup.of(run), shares(), RoundHistory()) for run in (plain, infinite))
    assert a.keys() == b.keys()
    for group in a:
        assert all(torch.equal(v, b[group][n]) for n, v in a[group].items())
