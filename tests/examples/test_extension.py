"""The template of a package with extensions: its own tests pass, and its entry points are where the pages say."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

from consilium import simulate
from consilium.testing import check_partition
from coordinator.config.hydra_config import compose_spec

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/extension"


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.mark.usefixtures("on_path")
def test_every_entry_point_composes_by_its_place() -> None:
    declared = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    places = {group.removeprefix("consilium."): next(iter(points.values())) for group, points in declared.items()}
    assert sorted(places) == ["data", "methods", "models", "partitions"]
    words = [f"method={places['methods']}", f"model={places['models']}", f"federation={places['partitions']}"]
    spec = compose_spec([*words, "method.smoothing=0.2", "federation.silos=3"])
    assert spec.method["smoothing"] == 0.2
    assert compose_spec([f"data={places['data']}"]).model["name"] == places["models"]


@pytest.mark.usefixtures("on_path")
def test_the_method_without_smoothing_is_fedavg_and_the_partition_keeps_its_contract() -> None:
    words = {"data": "digits", "federation": "p5c2", "rounds": 1, "train": {"max_steps": 1}}
    mine = simulate("consilium_example.method:Smoothed", method__smoothing=0.0, **words)
    assert mine.digest == simulate("fedavg", **words).digest
    found = importlib.import_module("consilium_example.partition").Uneven
    check_partition(found, silos=5, ratio=0.7)


@pytest.mark.slow
@pytest.mark.usefixtures("on_path")
def test_its_own_tests_pass() -> None:
    file = EXAMPLE / "tests/test_contracts.py"
    assert pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), str(file)]) == 0
    assert "consilium_example" in sys.modules
