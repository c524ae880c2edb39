"""Predictions are the evaluation's; what cannot be used is named, and stops nothing else."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from PIL import Image

from consilium.model import inputs, model_file
from consilium.model.inputs import Inputs
from consilium.model.model_file import LoadedModel, ModelFileFacts
from consilium.model.predictor import NO_NUMBERS, Predictor, calibrated, tally
from fl_core import datasets
from fl_core.datasets import DataRequest
from fl_core.datasets.image_loader import ImageLoader
from fl_core.errors import ConfigError, DataError, FederationError, SchemaError
from fl_core.training.local_data import eval_batch
from fl_core.types.columns import Column
from tests.support.exported import TAUGHT, Exported

pytestmark = pytest.mark.integration

LOADER = ImageLoader(cache_bytes=0)


@pytest.fixture(scope="module")
def model(made: Exported) -> LoadedModel:
    return model_file.load(made.model)


def test_probabilities_are_those_of_the_silos_evaluation(made: Exported, model: LoadedModel) -> None:
    """Of the hospital's own test images, which the silo reads by reference and `predict` as files."""
    data = datasets.load(made.hospital, DataRequest(TAUGHT, 8))
    network = made.result.run.classifier(made.result.server).eval()
    with torch.no_grad():
        wanted = torch.cat([torch.softmax(network(x), 1) for x, _ in data.test.batches(eval_batch((3, 8, 8)))])
    files = inputs.from_paths([made.images / "hospital/test"], model.facts, LOADER)
    found = {p.name: p.probabilities for p in Predictor(model).predictions(files)}
    assert sorted(found) == sorted(map(str, data.test.paths))
    apart = [torch.tensor(found[str(path)]) - p for path, p in zip(data.test.paths, wanted, strict=True)]
    assert float(torch.stack(apart).abs().max()) < 1e-6


def test_on_new_images_sets_and_flags_keep_what_the_calibration_promises(made: Exported, model: LoadedModel) -> None:
    calibration = calibrated(model, of_reference(made.hospital, "test", model), 0.9, 0.1)
    predictor = Predictor(model, calibration)
    counted = tally(predictor.predictions(of_reference(made.new, "all", model)), TAUGHT)
    n = counted.whole.examples
    assert n == sum(c.examples for c in counted.classes.values()) > 500
    assert counted.whole.covered / n == pytest.approx(0.9, abs=0.04)  # one draw of each: 3 standard deviations
    assert counted.whole.flagged / counted.whole.judged == pytest.approx(0.1, abs=0.04)
    unknown = predictor.predictions(inputs.from_paths([made.images / "unknown"], model.facts, LOADER))
    assert sum(bool(p.unknown) for p in unknown) / len(unknown) > 0.6
    assert {p.answer_text for p in unknown if p.unknown} == {"none of the classes"}


def of_reference(reference: str, split: str, model: LoadedModel) -> Inputs:
    return inputs.from_reference(reference, split, model.facts, None, LOADER)


def test_a_file_that_breaks_is_named_and_the_others_are_classified(
    made: Exported, model: LoadedModel, tmp_path: Path
) -> None:
    good = sorted((made.images / "new/3").iterdir())[:3]
    for file in good:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "a.png").write_bytes(good[0].read_bytes()[:60])
    (tmp_path / "b.dcm").write_bytes(b"no DICOM")
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("nobody's image")
    found = inputs.from_paths([tmp_path, good[0], tmp_path / "notes.txt"], model.facts, LOADER)
    predictions = {Path(p.name).name: p for p in Predictor(model).predictions(found)}
    problems = {name: p.problem for name, p in predictions.items() if p.problem}
    assert set(problems) == {"a.png", "b.dcm", "notes.txt"}
    assert "not an image in a supported format" in problems["b.dcm"]
    assert all(predictions[file.name].answer in TAUGHT for file in good)
    assert found.notes == ("1 other files were not read",)


def test_a_file_that_is_given_twice_is_classified_once(made: Exported, model: LoadedModel) -> None:
    folder = made.images / "new/3"
    found = inputs.from_paths([folder, *sorted(folder.iterdir())[:2]], model.facts, LOADER)
    assert len(found.names) == len(set(found.names)) == len(list(folder.iterdir()))


def test_answers_that_are_no_numbers_are_a_problem(model: LoadedModel, made: Exported) -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((len(x), 9), torch.nan)

    broken = LoadedModel(model.facts, model.sha256, torch.nn.Identity(), Broken())
    found = inputs.from_paths([sorted((made.images / "unknown").iterdir())[0]], model.facts, LOADER)
    assert [p.problem for p in Predictor(broken).predictions(found)] == [NO_NUMBERS]


@pytest.mark.parametrize("paths", [[], ["nowhere"], ["empty"]])
def test_inputs_that_hold_nothing_are_refused(model: LoadedModel, tmp_path: Path, paths: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="E-DATA-02"):
        inputs.from_paths([tmp_path / p for p in paths], model.facts, LOADER)


def test_data_of_another_shape_or_of_other_classes_are_refused(made: Exported, model: LoadedModel) -> None:
    with pytest.raises(FederationError, match=r"E-(DATA-05|CFG-23)"):
        of_reference("digits/iid-2/0", "test", model)
    with pytest.raises(ConfigError, match="train, test or all"):
        of_reference(made.hospital, "val", model)
    (made.images / "other").mkdir(exist_ok=True)
    for name in ("3", "ten"):
        (made.images / "other" / name).mkdir(exist_ok=True)
        for k in range(3):
            Image.new("RGB", (8, 8)).save(made.images / "other" / name / f"{k}.png")
    with pytest.raises(DataError, match="E-DATA-05"):
        of_reference(f"folder:{made.images / 'other'}", "all", model)


# ---- tables ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    Column("age", "integer", 0, 100),
    Column("crp", "number", 0, 10, missing="indicator", outside="clip"),
    Column("sex", "category", categories=("f", "m")),
)


@pytest.fixture
def table(model: LoadedModel) -> LoadedModel:
    facts = ModelFileFacts(
        method="fedavg", model="table_mlp", data="table", shape=(5,), classes=("benign", "malignant"), columns=COLUMNS,
        manifest_digest="", model_digest="",
    )  # fmt: skip
    return LoadedModel(facts, "0" * 64, torch.nn.Identity(), torch.nn.Linear(5, 2))


def rows_of(file: Path, rows: list[list[str]]) -> Path:
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return file


def test_rows_become_numbers_and_those_that_do_not_fit_are_named_by_line(table: LoadedModel, tmp_path: Path) -> None:
    file = rows_of(
        tmp_path / "p.csv",
        [
            ["name", "sex", "age", "crp"],
            ["x", "m", "50", ""],
            ["y", "f", "100", "99"],
            ["z", "d", "20", "1"],
            ["z", "f", "200", "1"],
            ["z", "f"],
        ],
    )
    found = inputs.from_paths([file], table.facts, LOADER)
    assert found.names == (f"{file}:2", f"{file}:3")
    x, _ = found.examples.batch(torch.arange(2))
    assert x.tolist() == [[0.0, 0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0, 0.0]]
    assert [text for _, text in found.problems] == [
        "sex: none of the declared categories",
        "age: outside 0 to 100",
        "more or fewer cells than the header",
    ]
    assert len(Predictor(table).predictions(found)) == 5


def test_a_table_for_prediction_names_semicolons_and_may_have_a_byte_order_mark(
    table: LoadedModel, tmp_path: Path
) -> None:
    file = tmp_path / "p.csv"
    file.write_text("sex,age,crp\nm,50,1\n", encoding="utf-8-sig")
    assert inputs.from_paths([file], table.facts, LOADER).names == (f"{file}:2",)
    file.write_text("sex;age;crp\nm;50;1\n")
    with pytest.raises(DataError, match=r"E-DATA-07.*found semicolons"):
        inputs.from_paths([file], table.facts, LOADER)


@pytest.mark.parametrize("header", [["sex", "age"], ["sex", "age", "crp", "age"]])
def test_a_table_without_the_models_columns_is_refused(table: LoadedModel, tmp_path: Path, header: list[str]) -> None:
    file = rows_of(tmp_path / "p.csv", [header, ["1"] * len(header)])
    with pytest.raises(DataError, match="E-DATA-07"):
        inputs.from_paths([file], table.facts, LOADER)


def test_images_for_a_model_of_columns_and_a_table_for_one_of_images_are_refused(
    made: Exported, model: LoadedModel, table: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="E-CFG-23"):
        inputs.from_paths([made.images / "unknown"], table.facts, LOADER)
    file = rows_of(tmp_path / "p.csv", [["sex"], ["f"]])
    (problem,) = Predictor(model).predictions(inputs.from_paths([file], model.facts, LOADER))
    assert problem.problem.startswith("not an image")
    assert issubclass(SchemaError, DataError)
