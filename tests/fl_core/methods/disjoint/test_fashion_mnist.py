"""Analytic on all 60,000 images of Fashion-MNIST: one round, and one model whatever the partition.

The images are those of Debian's package dataset-fashion-mnist, or of CONSILIUM_TEST_DATA/FashionMNIST/raw.
"""

from __future__ import annotations

import gzip
import shutil
import time
from pathlib import Path

import pytest

from consilium import Simulation, simulate
from consilium.research.simulate.engine import SimulationEngine
from tests.support.data import real_data

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
PARTITIONS = ("p5c2", "p10c2", "dirichlet-0.1-10", "iid-5")
TWO_MINUTES_OF_TWO_CORES = 240.0


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """Give a data root with the published files, or skip."""
    if (raw := real_data("FashionMNIST/raw")) is not None:
        return raw.parents[1]
    packed = sorted(DEBIAN.glob("*-ubyte.gz"))
    if not packed:
        pytest.skip("no Fashion-MNIST: apt-get install dataset-fashion-mnist, or set CONSILIUM_TEST_DATA")
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in packed:
        with gzip.open(file) as source, (raw / file.stem).open("wb") as target:
            shutil.copyfileobj(source, target)
    return tmp_path


def solved(root: Path, federation: str) -> Simulation:
    return simulate(
        "analytic",
        "fmnist",
        federation,
        "random_features",
        data_root=root,
        engine=SimulationEngine(workers=1),
        rounds=1,
        seed=0,
        threads=1,
        model__kind="cosine",
        model__width=2048,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_round_on_all_of_fashion_mnist_is_one_model_for_every_partition(fashion: Path) -> None:
    start = time.process_time()
    first = solved(fashion, PARTITIONS[0])
    assert time.process_time() - start < TWO_MINUTES_OF_TWO_CORES
    assert first.manifest.rounds == 1
    silos = first.tables["silos"]
    assert silos[silos.split == "train"].examples.sum() == 60_000
    assert first.summary["global_accuracy"] >= 0.85
    assert {solved(fashion, name).digest for name in PARTITIONS[1:]} == {first.digest}
