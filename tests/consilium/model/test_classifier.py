"""`consilium.load`: an exported model in scikit-learn's form says what `consilium predict` says."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import consilium
from consilium import ConfigError, DataError, FederationError, Model
from consilium.cli.main import program
from consilium.model import calibration
from fl_core.errors import StateError
from tests.support.exported import Exported

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(made: Exported) -> Model:
    return consilium.load(made.model)


def files_of(made: Exported) -> list[Path]:
    return sorted((made.images / "new").rglob("*.png"))[::20]


def command(made: Exported, folder: Path, *words: object) -> list[dict[str, object]]:
    """Return what `consilium predict` writes."""
    out = folder / "answers.json"
    program().run(["predict", str(made.model), *map(str, words), "--out", str(out)])
    return json.loads(out.read_text())["predictions"]


def test_it_answers_files_as_the_command_does_to_the_last_bit(made: Exported, model: Model, tmp_path: Path) -> None:
    files = files_of(made)
    said = command(made, tmp_path, *files)
    assert model.predict_proba(files).tolist() == [one["probabilities"] for one in said]
    assert model.predict([str(file) for file in files]).tolist() == [one["answer"] for one in said]
    assert model.classes_.tolist() == list("012345678")
    assert np.allclose(model.predict_proba(files).sum(1), 1)


def test_a_folder_is_answered_in_the_order_of_the_command(made: Exported, model: Model, tmp_path: Path) -> None:
    folder = made.images / "unknown"
    said = command(made, tmp_path, folder)
    assert model.predict_proba(folder).tolist() == [one["probabilities"] for one in said]
    assert [one.name for one in model.predictions(folder)] == [one["example"] for one in said]


def test_pixels_in_memory_are_answered_as_files_with_these_pixels(made: Exported, model: Model) -> None:
    files = files_of(made)
    of_files = model.predict_proba(files)
    pictures = [Image.open(file) for file in files]
    grey = np.stack([np.asarray(picture) for picture in pictures])
    rgb = np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])
    for given in (pictures, grey, list(grey), rgb, torch.from_numpy(rgb), grey / 255, rgb / np.float32(255)):
        assert model.predict_proba(given).tolist() == of_files.tolist()
    assert model.predict_proba(pictures[0]) == pytest.approx(of_files[:1], abs=1e-6)  # a batch of one rounds otherwise


def test_larger_images_and_16_bits_go_through_the_same_preprocessing_as_files(model: Model, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    deep = rng.integers(0, 1 << 16, (30, 41), dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    wide = Image.fromarray(rng.integers(0, 256, (20, 50, 3), dtype=np.uint8))
    wide.save(tmp_path / "wide.png")
    of_files = model.predict_proba([tmp_path / "deep.png", tmp_path / "wide.png"])
    assert model.predict_proba([deep, wide]).tolist() == of_files.tolist()


def test_arrays_in_the_model_s_own_shape_are_its_examples_as_an_onnx_graph_takes_them(
    made: Exported, model: Model
) -> None:
    rgb = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files_of(made)])
    first = rgb.transpose(0, 3, 1, 2)
    assert model.predict_proba(first) == pytest.approx(model.predict_proba(rgb))
    shares = first / np.float32(255)
    assert model.predict_proba(shares) == pytest.approx(model.predict_proba(rgb))
    with torch.no_grad():
        prepared = (torch.from_numpy(shares) - torch.tensor((0.485, 0.456, 0.406)).view(-1, 1, 1)) / torch.tensor(
            (0.229, 0.224, 0.225)
        ).view(-1, 1, 1)
        assert model.module(prepared).argmax(1).tolist() == model.predict_proba(rgb).argmax(1).tolist()


def test_as_many_answers_as_images_in_their_order_also_of_repeated_ones_and_of_none(
    made: Exported, model: Model
) -> None:
    a, b = files_of(made)[:2]
    assert model.predict_proba([b, a, b]).tolist() == model.predict_proba([b, a])[[0, 1, 0]].tolist()
    assert model.predict([]).shape == (0,)
    assert model.predict_proba([]).shape == (0, 9)
    assert model.predict_proba(np.zeros((0, 8, 8), np.uint8)).shape == (0, 9)


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_answered_by_predictions(
    made: Exported, model: Model, tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    files = [tmp_path / "broken.png", files_of(made)[0]]
    with pytest.raises(DataError, match=r"E-DATA-04.*broken\.png.*predictions"):
        model.predict_proba(files)
    broken, good = model.predictions(files)
    assert broken.problem
    assert good.probabilities
    signed = Image.fromarray(np.full((8, 8), -1, np.int32))
    assert "16-bit" in model.predictions([signed])[0].problem


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (3, "expected paths, PIL images or arrays"),
        ([3], "expected paths, PIL images or arrays"),
        (["a.png", np.zeros((8, 8), np.uint8)], "not a mixture"),
        (np.zeros((8, 8, 3), np.uint8), r"images\[None\]"),
        (np.zeros(8, np.uint8), r"images\[None\]"),
        (np.zeros((2, 8, 8, 5), np.uint8), "expected an image"),
        (np.full((1, 8, 8), 2.0), "in \\[0, 1\\]"),
        (np.full((1, 8, 8), np.nan), "in \\[0, 1\\]"),
        (np.full((1, 3, 8, 8), np.nan), "in \\[0, 1\\]"),
        (np.zeros((1, 8, 8), np.int64), "uint8"),
        ("nowhere.png", "nothing at nowhere.png"),
    ],
)
def test_what_is_no_image_is_refused_with_what_is(model: Model, images: object, says: str) -> None:
    with pytest.raises((ConfigError, DataError), match=says):
        model.predict(images)


def test_a_hospital_s_calibration_beside_the_model_is_used_and_may_say_none_of_the_classes(
    made: Exported, tmp_path: Path
) -> None:
    file = calibration.calibration_path(made.model)
    program().run(["calibrate", str(made.model), "--data", made.hospital])
    try:
        calibrated = consilium.load(made.model)
        said = command(made, tmp_path, made.images / "unknown")
        answers = calibrated.predict(made.images / "unknown")
        assert answers.tolist() == [one["answer"] for one in said]
        assert "none of the classes" in answers
        assert calibrated.predictions(made.images / "unknown")[0].set == tuple(said[0]["set"])  # type: ignore[arg-type]
        assert consilium.load(made.model, raw=True).predictor.calibration is None
    finally:
        file.unlink()


def test_a_file_that_is_no_exported_model_is_refused(made: Exported, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="E-CFG-02"):
        consilium.load(tmp_path / "nothing.safetensors")
    with pytest.raises(ConfigError, match="E-CFG-02"):
        consilium.load(tmp_path)
    harmless = tmp_path / "pickled.safetensors"
    harmless.write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "random.safetensors").write_bytes(bytes(range(256)) * 40)
    for file in (harmless, tmp_path / "random.safetensors"):
        with pytest.raises(FederationError):
            consilium.load(file, sha256="0" * 64)
    other = tmp_path / made.model.name
    other.write_bytes(made.model.read_bytes()[:-4] + b"\0\0\0\1")
    (tmp_path / made.model.with_suffix(".md").name).write_bytes(made.model.with_suffix(".md").read_bytes())
    with pytest.raises(StateError, match="E-STATE-22"):
        consilium.load(other)
    with pytest.raises(StateError, match="E-STATE-22"):
        consilium.load(made.model, sha256="0" * 64)


def test_it_says_what_it_is(made: Exported, model: Model) -> None:
    assert repr(model) == "<model of digits-1: random_features, 3 x 8 x 8, 9 classes>"
