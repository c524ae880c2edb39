"""A simulation of no rounds measures the model that it is given, as the hospitals' runs do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_simulation
from fl_core.errors import ConfigError

SMALL = ["data=digits", "model=digits_linear", "federation=p5c2", "train.epochs=1", "threads=1"]


def test_the_model_of_a_simulation_is_measured_again_and_nothing_is_trained(tmp_path: Path) -> None:
    first = runner.run(compose_simulation([*SMALL, "rounds=1"]))
    file = tmp_path / "model.safetensors"
    classes = json.dumps({"classes": list(first.manifest.schema.classes)})
    save_file(dict(first.server["w"]), file, metadata={"consilium": classes})
    again = runner.run(compose_simulation([*SMALL, "rounds=0", f"model.weights={file}"]))
    assert len(again.records) == 1
    last, measured = first.records[-1], again.records[0]
    assert (measured.correct, measured.examples) == (last.correct, last.examples)
    assert measured.clinical == last.clinical
    assert again.model_digest == first.model_digest


def test_without_a_model_there_is_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*rounds=0 only evaluates a complete model"):
        runner.run(compose_simulation([*SMALL, "rounds=0"]))
