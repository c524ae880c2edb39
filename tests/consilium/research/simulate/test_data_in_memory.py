"""Torch datasets, MONAI's dictionaries and datasets of Hugging Face as data of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from consilium import ConfigError, DataError, simulate
from consilium.research.simulate.data_in_memory import DataInMemory, halves_of

X = torch.randint(0, 256, (40, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
Y = torch.arange(40) % 4
ARRAYS = ((X[:30], Y[:30]), (X[30:], Y[30:]))
NAMES = ["nevus", "melanoma", "keratosis", "other"]


class Pictures(Dataset[tuple[Image.Image, int]]):
    """In the form of torchvision's: PIL images and numbers, and the names of the classes."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, classes: list[str] | None = None) -> None:
        self.x, self.y = x, y
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.x[k].permute(1, 2, 0).numpy()), int(self.y[k])


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names


def feature(kind: str) -> object:
    return type(kind, (), {})()


class HuggingFace:
    """In the form of `datasets.Dataset`: features by column, rows as dictionaries, formats."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, formatted: str | None = None, **features: object) -> None:
        self.x, self.y, self.formatted = x, y, formatted
        self.features = features or {"img": feature("Image"), "fine": ClassLabel(NAMES), "id": feature("Value")}

    def with_format(self, kind: str | None) -> HuggingFace:
        return HuggingFace(self.x, self.y, kind, **self.features)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> dict[str, object]:
        image = self.x[k].permute(1, 2, 0).numpy()
        return {"img": image if self.formatted else Image.fromarray(image), "fine": int(self.y[k]), "id": f"row {k}"}


class Tracked(torch.Tensor):
    """In the form of MONAI's MetaTensor."""


def dictionaries(x: torch.Tensor, y: torch.Tensor) -> list[Mapping[str, Any]]:
    return [
        {"image": image.as_subclass(Tracked), "label": label, "image_meta_dict": {}}
        for image, label in zip(x, y, strict=True)
    ]


def named(x: torch.Tensor, y: torch.Tensor) -> Pictures:
    return Pictures(x, y, NAMES)


@pytest.mark.parametrize(
    ("form", "classes"),
    [
        (TensorDataset, list("0123")),
        (Pictures, list("0123")),
        (named, NAMES),
        (dictionaries, list("0123")),
        (HuggingFace, NAMES),
        (lambda x, y: HuggingFace(x, y, "numpy"), NAMES),
        (lambda x, y: Subset(TensorDataset(x, y), range(len(x))), list("0123")),
    ],
)
def test_every_form_gives_the_numbers_of_the_arrays(form: Callable[..., object], classes: list[str]) -> None:
    made = DataInMemory(*(form(*half) for half in ARRAYS))
    plain = DataInMemory(*ARRAYS)
    for ours, theirs in zip(made.read(None), plain.read(None), strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ours, theirs, strict=True))
        assert type(ours[0]) is torch.Tensor
    assert (made.shape, list(made.classes)) == ((3, 32, 32), classes)
    assert (made.digest == plain.digest) is (classes == list("0123"))


@pytest.mark.integration
def test_a_simulation_over_each_form_ends_in_the_model_of_the_arrays() -> None:
    few = {"rounds": 1, "seed": 0, "model": "simple_cnn", "train": {"max_steps": 1}}
    plain = simulate("fedavg", ARRAYS, "iid-2", **few)
    for form in (TensorDataset, dictionaries, HuggingFace):
        made = simulate("fedavg", tuple(form(*half) for half in ARRAYS), "iid-2", **few)  # type: ignore[arg-type, operator]
        assert made.digest == plain.digest
    assert made.manifest.schema.classes == tuple(NAMES)
    both = {"train": HuggingFace(*ARRAYS[0]), "validation": HuggingFace(*ARRAYS[1])}
    assert simulate("fedavg", both, "iid-2", **few).manifest.digest() == made.manifest.digest()  # type: ignore[arg-type]


def test_grey_images_have_one_channel() -> None:
    grey = [(Image.fromarray(np.full((8, 8), k, np.uint8)), k % 2) for k in range(4)]
    made = DataInMemory(grey, grey)
    assert made.shape == (1, 8, 8)
    assert torch.as_tensor(made.read(None)[0][0])[3].unique().tolist() == [3]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1])


def changed(k: int, row: object) -> list[object]:
    rows: list[object] = list(dictionaries(*ARRAYS[0]))
    rows[k] = row
    return rows


@pytest.mark.parametrize(
    ("half", "error", "says"),
    [
        (Stream(), ConfigError, "datasets with a length"),
        ("digits", ConfigError, "found str"),
        (X, ConfigError, "found Tensor"),
        (3, ConfigError, "found int"),
        ([], DataError, "found none"),
        (changed(7, {"image": X[0], "label": "nevus"}), DataError, "train, example 7.*index of a class"),
        (changed(7, {"image": X[0], "label": 1.5}), DataError, "example 7.*index of a class"),
        (changed(7, {"image": X[0], "label": float("nan")}), DataError, "example 7"),
        (changed(7, {"image": X[0], "label": [1, 2]}), DataError, "example 7.*index of a class"),
        (changed(7, {"picture": X[0], "label": 1}), DataError, "example 7: expected the keys image and label, found"),
        (
            changed(7, {"image": X[0][:, :4], "label": 1}),
            DataError,
            "example 7: expected an image of shape .3, 32, 32.",
        ),
        (changed(7, {"image": X[0] / 255, "label": 1}), DataError, "example 7.*float32"),
        (changed(7, {"image": "a.png", "label": 1}), DataError, "example 7"),
        (changed(7, X[0]), DataError, r"example 7: expected \(image, label\)"),
        (HuggingFace(X, Y, text=feature("Value")), DataError, "one feature Image and one ClassLabel"),
        (
            HuggingFace(X, Y, a=feature("Image"), b=feature("Image"), fine=ClassLabel(NAMES)),
            DataError,
            "select_columns",
        ),
    ],
)
def test_an_example_that_is_none_is_named_by_its_position(half: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        DataInMemory(half, ARRAYS[1])


def test_train_and_test_must_have_the_same_classes_and_both_be_there() -> None:
    with pytest.raises(ConfigError, match="the same classes in train and test"):
        DataInMemory(named(*ARRAYS[0]), Pictures(*ARRAYS[1], NAMES[::-1]))
    with pytest.raises(ConfigError, match="the splits train and test, found train, unlabelled"):
        halves_of({"train": 1, "unlabelled": 2})
    with pytest.raises(ConfigError, match="found none"):
        halves_of({})
    with pytest.raises(DataError, match="from 0 to 3"):
        simulate("fedavg", (named(X[:30], Y[:30] + 9), named(*ARRAYS[1])), "iid-2", rounds=1, model="simple_cnn")


def test_the_real_library_of_hugging_face_gives_the_same() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    halves = [
        datasets.Dataset.from_dict(
            {"image": [Image.fromarray(v.permute(1, 2, 0).numpy()) for v in x], "label": y.tolist()}, features=features
        )
        for x, y in ARRAYS
    ]
    assert DataInMemory(*halves).digest == DataInMemory(*(HuggingFace(*half) for half in ARRAYS)).digest


def test_the_real_library_monai_gives_the_same() -> None:
    data = pytest.importorskip("monai.data")
    halves = [
        data.Dataset([{"image": v, "label": int(label)} for v, label in zip(x, y, strict=True)]) for x, y in ARRAYS
    ]
    assert DataInMemory(*halves).digest == DataInMemory(*ARRAYS).digest
