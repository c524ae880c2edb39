"""The clip that follows a quantile of norms: its rule, the bit's release, and what a silo refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import pytest
import torch
from scipy.stats import kstest, norm
from torch import Tensor

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.aggregation.adaptive_guards import current_settings
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.aggregation.options import Mean
from fl_core.aggregation.update_check import UpdateCheck
from fl_core.errors import RefusedError, StateError
from fl_core.rounds.engine import Observer, RoundLoop, Schedule
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.rounds.updates import PlainSums
from fl_core.types.enums import Capability, TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, Part, PartSpec, RoundContext, State
from privacy import profiles
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.silo import adaptive_clipping
from privacy.mechanisms.silo.config import SiloDpConfig
from privacy.mechanisms.silo.guard import SiloDpGuard, silo_level
from privacy.profiles.silo import silo_releases
from tests.support.federations import manifest, same, shares

pytestmark = pytest.mark.integration

LAYOUT = {
    "delta": PartSpec({"w": (40,)}, ()),
    "metrics": PartSpec({"correct": (4,)}, (4,)),
    adaptive_clipping.PART: adaptive_clipping.SPEC,
}
GRID = FixedPointFormat("ring64", 20)
FOLLOWING = {"clipping": "adaptive", "bit_noise": 1.5, "rng": "test", "test_data": "public"}


def guard_of(noise: float = 1.0, broadcast_clip: float | None = None, **terms: object) -> SiloDpGuard:
    made = SiloDpConfig(**{**FOLLOWING, **terms})  # type: ignore[arg-type]
    return SiloDpGuard(made, GRID, LAYOUT, noise, (1.0,) * 20, frozenset({"delta"}), 1.0, 7, broadcast_clip)


def bundle_of(length: float) -> Bundle:
    w = torch.zeros(40)
    w[3] = length
    return {
        "delta": Part({"w": w}, torch.tensor(1.0)),
        "metrics": Part({"correct": torch.zeros(4)}, torch.zeros(4)),
    }


def answered(guard: SiloDpGuard, bundles: Mapping[int, Bundle]) -> Part:
    """Sum what silos answer, as the coordinator does, and read it back."""
    sums = Aggregator(LAYOUT, GRID)
    for k, bundle in bundles.items():
        sums.add(guard.outgoing(bundle, k, 0))
    return FixedPoint(GRID).incoming(guard.incoming(sums.total(), len(bundles), 0), len(bundles), 0)[
        adaptive_clipping.PART
    ]


@dataclass
class Norms:
    """A method whose silos send deltas of given norms, nothing else."""

    name = "norms"
    has_global_model = False
    server_tracks_state = False
    personal_at_end = False
    unsummed_parts: frozenset[str] = frozenset()
    unsupported: ClassVar[Mapping[Capability, str]] = {}

    def broadcast(self, server: State) -> State:
        return server

    def expects(self, round: int) -> str:
        return ""

    def fingerprint(self, update: Bundle) -> str:
        return ""

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        assert set(total) == {"delta"}
        return dict(server)


@dataclass
class NormPort:
    """A silo whose delta has a norm drawn anew each round, behind the guard of the run."""

    name: str
    index: int
    guard: SiloDpGuard

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        draw = torch.Generator().manual_seed(1000 * context.round + self.index)
        length = float(torch.exp(0.5 * torch.randn((), generator=draw)))  # log-normal: its median is 1
        bundle = bundle_of(length)
        sent = bundle if kind is TaskKind.TRAIN else {"metrics": bundle["metrics"]}
        return self.guard.with_setting(msg[adaptive_clipping.PART]).outgoing(sent, self.index, context.round)

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        pass


class Clips(Observer):
    """An observer that keeps the clip after every round."""

    def __init__(self) -> None:
        self.clips: list[float] = []
        self.states: list[State] = []

    def closed(self, record: RoundRecord, server: State) -> None:
        self.clips.append(float(server[adaptive_clipping.PART]["clip"]))
        self.states.append(server)


def followed(rounds: int, start: int = 0, server: State | None = None, **terms: object) -> Clips:
    guard, seen = guard_of(**terms), Clips()  # type: ignore[arg-type]
    ports = [NormPort(f"s{k:02}", k, guard) for k in range(20)]
    check = UpdateCheck(LAYOUT, GRID, noise=dict.fromkeys(LAYOUT, math.inf))
    engine = RoundLoop(Norms(), Schedule(rounds, 0, 4), check, (FixedPoint(GRID), guard), ports, sums=PlainSums(Mean()))  # type: ignore[arg-type]
    engine.run(server or {"w": {}}, seen, start)  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize(
    ("placement", "quantile", "first"),
    [
        ("central", 0.5, 20.0),
        ("local", 0.5, 0.05),
        pytest.param("central", 0.8, 1.0, marks=pytest.mark.slow),
        pytest.param("local", 0.8, 1.0, marks=pytest.mark.slow),
        pytest.param("central", 0.5, 0.05, marks=pytest.mark.slow),
        pytest.param("local", 0.5, 20.0, marks=pytest.mark.slow),
    ],
)
def test_the_clip_follows_the_target_quantile_of_the_norms(placement: str, quantile: float, first: float) -> None:
    """From 20 times too much or too little, C_t comes to the quantile of the log-normal norms, and stays there."""
    noise = 0.75 if placement == "central" else 0.2  # each silo's own: 20 of them are 0.9 on the sum
    seen = followed(60, clip=first, target_quantile=quantile, placement=placement, bit_noise=noise)
    target = math.exp(0.5 * norm.ppf(quantile))
    late = seen.clips[40:60]
    assert sum(late) / len(late) == pytest.approx(target, rel=0.1)
    assert max(abs(math.log(c / target)) for c in late) < 0.35
    assert seen.clips[60] == seen.clips[59]  # the closing evaluation releases no bit and moves nothing


def test_the_clip_moves_by_the_papers_rule() -> None:
    """Algorithm 1 by hand: 3 of 4 within C, eta 0.2, gamma 0.5, no noise worth the name."""
    guard = guard_of(clip=2.0, bit_noise=1e-9, placement="central").with_setting({"clip": torch.tensor(2.0)})
    part = answered(guard, {k: bundle_of(size) for k, size in enumerate((0.5, 1.0, 1.9, 2.1))})
    assert float(part.weight) == 4
    assert float(part.total["within"]) == pytest.approx(0.5 * 3 - 0.5, abs=1e-6)
    after = float(guard.next_setting({"clip": torch.tensor(2.0)}, part)["clip"])
    assert after == pytest.approx(2.0 * math.exp(-0.2 * (0.75 - 0.5)), rel=1e-6)
    nobody = Part({"within": torch.tensor(0.0)}, torch.tensor(0.0))
    assert float(guard.next_setting({"clip": torch.tensor(2.0)}, nobody)["clip"]) == 2.0


def test_brute_force_sensitivity_of_the_bit_and_of_the_update_at_the_clip_of_the_round() -> None:
    """Adding or removing any silo moves the sum of bits by 1/2, and the update by at most C_t, not by C_0."""
    guard = guard_of(clip=5.0, placement="central", noise=1e-3, bit_noise=1e-3).with_setting(
        {"clip": torch.tensor(0.25)}
    )
    everyone = {k: bundle_of(size) for k, size in enumerate((0.1, 0.3, 40.0))}

    def sums(silos: Mapping[int, Bundle]) -> tuple[Tensor, Tensor]:
        total = Aggregator(LAYOUT, GRID)
        for k, bundle in silos.items():
            total.add(guard.outgoing(bundle, k, 0))
        found = total.total()
        bits = GRID.decode(adaptive_clipping.PART, found[adaptive_clipping.PART].total["within"].clone())
        return GRID.decode("delta", found["delta"].total["w"].clone()), bits

    whole = sums(everyone)
    for gone in everyone:
        rest = sums({k: b for k, b in everyone.items() if k != gone})
        assert 0.05 < float((whole[0] - rest[0]).norm()) <= 0.25
        assert float((whole[1] - rest[1]).abs()) == pytest.approx(0.5, abs=1e-6)
        assert float((whole[1] - rest[1]).abs()) <= 0.5
    assert guard_of(clip=5.0).sensitivity() == {"delta": 5.0, adaptive_clipping.PART: 0.5}


def test_the_bits_noise_is_the_planned_gaussian_and_not_two_thirds_or_three_halves_of_it() -> None:
    guard = guard_of(bit_noise=1.5, broadcast_clip=1.0)
    drawn = []
    for round in range(800):
        sent = guard.outgoing(bundle_of(0.5), round % 5, round)[adaptive_clipping.PART].total["within"]
        drawn.append((float(GRID.decode(adaptive_clipping.PART, sent.clone())) - 0.5) / 1.5)
    assert kstest(drawn, norm.cdf).pvalue > 1e-3
    assert kstest([d * 2 / 3 for d in drawn], norm.cdf).pvalue < 1e-4
    assert kstest([d * 3 / 2 for d in drawn], norm.cdf).pvalue < 1e-4
    zeros = [guard.outgoing(bundle_of(0.0), 0, 0)["delta"].total["w"].double() for _ in range(2)]
    assert torch.equal(*zeros)  # seeded: repeated with the seed, but never the bit's own noise again
    bit = guard.outgoing(bundle_of(0.0), 0, 0)[adaptive_clipping.PART].total["within"]
    assert abs(float(zeros[0][0]) / 1.0 - (float(bit) - 0.5 * 2.0 ** GRID.frac_bits(adaptive_clipping.PART)) / 1.5) > 1


def run_of(**terms: object) -> RunManifest:
    made = manifest("fedavg", {"weights": "uniform"})
    given = {"allow_large": True, **FOLLOWING, "bit_noise": 20.0, "weights": "uniform", **terms}
    choice = NamedOptions("dp_silo_small", given)  # type: ignore[arg-type]
    return replace(made, privacy=choice, layout={**made.layout, **profiles.extra_parts(choice)})


@cache
def simulated(**terms: object) -> Clips:
    run, seen = run_of(**terms), Clips()
    simulate(CompiledRun.of(run), shares(), seen)
    return seen


@pytest.mark.parametrize("placement", ["local", "central"])
def test_a_run_carries_its_clip_in_its_state_and_resumes_with_it(placement: str) -> None:
    seen = simulated(placement=placement)
    assert len(set(seen.clips[:3])) == 3
    assert all("w" in s for s in seen.states)
    run, again = run_of(placement=placement), Clips()
    built = CompiledRun.of(run)
    from consilium.research.engines.in_process import local_ports

    end = built.round_loop(local_ports(built, shares()), 1).run(seen.states[0], again, start=1)
    assert again.clips == seen.clips[1:]
    assert same(end["w"], seen.states[-1]["w"])
    with pytest.raises(StateError, match="E-STATE-22"):
        current_settings(built.guards.incoming, {"w": end["w"]}, 1)
    assert (
        float(
            current_settings(built.guards.incoming, RunSetup.of(run).initial_state(), 0)[adaptive_clipping.PART]["clip"]
        )
        == 1.0
    )


def test_every_round_charges_the_bit_beside_the_update() -> None:
    guard = silo_level(RunSetup.of(run_of(test_data="private")))
    made = [(r.purpose, r.collection, r.mechanism.noise) for r in silo_releases(guard, True)]
    z = guard.noise
    assert made == [
        ("update", "hospital", z),
        ("clip bit", "hospital", 40.0),
        ("evaluation", "hospital", 20.0),
        ("update", "train", z / 2),
        ("clip bit", "train", 20.0),
        ("evaluation", "test", 10.0),
    ]
    assert [r.purpose for r in silo_releases(guard, False)] == ["evaluation", "evaluation"]


def test_a_clip_that_the_plan_is_silent_on_is_refused_and_so_is_none_where_it_has_one() -> None:
    fixed = guard_of(clipping="fixed", bit_noise=0.0)
    assert fixed.with_setting(None).clip_at(0) == 1.0
    for guard, setting in (
        (fixed, {"clip": torch.tensor(3.0)}),
        (guard_of(), None),
        (guard_of(), {}),
        (guard_of(), {"clip": torch.tensor(math.inf)}),
        (guard_of(), {"clip": torch.tensor(math.nan)}),
        (guard_of(), {"clip": torch.tensor(-1.0)}),
    ):
        with pytest.raises(RefusedError, match="E-PRIV-15"):
            guard.with_setting(setting)
    with pytest.raises(RefusedError, match="E-PRIV-15"):
        guard_of().outgoing(bundle_of(1.0), 0, 0)


def test_an_infinite_epsilon_is_the_plain_run_without_a_bit() -> None:
    run = run_of(epsilon=math.inf)
    assert profiles.extra_parts(run.privacy) == {}
    assert CompiledRun.of(run).guards.silo == ()
    plain, other = RoundHistory(), RoundHistory()
    assert same(
        simulate(RunSetup.of(replace(run, privacy=NamedOptions("none"))), shares(), plain)["w"],
        simulate(RunSetup.of(run), shares(), other)["w"],
    )
