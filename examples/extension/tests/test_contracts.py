"""The contracts of Consilium, held to this package."""

from pathlib import Path

import numpy as np
import pytest

from consilium import simulate
from consilium.testing import check_data, check_method, check_model, check_partition
from consilium_example.data import BloodMnist
from consilium_example.method import Smoothed
from consilium_example.model import TwoLayers
from consilium_example.partition import Uneven


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file in MedMNIST's layout."""
    draw = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 64), ("test", 16)):
        arrays[f"{split}_images"] = draw.integers(0, 256, (n, 28, 28, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(n, dtype=np.uint8)[:, None] % 8
    np.savez(tmp_path / "bloodmnist.npz", **arrays)
    return tmp_path


def test_the_method_keeps_its_contract() -> None:
    check_method(Smoothed, smoothing=0.2)


def test_without_smoothing_it_is_fedavg_bit_for_bit() -> None:
    words = {"data": "digits", "federation": "p5c2", "rounds": 1, "train": {"max_steps": 2}}
    assert simulate(Smoothed(smoothing=0.0), **words).digest == simulate("fedavg", **words).digest


def test_the_model_keeps_its_contract() -> None:
    check_model(TwoLayers, (3, 28, 28), 8, hidden=16)


def test_the_data_keep_their_contract(folder: Path) -> None:
    check_data(BloodMnist, folder)


def test_the_partition_keeps_its_contract() -> None:
    check_partition(Uneven, silos=5, ratio=0.7)


def test_all_four_go_together(folder: Path) -> None:
    result = simulate(
        Smoothed(), BloodMnist, Uneven(silos=2), TwoLayers(hidden=8), rounds=1, train={"epochs": 1}, data_root=folder
    )
    assert result.tables["silos"].query("split == 'train'").examples.sum() == 64
