"""Tiny synthetic copies of the published layouts, written byte by byte in the publishers' formats."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
from scipy.io import savemat


def images(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape)).astype(np.uint8)


def write_idx(folder: Path, prefixes: tuple[str, str], x: np.ndarray, y: np.ndarray) -> None:
    """The format of MNIST and its relatives: big-endian magic number, sizes, bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    images_name, labels_name = prefixes
    (folder / images_name).write_bytes(struct.pack(">4i", 2051, *x.shape) + x.tobytes())
    (folder / labels_name).write_bytes(struct.pack(">2i", 2049, len(y)) + y.astype(np.uint8).tobytes())


def write_mnist(root: Path, folder: str, x: np.ndarray, y: np.ndarray, n_train: int) -> None:
    for name, part in (("train", slice(0, n_train)), ("t10k", slice(n_train, None))):
        write_idx(root / folder / "raw", (f"{name}-images-idx3-ubyte", f"{name}-labels-idx1-ubyte"), x[part], y[part])


def write_emnist(root: Path, x: np.ndarray, y: np.ndarray, n_train: int) -> None:
    for name, part in (("train", slice(0, n_train)), ("test", slice(n_train, None))):
        stem = f"emnist-letters-{name}"
        write_idx(root / "EMNIST" / "raw", (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"), x[part], y[part])


def write_svhn(root: Path, x: np.ndarray, y: np.ndarray, n_train: int) -> None:
    """MATLAB files: X (H, W, C, N), y (N, 1) in 1..10, where 10 stands for the digit 0."""
    root.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", slice(0, n_train)), ("test", slice(n_train, None))):
        labels = np.where(y[part] == 0, 10, y[part]).astype(np.uint8).reshape(-1, 1)
        savemat(root / f"{name}_32x32.mat", {"X": x[part].transpose(2, 3, 1, 0), "y": labels})


def write_cifar(root: Path, x: np.ndarray, y: np.ndarray, n_train: int, *, fine: bool) -> None:
    """Python pickles with rows of 3,072 bytes; CIFAR10 in five batches, CIFAR100 in one."""
    folder = root / ("cifar-100-python" if fine else "cifar-10-batches-py")
    folder.mkdir(parents=True, exist_ok=True)
    key = "fine_labels" if fine else "labels"
    parts = np.array_split(np.arange(n_train), 1 if fine else 5)
    names = ["train"] if fine else [f"data_batch_{k}" for k in range(1, 6)]
    rest = np.arange(n_train, len(y))
    for name, part in (*zip(names, parts, strict=True), ("test" if fine else "test_batch", rest)):
        row = {"data": x[part].reshape(len(part), -1), key: [int(v) for v in y[part]]}
        (folder / name).write_bytes(pickle.dumps(row))
    meta = {"fine_label_names": [str(c) for c in range(100)]} if fine else {"label_names": [str(c) for c in range(10)]}
    (folder / ("meta" if fine else "batches.meta")).write_bytes(pickle.dumps(meta))


def write_leaf(
    folder: Path, users: dict[str, tuple[list[object], list[object]]], name: str = "all_data_0.json"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    (folder / name).write_text(json.dumps(raw))
    return folder / name
