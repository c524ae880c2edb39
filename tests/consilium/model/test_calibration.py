"""Distances against the formula; a calibration on real digits; its file, and files that lie."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor

from consilium.model import calibration
from consilium.model.calibration import Calibration, CalibrationRequest, calibrate
from consilium.model.distances import ClassDistances
from fl_core.errors import ConfigError, DataError, FederationError, StateError
from fl_core.training.clinical import clinical_counts, clinical_metrics
from fl_core.types.values import Part

pytestmark = pytest.mark.integration


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- distances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(60, 5), (20, 40), (300, 64)])
def test_distances_are_those_of_the_formula(n: int, d: int) -> None:
    v, y = torch.randn(n, d, generator=drawn(n), dtype=torch.float64), torch.arange(n) % 3
    found = ClassDistances.of(v, y, 4)
    means = torch.stack([v[y == c].mean(0) for c in range(3)])
    rest = v - means[y]
    covariance = rest.T @ rest / n
    ridge = 0.1 * float(torch.trace(covariance)) / d
    inverse = torch.linalg.inv(covariance + ridge * torch.eye(d, dtype=torch.float64))
    new = torch.randn(7, d, generator=drawn(1), dtype=torch.float64)
    wanted = [min(float((u - m) @ inverse @ (u - m)) for m in means) for u in new]
    assert found.squared(new).tolist() == pytest.approx(wanted, rel=1e-9)
    assert found.known.tolist() == [True, True, True, False]


def test_a_class_of_two_examples_has_no_mean() -> None:
    v, y = torch.randn(12, 3, generator=drawn(0)), torch.tensor([0] * 10 + [1] * 2)
    found = ClassDistances.of(v, y, 2)
    assert found.known.tolist() == [True, False]
    assert float(found.squared(v[10:11])) > 0


# ---- real digits -----------------------------------------------------------------------------------------------------


WIDTH = 1000


class Digits:
    """A head in closed form on random features of digits, trained on 600 of them without one digit."""

    def __init__(self, left_out: int | None = None) -> None:
        found = load_digits()
        x, y = torch.tensor(found.data / 16), torch.tensor(found.target)
        order = torch.randperm(len(x), generator=drawn(0))
        x, y = x[order], y[order]
        weights = torch.randn(64, WIDTH, generator=drawn(1), dtype=torch.float64)
        z = torch.cos(0.3 * x @ weights + 6.3 * torch.rand(WIDTH, generator=drawn(2), dtype=torch.float64))
        known = y != (-1 if left_out is None else left_out)
        place = torch.cumsum(torch.tensor([c != left_out for c in range(10)]), 0) - 1
        self.classes = tuple(str(c) for c in range(10) if c != left_out)
        train = known & (torch.arange(len(y)) < 600)
        a = z[train]
        target = torch.nn.functional.one_hot(place[y[train]], len(self.classes)).double()
        self._head = torch.linalg.solve(a.T @ a + torch.eye(WIDTH), a.T @ target)
        rest = known & ~train
        self.z, self.y, self.unknown = z[rest], place[y[rest]], z[~known]

    def answers(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return z @ self._head, z

    def calibrated(self, index: Tensor, data: str, **how: float) -> Calibration:
        logits, features = self.answers(self.z[index])
        return calibrate(CalibrationRequest("m" * 64, data, self.classes, **how), logits, features, self.y[index])


def test_on_held_out_digits_nine_sets_in_ten_hold_the_class_and_one_known_digit_in_ten_is_flagged() -> None:
    """The mean over 60 divisions of 1,197 digits, half to calibrate with."""
    digits = Digits()
    covered, flagged, by_class = [], [], torch.zeros(10, dtype=torch.float64)
    for k in range(60):
        order = torch.randperm(len(digits.y), generator=drawn(100 + k))
        half = len(order) // 2
        found = digits.calibrated(order[:half], str(k))
        logits, features = digits.answers(digits.z[order[half:]])
        y = digits.y[order[half:]]
        p = torch.softmax(logits / found.facts.temperature, 1)
        inside = found.sets(p).gather(1, y.unsqueeze(1)).squeeze(1).double()
        covered.append(float(inside.mean()))
        by_class += torch.stack([inside[y == c].mean() for c in range(10)]) / 60
        flagged.append(float((found.score(features, logits) > found.facts.threshold).double().mean()))
    assert np.mean(covered) == pytest.approx(0.9, abs=0.02)
    assert np.mean(flagged) == pytest.approx(0.1, abs=0.02)
    assert float(by_class.min()) > 0.75


def test_a_digit_that_nobody_taught_is_flagged_in_most_cases() -> None:
    """Each digit in turn, at one false flag in ten."""
    shares = []
    for left_out in range(10):
        digits = Digits(left_out)
        order = torch.randperm(len(digits.y), generator=drawn(left_out))
        found = digits.calibrated(order[: len(order) // 2], "d")
        logits, features = digits.answers(digits.unknown)
        shares.append(float((found.score(features, logits) > found.facts.threshold).double().mean()))
    assert np.mean(shares) > 0.85
    assert min(shares) > 0.7


def test_calibration_explains_most_of_an_expected_calibration_error_of_a_head_in_closed_form() -> None:
    """Scores near 0 and 1 are no log-odds: at temperature 1 each probability is near 1 / C, whatever is right."""
    digits = Digits()
    order = torch.randperm(len(digits.y), generator=drawn(5))
    found = digits.calibrated(order[:600], "d")
    logits, y = digits.answers(digits.z[order[600:]])[0], digits.y[order[600:]]

    def error(temperature: float) -> float:
        counts = clinical_counts(logits / temperature, y, 10)
        measured = clinical_metrics(Part(counts, counts["confusion"].sum()))
        assert measured is not None
        return float(measured.calibration_error or 0)

    assert error(1.0) > 0.6
    assert error(found.facts.temperature) < 0.05


def test_the_same_data_give_the_same_calibration_and_each_image_has_one_part() -> None:
    digits, index = Digits(), torch.arange(300)
    one, other = digits.calibrated(index, "d"), digits.calibrated(index, "d")
    assert asdict(one.facts) == asdict(other.facts)
    assert sum(one.facts.fitted) + sum(one.facts.held) == 300
    assert digits.calibrated(index, "another").facts.threshold != one.facts.threshold


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "how"), [(0, {}), (29, {}), (100, {"coverage": 0.99}), (40, {"false_flags": 0.01})], ids=str
)
def test_too_few_examples_for_what_is_asked_are_refused_with_how_many_it_takes(n: int, how: dict[str, float]) -> None:
    with pytest.raises(DataError, match="E-DATA-08: expected at least"):
        Digits().calibrated(torch.arange(n), "d", **how)


@pytest.mark.parametrize(
    "how", [{"coverage": 1.0}, {"coverage": 0.1}, {"false_flags": 0.0}, {"coverage": float("nan")}]
)
def test_a_share_that_nobody_can_keep_is_refused(how: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="E-CFG-02"):
        Digits().calibrated(torch.arange(100), "d", **how)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_model_that_answers_no_numbers_is_not_calibrated(number: float) -> None:
    digits = Digits()
    logits, features = digits.answers(digits.z[:100])
    logits[3, 2] = number
    with pytest.raises(DataError, match="NaN or infinity"):
        calibrate(CalibrationRequest("m" * 64, "d", digits.classes), logits, features, digits.y[:100])


@pytest.fixture(scope="module")
def sound() -> Calibration:
    return Digits().calibrated(torch.arange(300), "d")


@pytest.fixture
def file(sound: Calibration, tmp_path: Path) -> Path:
    place = calibration.calibration_path(tmp_path / "r1.safetensors")
    assert place.name == "r1.calibration.safetensors"
    place.write_bytes(calibration.to_bytes(sound))
    return place


@pytest.mark.parametrize(
    "changes",
    [{"threshold": None}, {"false_flags": None}, {"multi_label": True}, {"threshold": None, "false_flags": None}],
)
def test_flags_are_of_models_that_choose_a_class_and_of_no_other(
    sound: Calibration, changes: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="E-CFG-02: the calibration needs both false_flags"):
        replace(sound.facts, **changes)  # type: ignore[arg-type]


def test_a_model_of_several_labels_that_answers_no_numbers_is_not_calibrated() -> None:
    with pytest.raises(DataError, match="NaN or infinity"):
        calibration.calibrate_labels(
            CalibrationRequest("m" * 64, "d", "ab"), torch.full((99, 2), float("nan")), torch.ones(99, 2).long()
        )


def test_a_file_is_the_calibration_again(sound: Calibration, file: Path) -> None:
    found = calibration.read(file, "m" * 64, sound.facts.classes)
    assert found.facts == sound.facts
    logits, features = Digits().answers(Digits().z[:20])
    assert torch.allclose(found.score(features, logits), sound.score(features, logits), rtol=1e-12)


@pytest.mark.parametrize(("model", "classes"), [("n" * 64, None), ("m" * 64, tuple("9876543210"))])
def test_a_calibration_of_another_model_is_refused(
    sound: Calibration, file: Path, model: str, classes: tuple[str, ...] | None
) -> None:
    with pytest.raises(StateError, match=r"E-STATE-22: expected a calibration of this model"):
        calibration.read(file, model, classes or sound.facts.classes)


FACTS = [
    {"threshold": float("nan")},
    {"threshold": float("inf")},
    {"temperature": 0.0},
    {"temperature": float("inf")},
    {"quantiles": (2.0,) * 10},
    {"quantiles": (0.5,) * 9},
    {"held": (-1,) * 10},
    {"coverage": 1.5},
    {"format": 2},
]


@pytest.mark.parametrize("lie", FACTS, ids=str)
def test_facts_that_no_calibration_has_are_refused(sound: Calibration, file: Path, lie: dict[str, object]) -> None:
    facts = asdict(sound.facts) | lie
    save_file(load_file(file), file, {"consilium": json.dumps(facts)})
    with pytest.raises(FederationError, match=r"E-(STATE-22|CFG-02)"):
        calibration.read(file, "m" * 64, sound.facts.classes)
    with pytest.raises(ConfigError):
        replace(sound.facts, **lie)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("features.means", torch.full((10, WIDTH), torch.nan, dtype=torch.float64)),
        ("features.means", torch.zeros(9, WIDTH, dtype=torch.float64)),
        ("features.known", torch.zeros(10, dtype=torch.float64)),
        ("features.weights", torch.full((100,), 2.0, dtype=torch.float64)),
        ("logits.ridge", torch.tensor(0.0, dtype=torch.float64)),
        ("logits.ridge", torch.tensor(-1.0, dtype=torch.float64)),
        ("logits.means", torch.zeros(10, 10)),
    ],
)
def test_tensors_that_no_calibration_has_are_refused(sound: Calibration, file: Path, name: str, value: Tensor) -> None:
    tensors = load_file(file)
    save_file({**tensors, name: value}, file, {"consilium": json.dumps(asdict(sound.facts))})
    with pytest.raises(StateError, match="E-STATE-22"):
        calibration.read(file, "m" * 64, sound.facts.classes)
