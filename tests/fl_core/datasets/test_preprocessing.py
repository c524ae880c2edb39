"""What the sentence of a card says is what is done: carried out here word by word with Pillow and numpy alone."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fl_core.datasets import DataRequest, schema_of
from fl_core.datasets.image_loader import ImageLoader
from fl_core.datasets.preprocessing import Preprocessing
from fl_core.types.columns import Column
from fl_core.types.records import Schema

CLASSES = ("a", "b")


def of(data: str, side: int, window: tuple[float, float] | None = None, channels: int = 3) -> Preprocessing:
    return Preprocessing(data, Schema((channels, side, side), CLASSES, window=window))


def by_the_sentence(said: str, image: Image.Image) -> NDArray[np.float64]:
    """Do what a sentence says with an RGB image."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    (resized,) = re.findall(r"middle square is resized to (\d+) x \1 pixels by Pillow's bilinear filter", said)
    box = (left, top, left + side, top + side)
    image = image.resize((int(resized), int(resized)), Image.Resampling.BILINEAR, box=box)
    if "grey of 8 bits (ITU-R BT.601)" in said:
        image = image.convert("L")
    if kept := re.findall(r"of which the middle (\d+) x \1 are kept", said):
        edge = (int(resized) - int(kept[0])) // 2
        image = image.crop((edge, edge, edge + int(kept[0]), edge + int(kept[0])))
    assert "divided by 255" in said
    x = np.asarray(image, np.float64) / 255
    x = x[None] if x.ndim == 2 else x.transpose(2, 0, 1)
    if scaled := re.findall(r"mean \((.*?)\) is subtracted .* standard deviation \((.*?)\)", said):
        mean, std = (np.array([float(v) for v in text.split(",")]).reshape(-1, 1, 1) for text in scaled[0])
        x = (x - mean) / std
    return x


CASES = [of("folder", 32), of("isic2019", 40), of("cifar10", 32), of("digits", 8, channels=1)]


@pytest.mark.parametrize("found", CASES, ids=lambda p: p.data)
@pytest.mark.parametrize("size", [(50, 33), (20, 60), (64, 64)])
def test_images_become_what_the_sentence_says(tmp_path: Path, found: Preprocessing, size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "x.png")
    x, _ = found.examples([tmp_path / "x.png"], ImageLoader(cache_bytes=0)).batch(torch.tensor([0]))
    assert tuple(x.shape[1:]) == found.schema.shape
    assert np.abs(x[0].numpy() - by_the_sentence(found.sentence(), image)).max() < 1e-5


@pytest.mark.parametrize("data", ["folder", "isic2019", "cifar10"])
def test_a_prediction_prepares_an_image_as_training_does(data: str) -> None:
    """The geometry is taken from where silos have theirs, so a change there is a change here."""
    from fl_core.datasets import _transform

    schema = schema_of(data, DataRequest(CLASSES if data == "folder" else None, None if data == "cifar10" else 64))
    mine, theirs = Preprocessing(data, schema)._transform, _transform(data, DataRequest(image_size=schema.shape[-1]))
    assert [getattr(mine, n) for n in ("size", "margin", "mean", "std", "window")] == [
        getattr(theirs, n) for n in ("size", "margin", "mean", "std", "window")
    ]


def test_the_window_of_dicom_is_said_where_files_are_a_hospitals_own() -> None:
    assert "the window of centre 40 and width 400;" in of("folder", 32, (40.0, 400.0)).sentence()
    assert "the window that each file declares" in of("manifest", 32).sentence()
    assert "DICOM" not in of("cifar10", 32).sentence()


def test_rows_and_other_examples_are_said_as_they_are() -> None:
    columns = (Column("age", "integer", 0, 120), Column("sex", "category", categories=("f", "m")))
    table = Preprocessing("table", Schema((3,), CLASSES, columns))
    assert "2 columns become 3 numbers" in table.sentence()
    assert not table.takes_images
    text = Preprocessing("shakespeare", Schema((80,), CLASSES))
    assert text.sentence() == "none: examples from shakespeare are used unchanged (80 values each)"
    assert of("folder", 32).sentence(graph=True).endswith("channel by channel, inside the graph")
