"""The audits flag what is not private, and do not flag what is; the one-run bound has the specification's numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fl_core.types import Coupling, Federation, Losses, TrainConfig, Turn
from privacy.audit import __main__ as program
from privacy.audit import attacks, canaries, plots
from privacy.audit.bounds import auc, mu_bound, one_run, refuted, tail
from privacy.audit.canaries import InMemory, Training
from privacy.course import Course, Rates, Spend
from privacy.entropy import SeededNoise
from privacy.example import PrivateData
from privacy.terms import Terms

INF = math.inf


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


@pytest.mark.parametrize(("z", "mean", "most"), [(1.07, 1.81, 2.16), (1.66, 1.01, 1.24), (2.85, 0.48, 0.91),
                                                 (5.23, 0.12, 0.34)])  # fmt: skip
def test_expected_values_of_the_white_box_audit(z: float, mean: float, most: float) -> None:
    """Specification section 8 (N = 2000, B = 64, T = 1550, m = 1000): epsilon 8, 4, 2 and 1."""
    draw = np.random.default_rng(1)
    found = [one_run(*gaussian_scores(z, 2000, 1000, 1550, draw), 1e-5).epsilon for _ in range(10)]
    assert float(np.mean(found)) == pytest.approx(mean, abs=0.25)
    assert max(found) < most + 0.4


def test_au_3_mu_audit_finds_a_factor_of_two_and_passes_correct_noise() -> None:
    draw = np.random.default_rng(2)
    n = 20_000
    for z, share in ((0.5, 0.95), (1.0, 0.94), (2.0, 0.87), (5.0, 0.76)):
        worlds = [(draw.normal(0, z, n), draw.normal(1, z, n)) for _ in range(6)]
        found = [mu_bound(*w) * z for w in worlds]
        assert float(np.mean(found)) == pytest.approx(share, abs=0.12)
        assert sorted(found)[2] <= 1.0  # false alarms are rare: re-run twice before failing
        halved = [mu_bound(draw.normal(0, z / 2, n), draw.normal(1, z / 2, n)) for _ in range(3)]
        assert min(halved) > 1 / z


def test_auc() -> None:
    assert auc([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert auc([0.0, 1.0], [0.0, 1.0]) == 0.5
    assert auc([0.0], [1.0]) == 0.0


class Halved(SeededNoise):
    """A bug: half of the noise that the plan asks for."""

    def gaussian(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        return super().gaussian(shape, std / 2)


class Missing(SeededNoise):
    """A bug: no noise."""

    def gaussian(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)


@pytest.mark.parametrize(("epsilon", "low", "high"), [(8.0, 0.0, 8.0), (1.0, 0.0, 0.8)])
def test_au_4_dirac_canaries_of_private_training(epsilon: float, low: float, high: float) -> None:
    """The real doors: at epsilon 8 at most 8, at 1 at most 0.8."""
    found = canaries.dirac(Training(epsilon, steps=120), seed=1, noise=SeededNoise(1, "au-4"))
    assert low <= found.guesses.epsilon <= high


def test_au_4_training_without_privacy_or_without_its_noise_is_flagged() -> None:
    assert canaries.dirac(Training(INF, steps=120)).guesses.epsilon >= 2.0
    missing = canaries.dirac(Training(1.0, steps=120), noise=Missing(2, "au-4"))
    assert missing.guesses.epsilon >= 2.0


def one_step(record: bool, z: float, noise: SeededNoise) -> float:
    """Take one full-batch step of a model with one parameter through the real doors; return the noisy sum."""
    config = TrainConfig(lr=1.0, momentum=0.0, weight_decay=0.0, batch_size=4, epochs=1)
    course = Course(Terms(test_data="public"), Rates(config, 4), 1, Coupling.EXAMPLE, (1,), 0, False)
    course.__dict__["noise"] = z
    data = InMemory(
        torch.full((4, 1), -canaries.PUSH * record) * torch.tensor([[1.0], [0], [0], [0]]), torch.zeros(4).long()
    )
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    turn = Turn(Federation(1, 1, 1, 0, 1), 0, 0)
    doors = PrivateData(data, data, config, turn, course, Spend(course.training(1)), noise)
    doors.sgd(model, lambda m, x, y: Losses(m(x).squeeze(1)), steps=1)
    return 4 * float(model.weight)


def mu_of(z: float, noise: SeededNoise, n: int) -> float:
    worlds = [np.array([one_step(record, z, noise) for _ in range(n)]) for record in (False, True)]
    return mu_bound(*worlds)


@pytest.mark.slow
def test_au_3_mu_audit_of_the_real_step() -> None:
    """One step of the real doors at z = 1: correct noise passes (re-run twice before failing), half of it is caught."""
    assert sorted(mu_of(1.0, SeededNoise(s, "au-3"), 600) for s in range(3))[0] <= 1.0
    assert mu_of(1.0, Halved(9, "au-3"), 600) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_au_5_mislabelled_canaries(seed: int) -> None:
    """Training without privacy is flagged (eps_lb >= 2, m = 500); at epsilon 8 at most 8, at 1 at most 0.8."""
    plain = canaries.mislabelled(Training(INF, steps=1500, lr=0.1, momentum=0.9), seed=seed)
    assert plain.guesses.epsilon >= 2.0
    assert auc(plain.scores[plain.present], plain.scores[~plain.present]) > 0.9
    for epsilon, most in ((8.0, 8.0), (1.0, 0.8)):
        found = canaries.mislabelled(Training(epsilon, steps=300, lr=0.2), seed=seed, noise=SeededNoise(seed, "au-5"))
        assert found.guesses.epsilon <= most
        assert auc(found.scores[found.present], found.scores[~found.present]) < 0.65


def test_au_7_losses_tell_members_apart_without_privacy_alone() -> None:
    plain = auc(*canaries.members(Training(INF, steps=400, lr=0.3), n=150))
    private = auc(*canaries.members(Training(2.0, steps=60, lr=0.3), n=150, noise=SeededNoise(0, "au-7")))
    assert plain > 0.55
    assert abs(private - 0.5) < 0.08


def test_au_8_an_update_shows_which_classes_a_hospital_has_and_a_masked_sum_does_not() -> None:
    plain = attacks.class_presence(Training(INF, steps=15), silos=6)
    assert plain.alone > 0.98
    assert plain.masked == 0.5
    private = attacks.class_presence(Training(8.0, steps=15, lr=0.3), silos=6)
    assert 0.6 < private.alone <= 1.0  # record-level privacy does not hide it


def test_au_9_prototypes_of_few_images_trace_them_and_noise_or_numbers_hide_them() -> None:
    one, hidden, many = attacks.prototypes([(1, 0.0), (1, 8.0), (60, 0.0)], repeats=10)
    assert one.tracing > 0.95
    assert hidden.tracing < 0.75
    assert many.tracing < 0.75
    assert one.inversion > 3 / attacks.CANDIDATES
    assert hidden.inversion <= one.inversion


def test_the_program_writes_its_report_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["presence", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [v["holds"] for v in report] == [True, True]
    assert (tmp_path / "class_presence.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.count("holds ") == 2
    with pytest.raises(SystemExit):
        program.main(["nothing"])


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    present = np.arange(20) < 10
    found = canaries.Found(present + 0.0, present, one_run(present + 0.0, present, 1e-5))
    plots.bounds({"no privacy": [found], "epsilon 8": [found]}, {"epsilon 8": 8.0}, tmp_path / "bounds.png")
    plots.curves({"no privacy": (np.array([1.0, 2.0]), np.array([0.0, 1.5]))}, tmp_path / "curves.png")
    plots.tracing([attacks.Tracing(1, 0.0, 0.9, 0.2)], 0.02, tmp_path / "tracing.png")
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_in_memory_examples() -> None:
    data = InMemory(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    assert len(data) == 3
    assert data.batch(torch.tensor([2]))[1].tolist() == [1]
