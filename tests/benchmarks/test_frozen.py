"""The benchmark on frozen features: who validates is drawn by lesion, and its table is what the store makes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from benchmarks import run_store
from benchmarks.comparison import settings, study
from benchmarks.frozen import bodies, isic, limits, pilots, whole
from benchmarks.frozen import run as frozen
from fl_core import datasets, rng
from fl_core.errors import DataError
from tests.support.data import isic_row, write_csv, write_isic

pytestmark = pytest.mark.integration


@pytest.fixture
def features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Features that tell the classes apart, of two images of each lesion at one of four centres, by two bodies."""
    drawn, n = np.random.default_rng(0), 240
    lesion = np.arange(n) // 2
    y = lesion % 8
    z = drawn.normal(size=(n, isic.WIDTH)).astype(np.float32) / 4
    for part in range(16):
        z[np.arange(n), 8 * part + y] += 2
    made = {"z": z, "y": y, "center": np.array([1, 2, 3, 5])[lesion % 4], "lesion": lesion.astype(np.str_)}
    np.savez(tmp_path / "one.npz", **made)
    np.savez(tmp_path / "other.npz", **{**made, "z": -z})
    monkeypatch.setenv(isic.FEATURES, "")
    isic.use([tmp_path / "one.npz", tmp_path / "other.npz"])
    isic.read.cache_clear()
    yield made
    isic.read.cache_clear()


def test_no_lesion_trains_and_validates_and_each_image_is_at_its_centre(features: dict[str, np.ndarray]) -> None:
    nobody = torch.zeros(0)
    shares = isic.Centers().partition(nobody, nobody, 8, 0)
    train, test = (np.concatenate([share[half] for share in shares]) for half in (0, 1))
    assert sorted([*train, *test]) == list(range(240))
    assert not set(features["lesion"][train]) & set(features["lesion"][test])
    assert [set(features["center"][share[0]]) for share in shares] == [{1}, {2}, {3}, {5}]
    assert len(test) == 48
    ((own, everybodys),) = isic.Centers(1, only=3).partition(nobody, nobody, 8, 0)
    assert (list(own), sorted(everybodys)) == (list(shares[2][0]), sorted(test))
    ((all_, tested),) = isic.Centers(1, only=isic.POOLED).partition(nobody, nobody, 8, 0)
    assert (sorted(all_), sorted(tested)) == (sorted(train), sorted(test))
    other = isic.Centers().partition(nobody, nobody, 8, 1)
    assert list(other[0][0]) != list(shares[0][0])


def test_two_bodies_stand_side_by_side_for_the_same_images_alone(
    features: dict[str, np.ndarray], tmp_path: Path
) -> None:
    ((one, y), _), ((both, _), _) = isic.Features().read(None), isic.Both().read(None)
    ((second, _), _) = isic.Second().read(None)
    assert np.array_equal(one, features["z"])
    assert np.array_equal(second, -features["z"])
    assert np.array_equal(both, np.concatenate((features["z"], -features["z"]), axis=1))
    assert np.array_equal(y, features["y"])
    np.savez(tmp_path / "other.npz", **{**features, "lesion": features["lesion"][::-1]})
    isic.read.cache_clear()
    with pytest.raises(DataError, match="E-DATA-02"):
        isic.read()


def test_the_whole_network_has_the_split_that_frozen_features_have(tmp_path: Path) -> None:
    """The draw of `Centers`, over lesions as they stand in the folder, and FLamby's own split left behind."""
    names = [f"ISIC_{k:07}" for k in range(60)]
    rows = [
        isic_row(name, k % 8, (1, 3)[k % 4 // 2], ("test", "train")[k % 16 not in (0, 6)])
        for k, name in enumerate(names)
    ]
    folder = write_isic(tmp_path / "given", rows)
    lesions = [f"L{k // 2}" for k in range(60)]
    write_csv(folder / "groups.csv", ("image", "lesion_id"), list(zip(names, lesions, strict=True)))
    assert whole.split(tmp_path / "given", tmp_path / "made", seed=3) == [1, 3]
    held = set(np.asarray(lesions)[isic.validation(np.asarray(lesions), 3)])
    assert len(held) == 6
    for center in (1, 3):
        data = datasets.load(f"isic2019/center{center}", data_root=tmp_path / "made")
        assert set(data.test.groups or ()) <= held
        assert not set(data.train.groups or ()) & held
        assert len(data.train) + len(data.test) == 30


@pytest.mark.usefixtures("features")
def test_a_run_in_closed_form_learns_and_its_cost_counts_its_exchanges_alone() -> None:
    asked = settings.load(frozen.NAME, frozen.FOLDER)
    method = "analytic, ridge, balanced"
    (trial,) = study.trials(method, (*asked.words, *asked.methods[method][0]), [0.02], [0], None)
    run = study.measure(trial)
    assert study.mean_of_last(run, "balanced") > 0.9
    assert study.mean_of_last(run, "auc") > 0.9
    cost = frozen.measure_cost(frozen.Cost(trial))
    width = isic.WIDTH + 1
    assert cost["rounds"] == 2
    numbers = width * (width + 1) // 2 + 8 * width + 8 + 1  # A, B, weights
    assert numbers < cost["bytes_up"] / (2 * 8) < numbers + 3000  # the rest is what the evaluation counts


def test_lambda_of_two_bodies_is_chosen_without_a_look_at_test_images(
    features: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "SEEDS", range(2))
    choices = [bodies.Choice("both", seed) for seed in bodies.SEEDS]
    scores = {choice.key: bodies.scored(choice) for choice in choices}
    tested = isic.validation(features["lesion"], 0)
    for file, sign in (("one.npz", 1), ("other.npz", -1)):
        z = sign * features["z"]
        z[tested] = 7.0
        np.savez(tmp_path / file, **{**features, "z": z})
    isic.read.cache_clear()
    assert bodies.scored(choices[0])["scores"] == scores[choices[0].key]["scores"]
    equal = {"scores": {f"lda {ridge:g}": 0.5 if ridge in (0.3, 3.0) else 0.25 for ridge in bodies.GRID}}
    assert bodies.chosen(equal, "lda") == 3.0


@pytest.mark.usefixtures("features")
def test_the_table_of_two_bodies_counts_the_runs_with_the_lambda_of_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SEEDS", range(2))
    choices = [bodies.Choice("Lite2, 224 pixels", seed) for seed in bodies.SEEDS]
    stored = {choice.key: bodies.scored(choice) for choice in choices}
    for choice, ridge in zip(choices, (0.01, 30.0), strict=True):
        scores = dict.fromkeys(stored[choice.key]["scores"], 0.0) | {f"ridge {ridge:g}": 1.0}
        stored[choice.key] = {**stored[choice.key], "scores": scores}
        run = study.measure(bodies.trial(choice.body, "ridge", choice.seed, ridge))
        assert run["balanced"][-1] > 0.9
        stored[run["key"]] = run
    assert [line for line in bodies.table(stored).splitlines() if "0.01 (1), 30 (1) | 2 |" in line]


@pytest.mark.parametrize("head", [limits.LINEAR, limits.HIDDEN])
def test_a_pooled_head_is_tuned_on_a_fifth_of_the_training_lesions_of_other_seeds(
    features: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    monkeypatch.setattr(limits, "GRIDS", {head: (1.0, 1e6)})
    monkeypatch.setattr(limits, "SEEDS", range(2))
    (row,) = [row for row in limits.ROWS if row.name == "ISIC 2019, Lite0"]
    tuned = {fit.key: limits.measure(fit) for fit in limits.tuning(row, head, None)}
    assert {run["seed"] for run in tuned.values()} == {100, 101}
    fits = limits.fits(row, head, tuned, None)
    assert [(fit.seed, fit.inner) for fit in fits] == [(0, False), (1, False)]
    runs = {fit.key: limits.measure(fit) for fit in fits}
    assert all(run["balanced"] > 0.9 for run in runs.values())
    monkeypatch.setattr(limits, "ROWS", (replace(row, heads=(head,)),))
    shown = limits.table({**tuned, **runs})
    (line,) = [line for line in shown.splitlines() if line.startswith("| ISIC 2019, Lite0 |")]
    assert f"| {100 * np.mean([run['balanced'] for run in runs.values()]):.1f} ± " in line
    (train, test), both = row.load(0, None), features["lesion"]
    assert set(train[2]) | set(test[2]) == set(both)
    assert not set(train[2]) & set(test[2])


def test_a_whole_network_on_pooled_digits_learns_and_is_measured_on_all_test_digits() -> None:
    (row,) = [row for row in limits.ROWS if row.name == "digits, pixels"]
    (train, test) = row.load(0, None)
    assert train[0].shape[1:] == test[0].shape[1:] == (1, 8, 8)
    assert len(train[0]) + len(test[0]) == 1797
    one, again = (limits.measure(limits.Fit(row, "digits_cnn", 0.03, 0, None, False)) for _ in range(2))
    assert one["ga"] == again["ga"] > 0.95
    assert one["steps"] == limits.EPOCHS * (len(train[0]) // limits.BATCH)


@pytest.mark.parametrize("made", [limits, bodies], ids=["limits", "bodies"])
def test_a_stored_table_is_what_the_store_makes(made: ModuleType) -> None:
    assert (made.FOLDER / made.TABLE).read_text() == made.table(run_store.read(made.FOLDER / made.STORE))


def test_pilots_solve_what_they_say() -> None:
    """Ridge as scikit-learn has it, and the minimum of a residual layer's loss, at which its gradient is 0."""
    drawn = torch.Generator().manual_seed(0)
    z, targets, W = (torch.randn(shape, generator=drawn) for shape in ((80, 5), (80, 3), (5, 3)))
    z, targets = z - z.mean(0), targets - targets.mean(0)
    for ridge, found in zip(pilots.LAMBDAS, pilots.solved(z, targets, torch.ones(80)), strict=True):
        wanted = Ridge(alpha=80 * ridge, fit_intercept=False).fit(z.numpy(), targets.numpy()).coef_.T
        assert np.allclose(found.numpy(), wanted, atol=1e-5)
    answers = torch.zeros(80, dtype=torch.long)
    deep = pilots.deeper((z, answers, z, answers), W, targets, 7, 0.01, 0)[0]
    F = torch.relu(z @ torch.randn(5, 7, generator=rng.stream(0, "residual")) / 5**0.5)
    M = torch.linalg.lstsq(F, deep - z).solution.requires_grad_()
    scale = 0.01 * 80 * float(torch.linalg.eigvalsh(W @ W.T)[-1])
    ((targets - z @ W - F @ M @ W).square().sum() + scale * M.square().sum()).backward()
    assert float(M.grad.abs().max()) < 1e-2
    assert float(M.detach().abs().max()) > 0.01


def test_the_table_is_what_the_store_makes(tmp_path: Path) -> None:
    for store in ("isic2019.jsonl", "costs.jsonl"):
        shutil.copy(frozen.FOLDER / store, tmp_path)
    text, kept = frozen.compare(-1, stored=True, folder=tmp_path), (frozen.FOLDER / "isic2019.md").read_text()
    assert [line for line in text.splitlines() if "CPU seconds a run" not in line] == [
        line for line in kept.splitlines() if "CPU seconds a run" not in line
    ]
