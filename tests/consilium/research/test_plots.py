"""Curves of runs as a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from consilium.research.plots import plot
from fl_core.errors import ConfigError
from tests.support.recorded_runs import detail, measured

RUNS = [detail("a", measured([0.1, 0.2, 0.3])), detail("b", measured([0.1, 0.4, 0.5]))]


def test_a_picture_is_drawn_for_each_kind_of_file(tmp_path: Path) -> None:
    assert plot(RUNS, (), tmp_path / "x.png") == ["accuracy", "balanced_accuracy"]
    with Image.open(tmp_path / "x.png") as image:
        image.verify()
    plot(RUNS, ["accuracy"], tmp_path / "x.svg")
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


def test_names_are_no_formulas_and_no_markup(tmp_path: Path) -> None:
    hostile = ["$\\frac{", "_hidden", "<script>&", "\x1b[2J\u202e", "x" * 5000]
    plot([detail(name, measured([0.1, 0.2])) for name in hostile], (), tmp_path / "x.svg")
    ElementTree.parse(tmp_path / "x.svg")


@pytest.mark.parametrize("name", ["x.pdf", "x", "missing/x.png", ".png"])
def test_another_kind_of_file_is_refused_before_anything_is_drawn(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*\.png or \.svg"):
        plot(RUNS, (), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_measure_that_no_run_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*found pa: choose from accuracy, balanced_accuracy"):
        plot(RUNS, ["pa"], tmp_path / "x.png")
    with pytest.raises(ConfigError, match="wait until a round is closed"):
        plot([detail("a", [])], (), tmp_path / "x.png")
