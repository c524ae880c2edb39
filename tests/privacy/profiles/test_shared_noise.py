"""Noise shared out under masks: how much each hospital adds, what that is worth, and to whom it is refused (T-61)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from consilium.research.engines.in_process import RoundHistory, SiloShare, simulate
from consilium.research.simulate.runner import build_simulation
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core import datasets
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.errors import ConfigError, RefusedError
from fl_core.rounds.manifest import NamedOptions, RunManifest, RunMember
from fl_core.types.secagg import Secagg
from fl_core.types.values import Bundle, Part, PartSpec
from privacy.accounting.accountant import Mechanism, epsilon_of
from privacy.accounting.gaussian import mu_of
from privacy.accounting.projection import preview
from privacy.accounting.release_plan import HOSPITAL
from privacy.accounting.shared_noise import SharedNoise
from privacy.compiled_run import CompiledRun
from privacy.ledger import registration
from privacy.ledger.account import LedgerTask, PlannedRelease
from privacy.ledger.ledger import Ledger
from privacy.mechanisms.noise.discrete_gaussian import MIN_SIGMA
from privacy.mechanisms.noise.sources import SeededNoise
from privacy.mechanisms.record import moments
from privacy.mechanisms.record.class_sums import PrivacyUnits
from privacy.mechanisms.silo.config import SiloDpConfig
from privacy.mechanisms.silo.guard import SiloDpGuard
from privacy.policy import Policy
from privacy.policy_terms import Floors
from privacy.profiles.prototype_filter import DisclosureLimits
from privacy.release_log import InMemoryReleaseLog
from privacy.secagg.terms import SecaggError, SecaggRun
from silo.admission.run_request import request_of
from silo.cli.ledger import collection_json
from silo.reports.run_request import RunRequest
from tests.privacy.mechanisms.record.test_moments import WIDTH, query
from tests.support.federations import NAMES, Given, manifest, shares
from tests.support.privacy import DATA, NoNoise, budgeted, examples, extreme_records, records
from tests.support.privacy import TRAIN as COLLECTION

ROOT = Path(__file__).parents[3]
SIX = tuple(f"hospital{k}" for k in range(6))
RING32 = FixedPointFormat("ring32", 6, {"moments": 400.0, "moments.weight": 400.0})


def run_over(n: int, cohort: int = 0, **terms: object) -> RunManifest:
    made = manifest("fedavg", {})
    members = tuple(RunMember(f"silo{k}", True, 100) for k in range(n))
    return replace(made, members=members, cohort=cohort, secagg=Secagg(1, **terms))  # type: ignore[arg-type]


# ---- how much, and what it is worth ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c", "stds", "gain", "promised", "honest", "one_more", "alone"),
    [
        (3, 1, (0.577, 0.408, 0.333), 1.4, 8, 6.3, 12.3, 12.3),
        (6, 1, (0.408, 0.236, 0.167), 1.7, 8, 5.3, 10.2, 15.9),
        (20, 1, (0.224, 0.062, 0.050), 3.6, 8, 6.2, 8.4, 42.9),
        (20, 7, (0.224, 0.085, 0.050), 2.6, 8, 4.3, 8.8, 27.8),
        (50, 1, (0.141, 0.025, 0.020), 5.7, 8, 6.2, 8.2, 85.8),
        (50, 17, (0.141, 0.034, 0.020), 4.1, 8, 4.2, 8.3, 52.1),
    ],
)
def test_the_table_of_epsilons_by_who_is_honest(
    n: int, c: int, stds: Sequence[float], gain: float, promised: float, honest: float, one_more: float, alone: float
) -> None:
    """50 rounds at delta 1e-5, by the exact Gaussian curve; std of the noise on a mean of n, in units of z C.

    One more colluder than promised leaves m - c - 1 noises. The specification prints 10.3 for six, where it is 10.247.
    """
    found, z = SharedNoise.of(run_over(n, collusion=c)), math.sqrt(50) / mu_of(8.0, 1e-5)

    def epsilon(noise: float) -> float:
        return epsilon_of([Mechanism(noise, 1.0, 50)], 1e-5)

    own = found.alone(z)
    assert (1 / math.sqrt(n), round(found.of_all(1.0) / n, 3), 1 / n) == pytest.approx(stds, abs=6e-4)
    assert 1 / found.share == pytest.approx(gain, abs=0.05)
    summed = own * math.sqrt(found.smallest_sum - c)
    assert epsilon(summed) == pytest.approx(promised, abs=0.05)
    assert epsilon(found.of_all(z)) == pytest.approx(honest, abs=0.05)
    assert epsilon(own * math.sqrt(found.smallest_sum - c - 1)) == pytest.approx(one_more, abs=0.05)
    assert epsilon(own) == pytest.approx(alone, abs=0.05)


def least_hospitals(d: int, rounds: int, placement: str) -> int:
    """Search for the least n whose noise on the mean is no longer than the longest update, z sqrt(d) <= sqrt(...)."""
    needed = rounds / mu_of(8.0, 1e-5) ** 2 * d

    def enough(n: int) -> bool:
        m = max(3, -(-2 * n // 3))
        return needed <= {"local": n, "distributed": n * (m - 1), "central": n * n}[placement]

    low, high = 3, 1 << 40
    while low < high:
        low, high = (low, (low + high) // 2) if enough((low + high) // 2) else ((low + high) // 2 + 1, high)
    return low


def test_the_page_says_from_how_many_hospitals_on_silo_level_noise_is_no_longer_than_an_update() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (ROOT / "docs" / "secure-aggregation.md").read_text().splitlines()
        if line.count(" / ") == 6 and line.startswith("| ")
    ]
    assert [int(row[0].replace(",", "")) for row in rows] == [100, 650, 5130, 11_183_582]
    for row in rows:
        d = int(row[0].replace(",", ""))
        for cell, rounds in zip(row[2:], (1, 10, 50), strict=True):
            said = [int(n.replace(",", "")) for n in cell.split(" / ")]
            assert said == [least_hospitals(d, rounds, p) for p in ("local", "distributed", "central")]
    z = math.sqrt(50) / mu_of(8.0, 1e-5)
    for n, times in ((6, 3340), (20, 880), (50, 349)):
        shared = SharedNoise.of(run_over(n))
        assert shared.of_all(z) * math.sqrt(11_183_582) / n == pytest.approx(times, rel=2e-3)


@pytest.mark.parametrize(("n", "most"), [(3, 1), (4, 1), (5, 2), (6, 1), (10, 3), (20, 7), (50, 17)])
def test_no_more_may_collude_than_the_protocol_withstands_and_one_at_least(n: int, most: int) -> None:
    assert SharedNoise.of(run_over(n, collusion=most)).colluding == most
    for c in (0, most + 1):
        with pytest.raises(ConfigError, match=rf"from 1 to {most} .* found {c}") as found:
            SharedNoise.of(run_over(n, collusion=c))
        assert found.value.code == "E-CFG-02"


def test_what_counts_is_the_cohort_of_a_round() -> None:
    assert SharedNoise.of(run_over(50, cohort=6)) == SharedNoise(6, 4, 1)


@pytest.mark.parametrize("min_sum", [0, 3, 5, 6])
def test_a_run_may_ask_for_larger_sums_and_silos_sign_no_smaller_one(min_sum: int) -> None:
    """What the noise counts on is what the protocol enforces, in rounds of all members and of fewer."""
    run = SecaggRun("run", bytes(32), SIX, 1, "ring32", Secagg(1, min_sum=min_sum))
    terms = Secagg(1, min_sum=min_sum)
    for n in range(3, 7):
        assert run.thresholds(n).m == terms.smallest_sum(n)
    m = SharedNoise.of(run_over(6, min_sum=min_sum)).smallest_sum
    assert m == max(4, min_sum)
    round = run.round(bytes(32), "train", 0, bytes(32))
    assert round.check_set([(u, bytes(32)) for u in range(m)]) == tuple(range(m))
    with pytest.raises(SecaggError, match=f"at least {m} members"):
        round.check_set([(u, bytes(32)) for u in range(m - 1)])
    with pytest.raises(ConfigError, match="min_sum"):
        SecaggRun("run", bytes(32), SIX, 1, "ring32", Secagg(1, min_sum=7))


def sum_gap(sigma: float, silos: int) -> float:
    """Bound how far the sum of so many discrete Gaussians is from the one of sqrt(silos) sigma: |ln P - ln Q| <= tau.

    Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
    Aggregation", ICML 2021: tau = 10 sum_i<silos exp(-2 pi^2 sigma^2 i / (i + 1)), and a vector of d such sums whose
    noise is z times its sensitivity is (e^2 / 2)-zCDP with e <= 1 / z + tau sqrt(d).
    """
    return 10 * math.fsum(math.exp(-2 * (math.pi * sigma) ** 2 * i / (i + 1)) for i in range(1, silos))


@pytest.mark.parametrize(("sigma", "silos"), [(0.7, 2), (1.0, 2), (1.0, 5)])
def test_the_gap_of_a_sum_bounds_what_convolution_finds(sigma: float, silos: int) -> None:
    x = np.arange(-60, 61)
    one = np.exp(-(x**2) / (2 * sigma**2))
    one /= one.sum()
    summed = one
    for _ in range(silos - 1):
        summed = np.convolve(summed, one)
    at = np.arange(len(summed)) - len(summed) // 2
    whole = np.exp(-(at**2) / (2 * silos * sigma**2))
    near = np.abs(at) <= 4 * sigma * math.sqrt(silos)
    apart = np.abs(np.log(summed[near]) - np.log(whole[near] / whole.sum())).max()
    assert 1e-3 * sum_gap(sigma, silos) < apart <= sum_gap(sigma, silos)


def test_four_steps_of_the_grid_leave_no_gap_worth_charging() -> None:
    assert sum_gap(MIN_SIGMA, 255) < 3e-68


# ---- the noise of sums -----------------------------------------------------------------------------------------------

NUMBERS = 1_000_000
WIDE = {"delta": PartSpec({"w": (NUMBERS,)}, ()), "metrics": PartSpec({"correct": (4,)}, (4,))}
GRID = FixedPointFormat("ring64", 6)


def wide_guard(shared: SharedNoise | None, noise: float = 1.3, grid: FixedPointFormat = GRID, **terms: object):  # type: ignore[no-untyped-def]
    given = {"rng": "test", "clip": 0.8, "placement": "distributed" if shared else "local", **terms}
    made = SiloDpConfig(**given)  # type: ignore[arg-type]
    return SiloDpGuard(made, grid, WIDE, noise, (1.0,) * 6, frozenset({"delta"}), 1.0, 7, shared=shared)


def zeros(numbers: int = NUMBERS) -> Bundle:
    metrics = Part({"correct": torch.zeros(4)}, torch.zeros(4))
    return {"delta": Part({"w": torch.zeros(numbers)}, torch.tensor(1.0)), "metrics": metrics}


@cache
def noises() -> list[Tensor]:
    """Return what six silos add to a vector of zeros, over z C."""
    guard = wide_guard(SharedNoise(6, 4, 1))
    sent = (guard.outgoing(zeros(), k, 0)["delta"].total["w"] for k in range(6))
    return [guard.grid.decode("delta", v) / (guard.noise * 0.8) for v in sent]


@pytest.mark.parametrize("members", [range(4), range(6)])
def test_t_61_the_sum_over_the_smallest_set_and_over_all_has_the_planned_variance(members: Sequence[int]) -> None:
    """m sigma_s^2 and n sigma_s^2, sigma_s = z C / sqrt(m - c), to half a percent; normal, and nothing near it."""
    total = torch.stack([noises()[k] for k in members]).sum(0)
    wanted = len(members) / 3
    assert float(total.var()) == pytest.approx(wanted, rel=5e-3)
    some = total[:20_000].numpy()
    assert kstest(some, "norm", (0, math.sqrt(wanted))).pvalue > 1e-3
    assert kstest(some, "norm", (0, math.sqrt(wanted) * 2 / 3)).pvalue < 1e-9
    assert kstest(some, "norm", (0, math.sqrt(wanted) * 3 / 2)).pvalue < 1e-9


def test_t_61_a_silo_without_noise_is_covered_and_a_second_one_is_not() -> None:
    one_silent = torch.stack(noises()[1:4]).sum(0)
    assert float(one_silent.var()) == pytest.approx(1.0, rel=5e-3)
    assert float(torch.stack(noises()[2:4]).sum(0).var()) == pytest.approx(2 / 3, rel=5e-3)


def test_noise_of_silos_is_independent() -> None:
    for k in range(1, 6):
        assert abs(float((noises()[0] * noises()[k]).mean())) < 5 / 3 / math.sqrt(NUMBERS)


@pytest.mark.integration
def test_evaluations_keep_noise_of_their_own() -> None:
    guard = wide_guard(SharedNoise(6, 4, 1), metric_noise=20.0)
    drawn = [guard.outgoing(zeros(1), 0, t)["metrics"].total["correct"] for t in range(1000)]
    values = guard.grid.decode("metrics", torch.cat(drawn))
    assert float(values.std()) == pytest.approx(20.0 * guard.terms.metric_clip, rel=0.05)


@pytest.mark.parametrize(
    ("bound", "clip", "message"),
    [(1.0, 0.8, "can reach 8.906.* grid ends at 1"), (4e6, 1e-3, "grid steps, at least 4 are needed")],
)
def test_a_grid_that_shared_noise_does_not_fit_is_refused(bound: float, clip: float, message: str) -> None:
    coarse = FixedPointFormat("ring32", 6, {"delta": bound, "delta.weight": 1.0, "metrics": 1e5, "metrics.weight": 1e5})
    guard = wide_guard(SharedNoise(6, 4, 1), grid=coarse, clip=clip, test_data="public")
    with pytest.raises(ConfigError, match=message) as found:
        guard.require_room()
    assert found.value.code == "E-PRIV-20"
    with pytest.raises(ConfigError, match="E-PRIV-20"):
        guard.outgoing(zeros(10), 0, 0)


NOBODY = Given(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long))


def released(data: Given, z: float, source: object, on: moments.ReleaseGrid) -> dict[str, Tensor]:
    return dict(moments.moment_sums(query(), data, PrivacyUnits.of(data), z, source, on=on))  # type: ignore[arg-type]


@pytest.mark.integration
@pytest.mark.parametrize("silos", [4, 6])
def test_t_61_sums_of_moments_have_the_planned_variance_and_say_so(silos: int) -> None:
    shared, z = SharedNoise(6, 4, 1), 2.0
    on, below = moments.ReleaseGrid.of(RING32, ["moments"]), torch.tril_indices(WIDTH, WIDTH, -1)
    beside, sums, variance = [], [], torch.zeros(())
    for t in range(100):
        found = [released(NOBODY, shared.alone(z), SeededNoise(t, "silo", k), on) for k in range(silos)]
        whole = {name: torch.stack([f[name] for f in found]).sum(0) for name in ("a", "b", "variance")}
        beside.append(whole["a"][below[0], below[1]])
        sums.append(whole["b"].flatten())
        variance = whole["variance"]
    wanted = silos / 3 * 2 * z**2
    assert float(variance) == pytest.approx(wanted)
    assert float(torch.cat(beside).var()) == pytest.approx(wanted / 2, rel=1e-2)
    assert float(torch.cat(sums).var()) == pytest.approx(wanted, rel=3e-2)
    drawn = torch.cat(sums)[:8000].numpy()
    assert kstest(drawn, "norm", (0, math.sqrt(wanted))).pvalue > 1e-3
    assert kstest(drawn, "norm", (0, math.sqrt(wanted) * 2 / 3)).pvalue < 1e-6
    assert kstest(drawn, "norm", (0, math.sqrt(wanted) * 3 / 2)).pvalue < 1e-6


@pytest.mark.parametrize("format", [RING32, FixedPointFormat("ring64", 50)])
def test_what_leaves_lies_on_the_grid_of_the_masks_so_that_nothing_is_rounded_after_the_noise(
    format: FixedPointFormat,
) -> None:
    on = moments.ReleaseGrid.of(format, ["moments"])
    found = released(examples(150), 0.4, SeededNoise(1, "x"), on)
    guard = FixedPoint(format)
    sent = guard.outgoing({"moments": Part({k: found[k] for k in ("a", "b")}, torch.tensor(100.0))}, 0, 0)
    assert guard.clipped == 0
    for name in ("a", "b"):
        assert torch.equal(format.decode("moments", sent["moments"].total[name].clone()), found[name])


@pytest.mark.parametrize("most", [20.0, 400.0])
def test_no_unit_moves_a_release_further_than_is_accounted_also_where_sums_are_cut(most: float) -> None:
    """Records of every kind beside sums that are at the grid's bound, and far from it."""
    on = moments.ReleaseGrid(2.0**-22, most)
    rows, columns = torch.tril_indices(WIDTH, WIDTH)
    factor = torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()
    x, y = records()
    x, y = torch.cat((x, 10 * torch.ones(40, 1, 8, 8))), torch.cat((y, torch.zeros(40, dtype=torch.long)))

    def vector(data: Given) -> Tensor:
        found = released(data, 0.3, NoNoise(1, "x"), on)
        return torch.cat((found["a"][rows, columns] * factor, found["b"].flatten()))

    before, furthest = vector(Given(x, y)), 0.0
    assert float(before.abs().max()) <= on.room(0.3 * math.sqrt(2)) * math.sqrt(2)
    for _, image, label in extreme_records():
        for scale in (1.0, 1e6):
            more = Given(torch.cat((x, image.unsqueeze(0) * scale)), torch.cat((y, torch.tensor([label]))))
            moved = float((vector(more) - before).norm())
            assert moved <= math.sqrt(2) * (1 + 1e-12)
            furthest = max(furthest, moved)
    assert furthest > (1.0 if most > 100 else 0.1)


def test_a_grid_without_room_for_moments_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set secagg.ring=ring64") as found:
        moments.ReleaseGrid(2.0**-12, 1e5).room(1.0)
    assert found.value.code == "E-PRIV-20"
    with pytest.raises(ConfigError, match=r"noise can reach .* but the grid ends at 5"):
        moments.ReleaseGrid(2.0**-26, 5.0).room(1.0)


# ---- runs ------------------------------------------------------------------------------------------------------------

WORDS = (
    "secagg=off",
    "method=analytic",
    "data=digits",
    "federation=hospitals6",
    "model=random_features",
    "model.kind=cosine",
    "model.width=96",
    "threads=1",
    "rounds=1",
    "method.release=noisy",
    "privacy=dp_record",
    "privacy.rng=test",
    "privacy.test_data=public",
    "privacy.reserve_rounds=0",
)


def shared_out(made: RunManifest, terms: Secagg | None = Secagg(1), **more: object) -> RunManifest:  # noqa: B008
    options = {**made.privacy.options, "placement": "distributed", **more}
    return replace(made, secagg=terms, privacy=NamedOptions(made.privacy.name, options))  # type: ignore[arg-type]


def local_run(*words: str) -> RunManifest:
    return manifest_from(compose_spec([*WORDS, *words]), SIX, [290.0] * 6)


def hospital_level(**terms: object) -> RunManifest:
    made = manifest("fedavg", {}, rounds=3)
    members = tuple(replace(m, units=n) for m, n in zip(made.members, (14, 7, 10), strict=True))
    options = {"rng": "test", "allow_large": True, "test_data": "public", "reserve_rounds": 0, **terms}
    return replace(made, members=members, privacy=NamedOptions("dp_silo_small", options))  # type: ignore[arg-type]


def test_manifests_of_runs_with_local_noise_do_not_name_it() -> None:
    assert "placement" not in local_run().privacy.options
    shared = compose_spec([*WORDS, "privacy.placement=distributed"])
    assert shared.privacy["placement"] == "distributed"


@pytest.mark.parametrize("made", [local_run, hospital_level])
def test_without_masks_it_is_refused_with_the_remedy(made) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"set secagg=auto.*or privacy.placement=local") as found:
        CompiledRun.of(shared_out(made(), None))
    assert found.value.code == "E-PRIV-16"


def test_a_method_that_trains_by_steps_keeps_its_noise_at_the_hospital() -> None:
    words = [word for word in WORDS if not word.startswith("method.")]
    made = manifest_from(compose_spec([*words, "method=fedavg", "rounds=2"]), SIX, [290.0] * 6)
    with pytest.raises(RefusedError, match=r"fedavg, which trains by steps.*Set privacy.placement=local") as found:
        CompiledRun.of(shared_out(made))
    assert found.value.code == "E-PRIV-16"


@pytest.mark.parametrize("words", [("privacy.min_count=5",), ("prototype_share=0.5",)])
def test_rows_that_a_silo_would_leave_out_with_their_noise_are_refused(words: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match=words[0].split("=")[0]) as found:
        CompiledRun.of(shared_out(local_run(*words)))
    assert found.value.code == "E-PRIV-16"


def test_a_hospital_whose_policy_leaves_noise_out_refuses_the_run() -> None:
    run = CompiledRun.of(shared_out(local_run()))
    with pytest.raises(RefusedError, match=r"prototypes.min_count.*distributed") as found:
        run.profile.data_factory(0, InMemoryReleaseLog(), DisclosureLimits(min_count=3.0))
    assert found.value.code == "E-POLICY-05"
    with pytest.raises(RefusedError, match="sends no sums over classes"):
        run.profile.require_submission(submits=False)
    run.profile.require_submission(submits=True)
    CompiledRun.of(local_run()).profile.require_submission(submits=False)


@cache
def digits() -> tuple[RunManifest, list[SiloShare]]:
    made, sets = build_simulation(compose_spec(WORDS))
    return made, [SiloShare(s.train, s.test) for s in sets]


def simulated(run: RunManifest, hidden: Mapping[int, frozenset[int]] | None = None) -> Mapping[str, Tensor]:
    compiled = CompiledRun.of(run)
    factories = [
        compiled.profile.data_factory(k, InMemoryReleaseLog(), DisclosureLimits((hidden or {}).get(k, frozenset())))
        for k in range(6)
    ]
    return simulate(compiled, digits()[1], RoundHistory(), data_factories=factories)["sums"]


@pytest.mark.integration
@pytest.mark.parametrize(("terms", "m"), [(Secagg(1), 4), (Secagg(1, min_sum=6), 6)])
def test_a_masked_run_of_one_release_has_the_noise_of_the_promise_and_lambda_follows(terms: Secagg, m: int) -> None:
    """Six noises of variance 2 z^2 / (m - c): twice one hospital's, or a fifth more where all six must be there."""
    made = digits()[0]
    z = CompiledRun.of(made).profile.releases(0)[0].mechanism.noise
    run = shared_out(made, terms)
    (release,) = CompiledRun.of(run).profile.releases(0)
    assert release.mechanism == Mechanism(z)
    assert release.shared == SharedNoise(6, m, 1)
    one, other = simulated(run), simulated(shared_out(replace(made, seed=made.seed + 1), terms))
    for sums in (one, other):
        assert float(sums["variance"]) == pytest.approx(6 / (m - 1) * 2 * z**2)
    local = simulated(made)
    assert float(local["variance"]) == pytest.approx(6 * 2 * z**2)


def test_a_hospital_that_hides_a_class_still_adds_its_noise_to_the_row() -> None:
    run, row = shared_out(digits()[0]), 9
    alone = {k: frozenset({row}) for k in range(6)}
    hidden = simulated(run, alone)["b"][row]
    std = math.sqrt(6 / 3 * 2) * CompiledRun.of(run).profile.releases(0)[0].mechanism.noise
    assert float(hidden.std()) == pytest.approx(std, rel=0.25)
    assert not bool(simulated(digits()[0], alone)["b"][row].any())


def test_three_epsilons_are_planned_and_reported() -> None:
    """What is charged is the promise; the other two follow from m, c and n."""
    compiled = CompiledRun.of(shared_out(digits()[0]))
    (release,) = compiled.profile.releases(0)
    z = release.mechanism.noise
    report = compiled.profile.report([[release]] * 6)
    first = preview(compiled)["silos"][0]
    assert report is not None
    for key, planned, noise in (
        ("epsilon", "epsilon", z),
        ("epsilon_all_honest", "epsilon_all_honest", z * math.sqrt(2)),
        ("epsilon_masks_broken", "epsilon_alone", z / math.sqrt(3)),
    ):
        assert report[key] == first[planned] == pytest.approx(epsilon_of([Mechanism(noise)], 1e-5))
    assert report["epsilon_all_honest"] < 8.0001 < report["epsilon_masks_broken"]  # type: ignore[operator]
    assert report["noise_shared"] == {
        "silos": 6,
        "smallest_sum": 4,
        "colluding": 1,
        "noise_alone": pytest.approx(z / math.sqrt(3)),
    }
    assert "distributed" in str(report["noise"])
    local = CompiledRun.of(digits()[0]).profile
    plain = local.report([local.releases(0)] * 6)
    assert plain is not None
    assert not {"epsilon_masks_broken", "epsilon_all_honest"} & set(plain)
    assert local.shared_figures(0) is None


def test_a_hospital_level_run_shares_out_the_noise_of_update_and_bit() -> None:
    adaptive = {"clipping": "adaptive", "bit_noise": 2.0}
    made = hospital_level(**adaptive)
    made = replace(made, layout={**made.layout, "clipping": PartSpec({"within": ()}, ())})
    run = CompiledRun.of(shared_out(made))
    releases = run.profile.releases(0)
    assert {r.purpose for r in releases if r.shared == SharedNoise(3, 3, 1)} == {"update", "clip bit"}
    figures = run.profile.shared_figures(0)
    assert figures is not None
    assert figures.all_honest < figures.promised <= 8 < figures.alone
    assert figures.alone == pytest.approx(epsilon_of([r.alone for r in releases if r.collection == HOSPITAL], 1e-5))
    history = RoundHistory()
    simulate(run, shares(), history)
    assert history.records[-1].included == tuple(sorted(NAMES))


def test_a_hospital_level_run_has_the_model_of_less_noise() -> None:
    """The same noise draws, shorter: what is left of them in the model is 1 / sqrt(m - c) of local noise."""
    whole, shared = hospital_level(clip=1e-3), shared_out(hospital_level(clip=1e-3))
    start = CompiledRun.of(whole).initial_state()["w"]

    def moved(run: RunManifest) -> float:
        final = simulate(CompiledRun.of(run), shares(), RoundHistory())["w"]
        return float(sum((final[name] - v).square().sum() for name, v in start.items())) ** 0.5

    whole = replace(whole, secagg=Secagg(1))
    assert moved(shared) == pytest.approx(moved(whole) / math.sqrt(2), rel=0.05)


# ---- what a hospital says of it --------------------------------------------------------------------------------------


def test_a_policy_accepts_shared_noise_only_where_it_says_from_how_much_of_its_own() -> None:
    run = CompiledRun.of(shared_out(local_run()))
    own = run.profile.releases(0)[0].alone.noise
    for floor in (math.inf, own * 1.001):
        with pytest.raises(RefusedError, match=r"placement=distributed.*min_noise_alone") as found:
            run.profile.check_part(0, Floors(min_noise_alone=floor), "record", 290)
        assert found.value.code == "E-POLICY-05"
    run.profile.check_part(0, Floors(min_noise_alone=own * 0.999), "record", 290)
    hospital = CompiledRun.of(shared_out(hospital_level()))
    with pytest.raises(RefusedError, match="E-POLICY-05"):
        hospital.profile.check_part(0, Floors(), "record", 14)
    hospital.profile.check_part(0, Floors(min_noise_alone=0.0), "record", 14)
    assert Policy.parse(b"").privacy.min_noise_alone == math.inf
    assert Policy.parse(b"[privacy]\nmin_noise_alone = 0.5\n").privacy.min_noise_alone == 0.5
    with pytest.raises(ConfigError, match="min_noise_alone"):
        Policy.parse(b"[privacy]\nmin_noise_alone = -1")


def test_the_question_to_a_hospital_names_all_three_epsilons() -> None:
    asked = request_of(CompiledRun.of(shared_out(local_run())), SIX[0], True)
    again = RunRequest.from_json(asked.to_json())
    assert again == asked
    (row,) = [r for r in asked.compare(Policy()) if r.what == "Noise on updates"]
    assert "epsilon 8.00 while at most 1 of the others colludes" in row.requested
    assert "if the masks fail" in row.requested
    assert row.policy == "its own"
    accepting = Policy(privacy=Floors(min_noise_alone=0.25))
    (row,) = [r for r in asked.compare(accepting) if r.what == "Noise on updates"]
    assert row.policy.startswith("at least 0.25 of this hospital's own, found 0.3")
    plain = request_of(CompiledRun.of(local_run()), SIX[0], True)
    assert "Noise on updates" not in [r.what for r in plain.compare(Policy())]
    older = json.loads(plain.to_json())
    del older["shared"]
    assert RunRequest.from_json(json.dumps(older)) == plain


def test_the_ledger_charges_the_promise_and_keeps_what_it_rests_on(tmp_path: Path) -> None:
    ledger = budgeted(tmp_path, epsilon=20.0)
    version = registration.version(datasets.load(DATA), "train")
    shared, z = SharedNoise(6, 4, 1), 4.0
    task = LedgerTask("run", "manifest", 0, "train", version)
    entry = ledger.reserve(COLLECTION, task, [PlannedRelease("moments", Mechanism(z), shared)])
    ledger.start(entry)
    plain = LedgerTask("other", "manifest 2", 0, "train", version)
    ledger.start(ledger.reserve(COLLECTION, plain, [PlannedRelease("moments", Mechanism(z))]))
    again = Ledger(ledger.chain.file)
    found = {id: planned for id, _, planned in again.entries(COLLECTION)}
    assert found[entry] == [PlannedRelease("moments", Mechanism(z), shared)]
    assert again.history(COLLECTION) == [Mechanism(z, 1.0, 2)]
    status = again.status(COLLECTION, prv=False)
    assert status.spent_rdp == pytest.approx(epsilon_of([Mechanism(z, 1.0, 2)], 1e-5))
    assert status.spent_alone == pytest.approx(epsilon_of([Mechanism(z), Mechanism(z / math.sqrt(3))], 1e-5))
    assert again.verify() > 0
    shown = collection_json(again, COLLECTION)
    assert shown["epsilon_masks_broken"] == status.spent_alone > shown["epsilon"]
    assert [("shared" in r) for e in shown["entries"] for r in e["releases"]] == [True, False]
    details = [json.loads(d) for _, _, state, d, _ in ledger.events() if state == "INTENT"]
    (kept,) = [d["shared"] for d in details if "shared" in d]
    assert kept == {
        "moments": {
            "silos": 6,
            "smallest_sum": 4,
            "colluding": 1,
            "noise_alone": pytest.approx(z / math.sqrt(3)),
            "noise_of_all": pytest.approx(z * math.sqrt(2)),
        }
    }
    assert len(details) == 2
