"""Each model's YAML file states every option of its dataclass, with the dataclass's default."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from fl_core.models import MODELS

FOLDER = Path(__file__).parents[2] / "configs" / "model"


def test_every_model_has_a_file() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_fields_and_defaults_agree(name: str) -> None:
    config = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert config.pop("name") == name
    config["projection"] = tuple(config["projection"])
    assert config == {f.name: f.default for f in fields(MODELS[name])}
