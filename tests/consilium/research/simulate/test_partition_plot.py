"""`coordinator data split`: the table of silos by classes, from data or published counts, and its picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from consilium.research.commands import split
from consilium.research.simulate import partition_plot
from consilium.research.simulate.runner import silo_names
from coordinator.config.hydra_config import compose_simulation
from fl_core.datasets.partition import federations
from fl_core.errors import ConfigError


def test_digits_are_counted_from_the_data() -> None:
    table = partition_plot.on_disk(compose_simulation(["data=digits", "federation=p5c2"]), None)
    assert table.silos == tuple(f"hospital{k}" for k in range(5))
    assert np.array(table.train).sum() + np.array(table.test).sum() == 1797
    assert [tuple(np.flatnonzero(row)) for row in table.train] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


@pytest.mark.parametrize("text", ["p10c3", "dirichlet-0.5-10", "iid-10", "label-2-10", "map-10"])
def test_the_order_of_the_data_does_not_change_sizes(text: str) -> None:
    """What lets published counts stand for the data; equal shares alone depend on the order, by chance."""
    sorted_ = np.repeat(np.arange(10), 50)
    mixed = np.random.default_rng(0).permutation(sorted_)

    def table(y: np.ndarray) -> list[list[int]]:
        shares = federations.parse_federation(text).partition(y, y, 10)
        counts = [np.bincount(y[s.train], minlength=10) for s in shares]
        held = [np.bincount(y[s.held_out], minlength=10) for s in shares]
        return [(np.array([row.sum()]) if "iid" in text else row).tolist() for row in counts + held]

    assert table(sorted_) == table(mixed)


def test_published_counts_of_the_papers() -> None:
    table = partition_plot.published(compose_simulation(["data=cifar10", "federation=p5c2"]))
    assert [sum(row) for row in table.train] == [10_000] * 5
    assert table.classes[:2] == ("airplane", "automobile")
    isic = partition_plot.published(compose_simulation(["data=isic2019", "federation=centers-3-4"]))
    assert [sum(row) for row in isic.train] == [1807, 655]
    big = partition_plot.published(compose_simulation(["data=cifar100", "federation=p100c10"]))
    assert {sum(n > 0 for n in row) for row in big.train} == {10}


@pytest.mark.parametrize("data", ["digits", "femnist", "spiral"])
def test_data_without_published_counts_is_refused(data: str) -> None:
    with pytest.raises(ConfigError, match="leave it out") as caught:
        partition_plot.published(compose_simulation([f"data={data}"]))
    assert caught.value.code == "E-CFG-23"


@pytest.mark.integration
def test_the_picture_shows_what_a_silo_lacks_as_white(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "split.png"
    split(["data=cifar10", "federation=p5c2"], None, published=True, plot=file, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["plot"] == str(file)
    assert len(said["train"]) == 5
    pixels = np.array(Image.open(file).convert("RGB"))
    assert pixels.shape[1] > 600
    white = (pixels == 255).all(2).mean()
    assert 0.5 < white < 0.95
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        split(["data=cifar10", "federation=p5c2"], None, published=True, plot=tmp_path / "x.pdf", as_json=True)


def test_the_table_names_silos_and_classes(capsys: pytest.CaptureFixture[str]) -> None:
    split(["data=svhn", "federation=p10c2"], None, published=True)
    out = capsys.readouterr().out
    assert "hospital9" in out
    assert "svhn p10c2" in out


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/data/north", "/data/St. Mary's"], ["north", "st-mary-s"]),
        (["north/images", "south/images"], ["north", "south"]),
        (["north/patients.csv", "south/patients.csv"], ["north", "south"]),
        (["a/x", "b/x", "b/y"], ["hospital0", "hospital1", "hospital2"]),
        (["A", "a"], ["hospital0", "hospital1"]),
        (["ä", "ö"], ["hospital0", "hospital1"]),
        ("/data/all", ["hospital0", "hospital1"]),
    ],
)
def test_silos_are_called_as_their_folders_where_these_tell_them_apart(paths: object, names: list[str]) -> None:
    spec = compose_simulation(["data=folder", "data.path=/data", "data.classes=[a,b]"])
    assert silo_names(replace(spec, data={**spec.data, "path": paths}), len(names)) == names
