"""Small images made on the fly, whose colour tells their label, and what can be wrong with an image file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

ISIC_HEADER = (
    "image",
    "MEL",
    "NV",
    "BCC",
    "AK",
    "BKL",
    "DF",
    "VASC",
    "SCC",
    "UNK",
    "target",
    "center",
    "fold",
    "fold2",
)


def write_image(path: Path, shade: int = 100, size: tuple[int, int] = (20, 16)) -> Path:
    """Write an image of random pixels around one shade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(shade).integers(-20, 20, (size[1], size[0], 3))
    Image.fromarray(np.clip(noise + shade, 0, 255).astype(np.uint8)).save(path)
    return path


def truncate(path: Path) -> None:
    """Cut off the last part of a file, as a copy that was interrupted does."""
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) * 2 // 3])


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


def isic_row(name: str, target: int, center: int, fold: str) -> list[object]:
    """Write a row as FLamby does."""
    hot = [1.0 if c == target else 0.0 for c in range(9)]
    return [name, *hot, target, center, fold, f"{fold}_{center}"]


def write_isic(root: Path, rows: Sequence[Sequence[object]], *, images: bool = True) -> Path:
    """Write a folder in FLamby's layout with a small image per row."""
    folder = root / "isic2019"
    (folder / "ISIC_2019_Training_Input_preprocessed").mkdir(parents=True, exist_ok=True)
    write_csv(folder / "train_test_split", ISIC_HEADER, rows)
    for row in rows if images else []:
        write_image(folder / "ISIC_2019_Training_Input_preprocessed" / f"{row[0]}.jpg", 20 * int(str(row[10])) + 30)
    return folder
