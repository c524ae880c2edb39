"""T-44: the audits flag what is not private, and do not flag what is; the one-run bound has the published numbers.

AU-4, AU-5 and AU-7 to AU-9; AU-1 to AU-4 of one step are in `test_audit_steps`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from consilium.audit import __main__ as program
from consilium.audit import attacks, canaries, plots, runner, step_checks
from consilium.audit.epsilon_bounds import auc, one_run, refuted, tail
from consilium.audit.runner import AuditSettings
from consilium.audit.step_checks import NoiseScale, SensitivityCheck
from consilium.audit.target import AuditTarget, ListedExamples
from consilium.audit.training import AuditTraining, memorising
from fl_core import datasets
from fl_core.errors import ConfigError
from privacy.mechanisms.noise.sources import SeededNoise

pytestmark = pytest.mark.integration

INF = math.inf
seeds = pytest.mark.parametrize("seed", range(5))


@pytest.fixture(scope="module")
def digits() -> AuditTarget:
    return AuditTarget.digits()


@pytest.mark.parametrize(("m", "ceiling"), [(100, 3.5), (200, 4.2), (500, 5.1), (1000, 5.8), (2000, 6.5)])
def test_ceiling_of_the_one_run_bound(m: int, ceiling: float) -> None:
    """Specification section 8: all m guesses right, alpha .05; in closed form the m-th root of alpha."""
    q = 0.05 ** (1 / m)
    assert refuted(0.0, m, m, m) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert refuted(1e-5, m, m, m) == pytest.approx(ceiling, abs=0.12)


def test_the_tail_is_the_binomials_and_delta_only_adds() -> None:
    """Against a sum over outcomes for r = 10, v = 8, eps = 1."""
    q = math.e / (1 + math.e)
    p = [math.comb(10, k) * q**k * (1 - q) ** (10 - k) for k in range(11)]
    assert tail(1.0, 0.0, 20, 10, 8) == pytest.approx(sum(p[8:]))
    extra = max(sum(p[8 - i : 8]) / i for i in range(1, 9))
    assert tail(1.0, 1e-3, 20, 10, 8) == pytest.approx(sum(p[8:]) + 2 * 20 * 1e-3 * extra)
    assert tail(1.0, 0.0, 20, 10, 0) == 1.0
    assert refuted(1e-5, 1000, 500, 250) == 0.0  # as good as tossing coins


def test_one_run_finds_what_there_is_and_nothing_where_there_is_nothing() -> None:
    draw = np.random.default_rng(0)
    present = draw.random(1000) < 0.5
    clear = one_run(present + 0.01 * draw.random(1000), present, 1e-5)
    assert clear.right == clear.guessed
    assert clear.epsilon > 4.5
    assert np.mean([one_run(draw.random(1000), present, 1e-5).epsilon > 0 for _ in range(40)]) <= 0.15


def gaussian_scores(
    z: float, n: int, m: int, steps: int, draw: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Draw the white-box scores without a model: hits of a Poisson sample and noise of z per step."""
    present = draw.random(m) < 0.5
    hits = draw.binomial(steps, 64 / n, m) * present
    return hits + z * math.sqrt(steps) * draw.standard_normal(m), present


@pytest.mark.parametrize(
    ("z", "mean", "most"), [(1.07, 1.81, 2.16), (1.66, 1.01, 1.24), (2.85, 0.48, 0.91), (5.23, 0.12, 0.34)]
)
def test_expected_values_of_the_white_box_audit(z: float, mean: float, most: float) -> None:
    """Specification section 8 (N = 2000, B = 64, T = 1550, m = 1000): epsilon 8, 4, 2 and 1."""
    draw = np.random.default_rng(1)
    found = [one_run(*gaussian_scores(z, 2000, 1000, 1550, draw), 1e-5).epsilon for _ in range(10)]
    assert float(np.mean(found)) == pytest.approx(mean, abs=0.25)
    assert max(found) < most + 0.4


def test_auc() -> None:
    assert auc([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert auc([0.0, 1.0], [0.0, 1.0]) == 0.5
    assert auc([0.0], [1.0]) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(900)
@seeds
def test_au_5_mislabelled_canaries(digits: AuditTarget, seed: int) -> None:
    """Training without privacy is flagged (eps_lb >= 2, m = 500); at epsilon 8 at most 8, at 1 at most 0.8."""
    plain = canaries.mislabelled(memorising(), digits, seed=seed)
    assert len(plain.present) == 500
    assert plain.guesses.epsilon >= 2.0
    assert plain.auc > 0.95
    for epsilon, most in ((8.0, 8.0), (1.0, 0.8)):
        found = [
            canaries.mislabelled(AuditTraining(epsilon), digits, seed=s, noise=SeededNoise(s, "au-5"))
            for s in (seed, seed + 1000)
        ]
        assert min(f.guesses.epsilon for f in found) <= most
        assert found[0].auc < 0.65


def test_au_5_training_without_privacy_is_flagged_by_fewer_canaries_sooner(digits: AuditTarget) -> None:
    """A hundred canaries among 300 images, 200 steps: what a small hospital can see."""
    few = replace(digits, x=digits.x[:300], y=digits.y[:300])
    found = canaries.mislabelled(memorising(200), few, canaries=100)
    assert found.auc > 0.9
    assert 1.0 < found.guesses.epsilon <= refuted(1e-5, 100, 100, 100)


@pytest.mark.slow
@seeds
def test_au_7_losses_tell_members_apart_without_privacy_alone(digits: AuditTarget, seed: int) -> None:
    plain = auc(*canaries.members(memorising(600), digits, seed))
    assert plain > 0.55
    for epsilon in (8.0, 1.0):
        private = auc(*canaries.members(AuditTraining(epsilon, steps=100), digits, seed, SeededNoise(seed, "au-7")))
        assert abs(private - 0.5) < 0.12  # four standard errors of 200 against 200; the mean over seeds is nearer


@pytest.mark.slow
@seeds
def test_au_8_an_update_shows_which_classes_a_hospital_has_and_a_sum_does_not(digits: AuditTarget, seed: int) -> None:
    plain = attacks.class_presence(AuditTraining(INF, steps=15, lr=0.1), digits, seed)
    assert plain.truth.sum(0).tolist() == [3] * 10  # each class at as many hospitals: a sum has nothing to say
    assert plain.update_auc > 0.98
    assert abs(plain.sum_auc - 0.5) <= 0.1
    private = attacks.class_presence(AuditTraining(8.0, steps=15), digits, seed, seed)
    assert private.update_auc > 0.7  # record-level privacy does not hide it
    assert abs(private.sum_auc - 0.5) <= 0.1


@pytest.mark.slow
@seeds
def test_au_9_prototypes_of_few_images_trace_them_and_noise_or_numbers_hide_them(
    digits: AuditTarget, seed: int
) -> None:
    cases = [(1, 0.0), (5, 0.0), (60, 0.0), (1, 8.0)]
    one, five, many, hidden = attacks.prototypes(digits, cases, seed=seed)
    assert one.tracing > 0.95
    assert one.tracing > five.tracing > many.tracing
    assert many.tracing < 0.75
    assert hidden.tracing < 0.75
    assert one.inversion > 3 * one.chance
    assert hidden.inversion < one.inversion


def test_au_8_and_au_9_in_brief(digits: AuditTarget) -> None:
    """The same attacks, shorter, without the inversion."""
    plain = attacks.class_presence(AuditTraining(INF, batch=32, steps=8, lr=0.1), digits)
    assert plain.update_auc > 0.95
    assert plain.sum_auc == pytest.approx(0.5)
    one, hidden = attacks.prototypes(
        digits, [(1, 0.0), (1, 8.0)], repeats=6, steps=0, extractor=AuditTraining(INF, steps=60, lr=0.05, momentum=0.9)
    )
    assert one.tracing > 0.95
    assert hidden.tracing < 0.75


@pytest.mark.slow
def test_the_audits_of_a_hospitals_own_data_ask_for_what_its_claim_implies_alone(tmp_path: Path) -> None:
    subject = AuditTarget.of(datasets.load("digits/hospital0"))
    setting = AuditSettings((8.0,), demanding=False, seeded=False, trials=20)
    for name, audit in runner.AUDITS.items():
        outcome = audit(subject, setting, tmp_path)
        assert (tmp_path / outcome.picture).read_bytes()[:4] == b"\x89PNG", name
        private = [v.holds for v in outcome.verdicts if "epsilon" in v.audit]
        others = [v.holds for v in outcome.verdicts if "epsilon" not in v.audit]
        assert all(private)
        assert set(others) <= ({True} if name == "hostile" else {None})
        json.dumps(outcome.json())


def test_a_subject_is_a_pool_of_a_hospitals_own_images() -> None:
    data = datasets.load("digits/hospital0")
    subject = AuditTarget.of(data)
    assert len(subject.y) == len(data.train) + len(data.test)
    assert subject.classes == [0, 1]
    assert subject.x.shape[1:] == data.schema.shape
    with pytest.raises(ConfigError, match="E-PRIV-29"):
        AuditTarget.of(
            replace(
                data,
                train=ListedExamples(subject.x[:40], subject.y[:40]),
                test=ListedExamples(subject.x[:9], subject.y[:9]),
            )
        )
    one = ListedExamples(subject.x[:200], torch.zeros(200, dtype=torch.long))
    with pytest.raises(ConfigError, match="two classes"):
        AuditTarget.of(replace(data, train=one, test=one))
    with pytest.raises(ConfigError, match="expected images"):
        AuditTarget.of(datasets.load("spiral/p5c2/0"))


def test_the_network_takes_the_shape_of_the_images(digits: AuditTarget) -> None:
    assert sum(p.numel() for p in digits.network(0).parameters()) == 85_258
    colour = replace(digits, schema=replace(digits.schema, shape=(3, 32, 32)))
    assert colour.network(0)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert all(
        torch.equal(a, b) for a, b in zip(digits.network(1).parameters(), digits.network(1).parameters(), strict=True)
    )


def test_a_refuted_claim_is_tried_at_three_seeds_and_a_quiet_one_once() -> None:
    asked: list[int] = []

    def one(training: AuditTraining, seed: int) -> canaries.CanaryResult:
        asked.append(seed)
        present = np.arange(200) < 100
        return canaries.CanaryResult(present + 0.0, present, one_run(present + 0.0, present, 1e-5), "given")

    assert runner._without_canaries(one, AuditTraining(1.0), 2, 0.8).guesses.epsilon > 0.8
    assert asked == [2, 1002, 2002]
    runner._without_canaries(one, AuditTraining(8.0), 5, 8.0)
    runner._without_canaries(one, AuditTraining(INF), 6, INF)
    assert asked[3:] == [5, 6]


def test_the_program_writes_its_report_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(program, "STEPS", {"per unit": program.STEPS["per unit"]})
    monkeypatch.setattr(step_checks, "sensitivity", partial(step_checks.sensitivity, trials=3))
    assert program.main(["step", "--runs", "100", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "audit.json").read_text())
    assert all(v["holds"] for v in report["step"]["verdicts"])
    assert set(report["step"]["mu"]) == {"per unit"}
    assert (tmp_path / "steps.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.count("passed ") == 10
    for wrong in (["nothing"], ["step", "--seeds", "0"], ["step", "--runs", "5"]):
        with pytest.raises(SystemExit) as end:
            program.main(wrong)
        assert end.value.code == 2


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    present = np.arange(20) < 10
    found = canaries.CanaryResult(present + 0.0, present, one_run(present + 0.0, present, 1e-5), "given")
    plots.bounds({"no privacy": [found], "epsilon 8": [found]}, {"epsilon 8": 8.0}, tmp_path / "bounds.png")
    plots.curves({"no privacy": (np.array([1.0, 2.0]), np.array([0.0, 1.5]))}, tmp_path / "curves.png")
    plots.tracing([[attacks.TracingResult(1, 0.0, 0.9, 0.2, 0.02)]] * 2, tmp_path / "tracing.png")
    plots.presence({"no privacy": [1.0, 0.9]}, {"no privacy": [0.5, 0.5]}, tmp_path / "presence.png")
    plots.steps(
        {"split": NoiseScale(1.0, 0.5)}, {"split": SensitivityCheck(1.0, 1.0)}, {"split": [0.9]}, tmp_path / "steps.png"
    )
    assert len(list(tmp_path.glob("*.png"))) == 5


def test_in_memory_examples() -> None:
    data = ListedExamples(torch.zeros(3, 2), torch.tensor([0, 1, 1]), ["a", "a", "b"])
    assert len(data) == 3
    assert data.batch(torch.tensor([2]))[1].tolist() == [1]
    assert data.groups == ("a", "a", "b")
