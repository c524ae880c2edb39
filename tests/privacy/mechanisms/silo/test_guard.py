"""Silo-level privacy: bounded by brute force, noisy as planned on the grid, accounted at rate 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from scipy.stats import kstest, norm
from torch import Tensor

from consilium.research.engines.in_process import RoundHistory, simulate
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.errors import ConfigError
from fl_core.methods import METHODS
from fl_core.rounds.manifest import NamedOptions, RunManifest, RunMember
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.records import RoundRecord
from fl_core.types.values import Bundle, Part, PartSpec
from privacy.accounting.accountant import Mechanism, epsilon_of
from privacy.accounting.gaussian import delta_of, mu_of
from privacy.accounting.release_plan import Release
from privacy.compiled_run import CompiledRun
from privacy.mechanisms.silo.config import SiloDpConfig
from privacy.mechanisms.silo.guard import SiloDpGuard, coordinates, silo_level
from privacy.profiles.silo import silo_releases
from tests.support import some
from tests.support.federations import NAMES, manifest, shares

pytestmark = pytest.mark.integration

UNITS = (14, 7, 10)


def run_of(method: str = "fedavg", options: Mapping[str, object] | None = None, **terms: object) -> RunManifest:
    given = {"rng": "test", "allow_large": True, **terms}
    more = {k: given.pop(k) for k in ("cohort", "rounds", "share") if k in given}
    made = manifest(method, options or {}, **more)  # type: ignore[arg-type]
    members = tuple(replace(m, units=n) for m, n in zip(made.members, UNITS, strict=True))
    return replace(made, members=members, privacy=NamedOptions("dp_silo_small", given))  # type: ignore[arg-type]


def bundle_of(seed: int, size: float = 30.0) -> Bundle:
    g = torch.Generator().manual_seed(seed)
    n = float(torch.rand((), generator=g)) * 20 + 1
    return {
        "delta": Part({"w": torch.randn(40, generator=g) * size, "b": torch.randn(3, generator=g)}, torch.tensor(n)),
        "prototypes": Part({"offset": torch.randn(4, 5, generator=g) * size}, torch.rand(4, generator=g) * size),
        "metrics": Part({"correct": torch.rand(4, generator=g) * size}, torch.rand(4, generator=g) * size),
    }


LAYOUT = {name: PartSpec.of(part) for name, part in bundle_of(0).items()}
GRID = FixedPointFormat("ring64", 3)


def guard_of(noise: float = 1.0, grid: FixedPointFormat = GRID, **terms: object) -> SiloDpGuard:
    made = SiloDpConfig(**{"rng": "test", "clip": 0.8, "metric_clip": 5.0, **terms})  # type: ignore[arg-type]
    return SiloDpGuard(made, grid, LAYOUT, noise, (1.0, 0.5, 0.25), frozenset({"delta"}), 14.0, 7)


def summed(guard: SiloDpGuard, silos: list[int], scale: float) -> dict[str, Tensor]:
    """Sum what silos send on the grid, and return each block in the units in which the joint norm is taken."""
    sums = Aggregator(LAYOUT, guard.grid)
    for k in silos:
        sums.add(guard.outgoing(bundle_of(10 * k + 1, scale), k, 0))
    found, total = {}, sums.total()
    for name, part in total.items():
        keys = {**part.total, **({"": part.weight} if part.weight.dim() else {})}
        found[name] = torch.cat(
            [guard.grid.decode(name if k else f"{name}.weight", v.clone()).flatten() for k, v in keys.items()]
        ) / guard._scale(name)
    return found


@pytest.mark.parametrize("scale", [1e-3, 0.3, 30.0, 1e4])
def test_brute_force_sensitivity_of_every_silo(scale: float) -> None:
    """Without noise (central placement): adding or removing any silo moves the joint vector by at most C, and a silo
    above the bound by C itself; evaluation, a vector of its own, by its clip."""
    guard = guard_of(placement="central")
    whole = summed(guard, [0, 1, 2], scale)
    for k in range(3):
        rest = summed(guard, [j for j in range(3) if j != k], scale)
        moved = torch.cat([whole[n] - rest[n] for n in ("delta", "prototypes")]).norm()
        measured = (whole["metrics"] - rest["metrics"]).norm()
        assert float(moved) <= 0.8
        assert float(measured) <= 5.0
        if scale == 1e4:
            assert float(moved) == pytest.approx(0.8, rel=1e-4)
            assert float(measured) == pytest.approx(5.0, rel=1e-4)
        if scale == 1e-3:  # nothing is cut off what is short
            assert 0 < float(moved) < 0.7


def test_the_clip_accounts_for_rounding_on_a_coarse_grid() -> None:
    """With 4 fractional bits rounding alone could pass C; the bound holds, and without its reserve it would not."""
    coarse = FixedPointFormat(
        "ring32",
        3,
        dict.fromkeys(("delta", "prototypes", "metrics"), 2.0**24) | {f"{n}.weight": 2.0**24 for n in LAYOUT},
    )
    assert coarse.frac_bits("delta") == 5
    guard = guard_of(placement="central", grid=coarse, noise=4.0)
    for scale in (1.0, 10.0):
        parts = summed(guard, [0], scale)
        assert float(torch.cat([parts["delta"], parts["prototypes"]]).norm()) <= 0.8
    with pytest.raises(ConfigError, match="too coarse") as found:
        guard_of(placement="central", grid=coarse, noise=4.0, clip=0.05).outgoing(bundle_of(1), 0, 0)
    assert found.value.code == "E-PRIV-20"


def test_the_public_weight_stands_in_the_place_of_the_true_one() -> None:
    sent = guard_of(placement="central").outgoing(bundle_of(3, 1e-3), 1, 0)
    assert float(sent["delta"].weight) == 0.5
    other = {**bundle_of(3, 1e-3)}
    other["delta"] = Part({k: v * 9 for k, v in other["delta"].total.items()}, other["delta"].weight * 9)
    again = guard_of(placement="central").outgoing(other, 1, 0)
    assert all((v - again["delta"].total[k]).abs().max() <= 2**20 for k, v in sent["delta"].total.items())


def residual(guard: SiloDpGuard, silo: int, round: int, name: str = "delta") -> Tensor:
    """Return the noise that a silo added to a bundle of zeros, over z C and the part's scale."""
    zero = {
        n: Part({k: torch.zeros(20_000) for k in p.total}, torch.zeros_like(p.weight) + (n == "delta"))
        for n, p in bundle_of(0).items()
    }
    sent = guard.outgoing(zero, silo, round)[name]
    value = guard.grid.decode(name, next(iter(sent.total.values())).clone())
    return value / (guard._scale(name) * guard.noise * guard.terms.clip_at(round))


def test_t_16_noise_is_the_planned_gaussian_and_not_two_thirds_or_three_halves_of_it() -> None:
    for name in ("delta", "prototypes"):
        drawn = residual(guard_of(noise=1.7), 0, 0, name).numpy()
        assert kstest(drawn, norm.cdf).pvalue > 1e-3
        assert kstest(drawn * 2 / 3, norm.cdf).pvalue < 1e-9
        assert kstest(drawn * 3 / 2, norm.cdf).pvalue < 1e-9


def test_noise_follows_the_public_decay_of_the_clip() -> None:
    guard = guard_of(clip_decay=0.5)
    assert guard.terms.clip_at(3) == pytest.approx(0.1)
    assert float(residual(guard, 0, 3).std()) == pytest.approx(1.0, rel=0.02)


def test_noise_differs_by_part_round_and_silo_and_repeats_only_with_a_seed() -> None:
    guard = guard_of()
    drawn = [residual(guard, 0, 0), residual(guard, 1, 0), residual(guard, 0, 1), residual(guard, 0, 0, "prototypes")]
    drawn += [residual(guard_of(rng="secure"), 0, 0) for _ in range(2)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs(float((a * b).mean() / (a.std() * b.std()))) < 5 / math.sqrt(len(a))
    assert torch.equal(drawn[0], residual(guard_of(), 0, 0))


def test_central_noise_is_added_once_to_the_sum() -> None:
    guard = guard_of(placement="central", noise=2.0)
    zero = {
        n: Part({k: torch.zeros(20_000, dtype=torch.int64) for k in p.total}, torch.zeros_like(p.weight).long())
        for n, p in bundle_of(0).items()
    }
    value = GRID.decode("delta", guard.incoming(zero, 3, 0)["delta"].total["w"].clone())
    assert float(value.std()) == pytest.approx(2.0 * 0.8, rel=0.02)
    local = guard_of(placement="local")
    assert local.incoming(zero, 3, 0) is zero


@pytest.mark.parametrize(
    ("epsilon", "row"), [(8, (0.60, 1.90, 4.24, 6.00)), (2, (1.99, 6.30, 14.1, 19.9)), (1, (3.73, 11.8, 26.4, 37.3))]
)
def test_noise_of_full_participation(epsilon: float, row: tuple[float, ...]) -> None:
    """Specification 5.2: z for T = 1, 10, 50, 100 releases at delta 1e-5 (analytic Gaussian)."""
    for releases, expected in zip((1, 10, 50, 100), row, strict=True):
        z = math.sqrt(releases) / mu_of(epsilon, 1e-5)
        assert z == pytest.approx(expected, rel=5e-3)
        assert epsilon_of([Mechanism(z, 1.0, releases)], 1e-5) == pytest.approx(epsilon, rel=1e-6)


def test_t_8_analytic_epsilon() -> None:
    for z, epsilon in ((1, 4.3772), (2, 1.9931), (4, 0.9263), (10, 0.3407)):
        assert epsilon_of([Mechanism(float(z))], 1e-5) == pytest.approx(epsilon, abs=1e-4)
    assert delta_of(1.0, 4.3772) == pytest.approx(1e-5, rel=1e-3)


def logs_of(run: RunManifest) -> list[list[Release]]:
    """Write what each hospital's log holds at the end of a run."""
    guard = silo_level(RunSetup.of(run))
    return [
        [r for _ in range(trained) for r in silo_releases(guard, True)] + silo_releases(guard, False)
        for trained in map(len, RunSetup(run).training_rounds)
    ]


def test_each_participated_round_is_charged_at_rate_one() -> None:
    run = run_of(cohort=2, rounds=6, test_data="public", reserve_rounds=0)
    found = CompiledRun.of(run).profile.report(logs_of(run))
    assert found is not None
    taken = [len(rounds) for rounds in RunSetup(run).training_rounds]
    assert sum(taken) == 12
    z = silo_level(RunSetup.of(run)).noise
    for name, rounds in zip(NAMES, taken, strict=True):
        assert found["epsilon_by_silo"][name] == epsilon_of([Mechanism(z, 1.0, rounds)], 1e-5)  # type: ignore[index]
    assert 0.85 * 8 < found["epsilon"] <= 8  # type: ignore[operator]
    assert found["epsilon_analytic"] == found["epsilon"]  # type: ignore[operator]
    assert found["private"] is False
    private_tests = run_of(rounds=6, reserve_rounds=0)
    charged = CompiledRun.of(private_tests).profile.report(logs_of(private_tests))
    assert charged is not None
    assert 0.9 * 8 < charged["epsilon"] <= 8  # type: ignore[operator]
    assert charged["noise_multiplier"] > z  # type: ignore[operator]


def test_what_silo_level_privacy_cannot_cover_is_refused() -> None:
    with pytest.raises(ConfigError) as found:
        CompiledRun.of(run_of(allow_large=False, rounds=3) if coordinates(run_of().layout) > 20_000 else large())
    assert found.value.code == "E-PRIV-16"
    with pytest.raises(ConfigError) as found:
        CompiledRun.of(replace(run_of(), members=tuple(RunMember(n) for n in NAMES)))
    assert found.value.code == "E-PRIV-17"
    with pytest.raises(ConfigError, match="personal=false") as found:
        CompiledRun.of(replace(run_of(), personal=True))
    assert found.value.code == "E-PRIV-16"
    for bad in ({"clip": 0.0}, {"clip_decay": 1.5}, {"delta": 0.5}, {"placement": "nowhere"}, {"epsilon": 0.0}):
        with pytest.raises(ConfigError) as found:
            SiloDpConfig.of(bad)
        assert found.value.code == "E-PRIV-20"


def large() -> RunManifest:
    run = run_of(allow_large=False)
    return replace(run, layout={**run.layout, "more": PartSpec({"v": (20_001,)}, ())})


def simulated(run: RunManifest) -> tuple[dict[str, Tensor], list[RoundRecord]]:
    history = RoundHistory()
    final = simulate(CompiledRun.of(run), shares(), history)
    return dict(final["w"]), history.records


@pytest.mark.parametrize("method", some(sorted(METHODS)))
def test_every_method_runs_under_silo_level_noise_or_is_refused(method: str) -> None:
    run = run_of(method, rounds=1)
    history = RoundHistory()
    if method == "analytic":
        with pytest.raises(ConfigError, match=r"E-PRIV-16.*privacy=dp_record"):
            simulate(CompiledRun.of(run), shares(), history)
        return
    simulate(CompiledRun.of(run), shares(), history)
    assert history.records[-1].included == tuple(sorted(NAMES))


def test_without_noise_worth_the_name_the_run_is_the_plain_one() -> None:
    """epsilon = inf is the plain run bit for bit; huge clips and tiny noise come near it."""
    plain, _ = simulated(replace(run_of("fedavg"), privacy=NamedOptions("none")))
    infinite, records = simulated(run_of("fedavg", epsilon=float("inf")))
    assert all(torch.equal(v, infinite[n]) for n, v in plain.items())
    near, _ = simulated(run_of("fedavg", {"weights": "uniform"}, epsilon=1e6, clip=1e3, test_data="public", rounds=3))
    even, _ = simulated(replace(run_of("fedavg", {"weights": "uniform"}), privacy=NamedOptions("none")))
    noisy, _ = simulated(run_of("fedavg", {"weights": "uniform"}, epsilon=1.0, test_data="public"))
    distance = max(float((near[n] - v).abs().max()) for n, v in even.items())
    assert distance < max(float((noisy[n] - v).abs().max()) for n, v in even.items())
    assert records[-1].accuracy >= 0


def test_a_hospital_whose_update_is_not_finite_sends_noise_and_no_error() -> None:
    guard = guard_of(noise=1.0)
    for bad in (math.nan, math.inf, -math.inf):
        honest = bundle_of(0)
        name, part = next(iter(honest.items()))
        spoilt = {k: v.clone() for k, v in part.total.items()}
        next(iter(spoilt.values())).view(-1)[0] = bad
        sent = guard.outgoing({**honest, name: Part(spoilt, part.weight)}, 0, 0)
        assert all(not v.is_floating_point() for v in sent[name].total.values())
    silent = guard_of(placement="central")
    zero = silent.outgoing({**honest, name: Part(spoilt, part.weight)}, 0, 0)
    assert not any(bool(v.any()) for v in zero[name].total.values())
