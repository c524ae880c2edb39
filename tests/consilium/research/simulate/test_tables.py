"""`coordinator simulate` and a run's manifest on tables, and a run's window for DICOM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from consilium.research.commands import simulate
from coordinator.config.hydra_config import compose_from, compose_simulation
from coordinator.config.manifest_builder import manifest_from
from coordinator.config.run_spec import RunSpec
from fl_core import datasets
from fl_core.errors import ConfigError, DataError
from fl_core.rounds.manifest import RunManifest
from tests.support.data import SCHEMA, rows, write_table

pytestmark = pytest.mark.integration


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    return write_table(tmp_path, rows(400), roles='split = "split"\nrecord = "visit"')


def summary(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    simulate([*words, "data=table", "federation=iid-2", "threads=1"], as_json=True)
    return json.loads(capsys.readouterr().out)


def test_hospitals_with_tables_learn_what_their_rows_say(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"data.path={patients}", "rounds=4", "train.epochs=4", "train.lr=0.05", "method=fedavg")
    found = summary(capsys, *words)
    assert found["accuracy_by_round"][-1] > 0.85
    assert tuple(found["class_accuracy"]) == ("benign", "malignant")
    schema = patients.with_suffix(".toml")
    assert summary(capsys, *words, f"data.schema={schema}")["model_digest"] == found["model_digest"]
    (patients.parent / "other.toml").write_text(schema.read_text().replace("max = 120", "max = 100"))
    with pytest.raises(ConfigError, match=r"'age' has max 100.0 in the run and 120.0 here"):
        summary(capsys, *words, f"data.schema={patients.parent / 'other.toml'}")


def test_tables_are_trained_on_with_record_level_privacy(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summary(capsys, f"data.path={patients}", "rounds=1", "privacy=dp_record", "privacy.epsilon=8")
    assert found["privacy"]


def test_columns_travel_in_the_manifest_and_no_path_does(patients: Path) -> None:
    spec = compose_simulation(["data=table", f"data.schema={patients.with_suffix('.toml')}"])
    manifest = manifest_from(spec, ["north", "south"])
    assert [column.name for column in manifest.schema.columns] == ["age", "marker", "sex", "smoker"]
    assert manifest.schema.shape == (6,)
    assert manifest.schema.classes == ("benign", "malignant")
    assert str(patients.parent) not in manifest.to_json() + spec.to_json()
    assert RunManifest.from_json(manifest.to_json()) == manifest
    again = compose_from(RunSpec.from_json(spec.to_json()), ["rounds=3"])
    assert manifest_from(again, ["north", "south"]).schema == manifest.schema


def test_a_run_on_tables_needs_a_schema_that_holds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.schema=FILE"):
        manifest_from(compose_simulation(["data=table", "data.classes=[a,b]"]), ["north"])
    with pytest.raises(DataError, match="expected the schema of a table"):
        compose_simulation(["data=table", f"data.schema={tmp_path / 'gone.toml'}"])
    (tmp_path / "bad.toml").write_text(SCHEMA.replace("{roles}", "").replace("max = 120", "max = -1"))
    with pytest.raises(DataError, match="min below max"):
        compose_simulation(["data=table", f"data.schema={tmp_path / 'bad.toml'}"])


def test_a_window_is_part_of_the_manifest_and_absent_where_there_is_none() -> None:
    words = ["data=folder", "data.classes=[a,b]", "model=simple_cnn", "data.image_size=32"]
    plain = manifest_from(compose_simulation(words), ["north"])
    window = manifest_from(compose_simulation([*words, "data.window=[40,400]"]), ["north"])
    assert window.schema.window == (40.0, 400.0)
    assert '"window"' not in plain.to_json()
    assert '"columns"' not in plain.to_json()
    assert RunManifest.from_json(window.to_json()) == window
    assert replace(window, schema=replace(window.schema, window=None)).digest() == plain.digest()
    for wrong in ("[40]", "[40,0]", "[nan,400]", "[40,1e30]", "wide", "[a,b]"):
        with pytest.raises(ConfigError):
            manifest_from(compose_simulation([*words, f"data.window={wrong}"]), ["north"])
    with pytest.raises(ConfigError, match="for DICOM"):
        datasets.schema_of("digits", datasets.DataRequest(window=(40, 400)))
