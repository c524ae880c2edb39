"""`coordinator simulate` on a hospital's own images: a folder or a manifest, dealt to simulated hospitals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from consilium.research.commands import simulate
from coordinator.cli.runs import run
from fl_core.errors import ConfigError

CLASSES = ("keratosis", "melanoma", "nevus")
SMALL = ("model=simple_cnn", "data.image_size=32", "federation=p3c2", "rounds=1", "train.epochs=1")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "images"
    for c, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for k in range(20):
            Image.new("RGB", (40, 36), (60 * c, 10 * k, 90)).save(folder / name / f"{k}.png")
    rows = [f"images/{n}/{k}.png,{n},{n}{k},{'test' if k % 5 == 0 else 'train'}" for n in CLASSES for k in range(20)]
    (folder.parent / "images.csv").write_text("\n".join(["path,label,group,split", *rows]) + "\n")
    return folder


def summary(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    simulate([*words, *SMALL], as_json=True)
    return json.loads(capsys.readouterr().out)


def test_a_folder_is_dealt_with_the_classes_that_it_has(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summary(capsys, "data=folder", f"data.path={images}")
    assert (found["data"], len(found["silos"])) == ("folder", 3)
    assert tuple(found["class_accuracy"]) == CLASSES
    named = summary(capsys, "data=folder", f"data.path={images}", f"data.classes=[{','.join(CLASSES)}]")
    assert named["manifest_digest"] == found["manifest_digest"]  # where the images lie is no part of a run


def test_a_manifest_is_dealt(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summary(capsys, "data=manifest", f"data.path={images.parent / 'images.csv'}")
    assert (found["data"], tuple(found["class_accuracy"])) == ("manifest", CLASSES)


@pytest.mark.parametrize("words", [("data=folder",), ("data=manifest",), ("data.name=folder",)])
def test_images_without_a_path_are_refused_with_the_command_that_works(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-23.*data\.path=/data/images.* federation=p5c2"):
        simulate([*words])


def test_a_path_in_a_run_of_hospitals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-23.*silo serve --data"):
        run(["data=folder", "data.path=/data/images"], home=tmp_path)
