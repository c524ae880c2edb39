"""Frozen features of Fed-ISIC2019's images as a data set, its centres as a partition, and a head on them as a model.

The features of all images of a centre, training and test, lie in one file (`extract.py`). Which of them train and
which validate is drawn anew for each seed, by lesion: images of one lesion are on one side.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_core import rng
from fl_core.datasets.sources.isic2019 import CLASSES
from fl_core.errors import DataError
from fl_core.extensions.user_data import ArrayData, Split
from fl_core.models.split_model import HeadOptions, SplitModel
from fl_core.types.records import Schema

FEATURES = "CONSILIUM_FROZEN_FEATURES"
"""The environment variable that names the files of features: processes of a comparison inherit it."""
WIDTH = 1280
"""Features of one body."""
VALIDATION = 0.2
EACH, POOLED = -1, -2


def use(files: Sequence[Path]) -> None:
    """Name the files of features, one for each body, to this process and to those that it starts."""
    os.environ[FEATURES] = os.pathsep.join(str(file.absolute()) for file in files)


@cache
def read() -> dict[str, NDArray[np.float32]]:
    """Return z (n, WIDTH for each file), y (n,), center (n,) and lesion (n,), of images in one order in all files."""
    files = [dict(np.load(path)) for path in os.environ[FEATURES].split(os.pathsep)]
    if any(not np.array_equal(file[name], files[0][name]) for file in files for name in ("y", "center", "lesion")):
        raise DataError("E-DATA-02", f"expected features of the same images, found others: extract {FEATURES} again")
    return {**files[0], "z": np.concatenate([file["z"] for file in files], axis=1)}


class Features(ArrayData):
    """All images' features by the first body, as training and as test examples: `Centers` says which are which."""

    columns = slice(WIDTH)
    shape: tuple[int, ...] = (WIDTH,)
    classes = CLASSES

    def read(self, root: Path | None) -> tuple[Split, Split]:  # noqa: ARG002
        found = read()
        whole = np.ascontiguousarray(found["z"][:, self.columns]), found["y"]
        return whole, whole


class Second(Features):
    """Features by the second body alone."""

    columns = slice(WIDTH, 2 * WIDTH)


class Both(Features):
    """Features by two bodies, side by side."""

    columns = slice(2 * WIDTH)
    shape = (2 * WIDTH,)


def validation(lesion: NDArray[np.str_], seed: int) -> NDArray[np.bool_]:
    """Say of each image (n,) whether its lesion is of those that a seed holds out."""
    lesions = np.unique(lesion)
    order = torch.randperm(len(lesions), generator=rng.stream(seed, "isic", "validation")).numpy()
    return np.isin(lesion, lesions[order[: round(VALIDATION * len(lesions))]])


@dataclass(frozen=True)
class Centers:
    """A silo for each centre; only: one silo with one centre's training images, or `POOLED`, with those of all centres.

    A silo that is alone is tested on all centres' images.
    """

    silos: int = 4
    only: int = EACH

    def partition(
        self, train: Tensor, test: Tensor, n_classes: int, seed: int
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        del train, test, n_classes
        found = read()
        held_out, shares = validation(found["lesion"], seed), []
        for center in np.unique(found["center"]) if self.only == EACH else [self.only]:
            own = (found["center"] == center) | (center == POOLED)
            tested = own if self.only == EACH else np.ones_like(own)
            shares.append((np.flatnonzero(own & ~held_out), np.flatnonzero(tested & held_out)))
        return shares


@dataclass(frozen=True, slots=True)
class Head(HeadOptions):
    """A linear head on the features, with a trained layer before it where `projection` has widths."""

    def build(self, schema: Schema) -> SplitModel:
        return self.complete(nn.Identity(), schema.shape[0], schema)
