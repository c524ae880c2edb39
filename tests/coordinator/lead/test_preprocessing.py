"""The sentence on preprocessing is true: who does what it says gets what hospitals train on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from coordinator.lead import preprocessing
from fl_core import datasets
from fl_core.datasets.image_files import ImageExamples
from fl_core.rounds.manifest import RunManifest
from fl_core.types.columns import Column
from fl_core.types.records import Schema
from tests.support.federations import manifest


def of(data: str, size: int | None = None, **schema: object) -> RunManifest:
    made = manifest()
    return replace(made, data=data, image_size=size, schema=replace(made.schema, **schema))


def followed(sentence: str, file: Path) -> torch.Tensor:
    """Do what the sentence says, and nothing else, with another library's functions."""
    (side,) = set(map(int, re.search(r"resized to (\d+) x (\d+) pixels", sentence).groups()))
    crop = re.search(r"the middle (\d+) x \d+ are cut out", sentence)
    mean, std = (
        torch.tensor([float(v) for v in found.split(", ")]).view(3, 1, 1)
        for found in re.search(r"divided by 255, less \((.*?)\), divided by \((.*?)\) per channel", sentence).groups()
    )
    with Image.open(file) as opened:
        upright = ImageOps.exif_transpose(opened).convert("RGB")
    cut = min(upright.size)
    left, top = (upright.width - cut) / 2, (upright.height - cut) / 2
    square = upright.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + cut, top + cut))
    x = torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 255
    if crop:
        size = int(crop[1])
        at = (side - size) // 2
        x = x[:, at : at + size, at : at + size]
    return (x - mean) / std


@pytest.mark.parametrize(("data", "size"), [("folder", 32), ("manifest", 48), ("isic2019", 40), ("folder", None)])
@pytest.mark.parametrize("shape", [(90, 61), (50, 120)])
def test_who_follows_the_sentence_on_images_gets_the_examples(
    tmp_path: Path, data: str, size: int | None, shape: tuple[int, int]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    file = tmp_path / "a.png"
    Image.fromarray(pixels).save(file)
    run = of(data, size)
    transform = preprocessing.transform_of(run)
    assert transform is not None
    x, _ = ImageExamples([file], torch.tensor([0]), transform).batch(torch.tensor([0]))
    assert torch.allclose(followed(preprocessing.sentence(run), file), x[0], atol=1e-5)


def test_the_window_of_dicom_is_named() -> None:
    assert "the window 40, 400" in preprocessing.sentence(of("folder", 32, window=(40.0, 400.0)))
    assert "the file's own window" in preprocessing.sentence(of("folder", 32))


def test_a_table_has_its_columns_and_no_pixels() -> None:
    columns = (Column("age", "integer", min=0, max=120), Column("sex", "category", categories=("f", "m")))
    said = preprocessing.sentence(of("table", shape=(3,), columns=columns))
    assert said.startswith("The columns age, sex of a row become 3 numbers")
    assert "255" not in said


def test_data_sets_in_memory_are_said_to_be_in_0_1_where_they_are() -> None:
    x, _ = datasets.load("digits/p3c4/0").train.batch(torch.arange(50))
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert preprocessing.sentence(of("digits")).endswith("1 x 8 x 8 numbers in [0, 1], and nothing else is done.")
    assert "less (0.4377, 0.4438, 0.4728), divided by (0.198, 0.201, 0.197)" in preprocessing.sentence(of("svhn"))
    assert "as its reader gives them" in preprocessing.sentence(of("spiral", shape=(2,)))


def test_every_source_has_a_sentence() -> None:
    for name in datasets.SOURCES:
        shape = Schema((3, 32, 32), ("a", "b")) if name in ("folder", "manifest", "table") else datasets.schema_of(name)
        said = preprocessing.sentence(replace(of(name, 32), schema=shape))
        assert said.endswith(".")
        assert "\n" not in said
