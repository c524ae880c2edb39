"""Reading the public image data sets through torchvision's readers; nothing is ever downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from fl_core.datasets.catalogue import PUBLISHED
from fl_core.datasets.partition.by_class import Labels
from fl_core.datasets.sources.arrays import FullDataset, SplitArrays, no_data_root
from fl_core.errors import DataError
from fl_core.errors.extras import require
from fl_core.tensors import Tensor, torch

# A file or folder that shows that a data set is present, below the data root or below a folder of its name.
MARKS = {
    "mnist": "MNIST/raw",
    "fmnist": "FashionMNIST/raw",
    "emnist": "EMNIST/raw",
    "svhn": "train_32x32.mat",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
}


class _Published(Protocol):
    """A torchvision data set: images (N, H, W[, C]) or, for SVHN, (N, C, H, W), and their labels."""

    data: Tensor | ArrayLike


def located(name: str, root: Path) -> Path | None:
    return next((folder for folder in (root, root / name) if (folder / MARKS[name]).exists()), None)


def read(name: str, root: Path | None) -> FullDataset:
    """Read both splits as bytes (N, C, H, W).

    Raises DataError: E-DATA-02 when the data set is not there (with its owner's address), E-DATA-04 when a file is not
    the published one.
    """
    assert root is not None
    published, folder = PUBLISHED[name], located(name, root)
    if folder is None:
        raise no_data_root(name, (root, root / name), published.layout, published.publisher)
    try:
        train, test = (_half(name, folder, train) for train in (True, False))
    except (RuntimeError, OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(
            "E-DATA-04",
            f"{name}: expected the published files ({published.layout}) in {folder}, found: {error}. Extract "
            f"the publisher's original archive again ({published.publisher})",
        ) from error
    return FullDataset(name, published.classes, train, test, published.how, published.mean, published.std)


def _half(name: str, folder: Path, train: bool) -> SplitArrays:
    published = require("torchvision.datasets", "torch", f"the published files of {name}")  # takes seconds to import

    readers: dict[str, Callable[[], _Published]] = {
        "mnist": lambda: published.MNIST(folder, train, download=False),
        "fmnist": lambda: published.FashionMNIST(folder, train, download=False),
        "emnist": lambda: published.EMNIST(folder, "letters", train=train, download=False),
        "cifar10": lambda: published.CIFAR10(folder, train, download=False),
        "cifar100": lambda: published.CIFAR100(folder, train, download=False),
        "svhn": lambda: published.SVHN(folder, "train" if train else "test", download=False),
    }
    dataset = readers[name]()
    x = torch.as_tensor(dataset.data)
    if x.dim() == 3:
        x = x.unsqueeze(1)  # (N, 1, H, W)
    elif name != "svhn":
        x = x.permute(0, 3, 1, 2)
    y: Labels = np.asarray(dataset.labels if name == "svhn" else dataset.targets, dtype=np.int64)  # type: ignore[attr-defined]
    return SplitArrays(x.contiguous(), y - 1 if name == "emnist" else y)  # EMNIST numbers the letters from 1
