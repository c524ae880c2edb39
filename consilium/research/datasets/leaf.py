"""LEAF's FEMNIST and Shakespeare: JSON files with users, num_samples and user_data, in train/ and test/.

Caldas et al. (2018), "LEAF: A Benchmark for Federated Settings". Keeps each user's split from preprocess.sh.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_core.datasets.augmentation import Augmentation
from fl_core.datasets.catalogue import CHARACTERS, PUBLISHED
from fl_core.datasets.sources.arrays import FullDataset, SplitArrays, no_data_root
from fl_core.errors import DataError

_PLACE = {c: k for k, c in enumerate(CHARACTERS)}


def read(name: str, root: Path | None) -> FullDataset:
    """Read all users of both splits; pixels become bytes, characters become their index in LEAF's alphabet.

    Raises DataError: E-DATA-02 if the data set is missing (with its publisher's address), E-DATA-07 if a file
    contradicts itself, E-DATA-05 on an unknown label or character.
    """
    assert root is not None
    dataset = PUBLISHED[name]
    places = (root / name / "data", root / name, root / "leaf" / "data" / name / "data")
    folder = next((p for p in places if all(any((p / s).glob("*.json")) for s in ("train", "test"))), None)
    if folder is None:
        raise no_data_root(name, places, dataset.layout, dataset.publisher)
    numbers: dict[str, int] = {}
    train, test = (_half(name, folder / split, numbers) for split in ("train", "test"))
    return FullDataset(name, dataset.classes, train, test, Augmentation())


def _half(name: str, folder: Path, numbers: dict[str, int]) -> SplitArrays:
    """Read every file of one split, sorted by name; users are numbered in order of appearance."""
    x: list[Tensor] = []
    y: list[int] = []
    users: list[int] = []
    for file in sorted(folder.glob("*.json")):
        for user, rows, labels in _users(file):
            number = numbers.setdefault(user, len(numbers))
            x.append(_pixels(file, user, rows) if name == "femnist" else _characters(file, user, rows))
            y += [_label(name, file, user, label) for label in labels]
            users += [number] * len(labels)
    return SplitArrays(torch.cat(x), np.array(y, dtype=np.int64), np.array(users, dtype=np.int64))


def _users(file: Path) -> list[tuple[str, list[object], list[object]]]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        users = [(str(u), list(raw["user_data"][u]["x"]), list(raw["user_data"][u]["y"])) for u in raw["users"]]
        sizes = [int(n) for n in raw["num_samples"]]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _contradiction(file, f"{type(error).__name__} {error}") from error
    for (user, rows, labels), size in zip(users, sizes, strict=False):
        if not len(rows) == len(labels) == size:
            raise _contradiction(file, f"{user}: {len(rows)} examples, {len(labels)} labels, num_samples {size}")
    if len(sizes) != len(users) or not users:
        raise _contradiction(file, f"{len(users)} users, {len(sizes)} sizes")
    return users


def _contradiction(file: Path, found: str) -> DataError:
    return DataError(
        "E-DATA-07", f"expected users, num_samples and user_data that agree in {file}, found {found}: prepare it again"
    )


def _pixels(file: Path, user: str, rows: list[object]) -> Tensor:
    """Convert rows of 784 numbers in [0, 1] to (n, 1, 28, 28) bytes. Lossless, because LEAF divided bytes by 255."""
    try:
        x = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 1, 28, 28)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise _contradiction(file, f"{user}: rows that do not have 784 numbers ({error})") from error
    if len(x) and not (x.min() >= 0 and x.max() <= 1):
        raise _contradiction(file, f"{user}: pixels from {x.min():g} to {x.max():g}")
    return (x * 255).round().to(torch.uint8)


def _characters(file: Path, user: str, rows: list[object]) -> Tensor:
    """Convert strings of 80 characters to (n, 80) indices in the alphabet."""
    if wrong := [row for row in rows if not isinstance(row, str) or len(row) != PUBLISHED["shakespeare"].shape[0]]:
        raise _contradiction(file, f"{user}: {len(wrong)} examples that are not strings of 80 characters")
    return torch.tensor([[_place(file, user, c) for c in str(row)] for row in rows], dtype=torch.float32).view(-1, 80)


def _label(name: str, file: Path, user: str, label: object) -> int:
    if name == "shakespeare":
        return _place(file, user, label)
    if isinstance(label, int) and 0 <= label < len(PUBLISHED[name].classes):
        return label
    raise DataError("E-DATA-05", f"expected labels 0 to 61 in {file}, found {label!r} of {user}: prepare it again")


def _place(file: Path, user: str, character: object) -> int:
    place = _PLACE.get(character) if isinstance(character, str) else None
    if place is None:
        raise DataError(
            "E-DATA-05", f"expected LEAF's {len(_PLACE)} characters in {file}, found {character!r} of {user}: clean it"
        )
    return place
