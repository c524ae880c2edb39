"""Fed-ISIC2019 in FLamby's folder layout: dermoscopy images of eight diagnoses from six centres.

Ogier du Terrail et al. (2022), "FLamby". The folder holds `ISIC_2019_Training_Input_preprocessed/*.jpg`, the file
`train_test_split` (image, one-hot MEL..SCC and UNK, target, center, fold, fold2) and, if the privacy unit is to be
the lesion, `groups.csv` (image, lesion_id). One silo is one centre; only its own images have to be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fl_core import rng
from fl_core.csv_reader import Row, read_table
from fl_core.datasets.augmentation import LESIONS
from fl_core.datasets.checks import CheckProblem, Item, SourceIndex, groups_in_both_splits, problem
from fl_core.datasets.examples import SPLITS
from fl_core.datasets.image_files import ImageTransform
from fl_core.errors import ConfigError, DataError
from fl_core.types.enums import Split

CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTERS = 6
IMAGES = "ISIC_2019_Training_Input_preprocessed"
SPLIT_FILE = "train_test_split"
GROUP_FILE = "groups.csv"
DEFAULT_SIZE = 200
# Images per centre and class (train, test) in FLamby's split: rows of centres 0 to 5, columns as CLASSES.
TRAIN_COUNTS = (
    (2279, 3363, 2245, 606, 923, 97, 87, 330),
    (20, 2977, 2, 0, 96, 23, 45, 0),
    (533, 1470, 174, 20, 379, 40, 64, 11),
    (276, 649, 223, 86, 406, 20, 3, 144),
    (166, 349, 0, 0, 140, 0, 0, 0),
    (58, 276, 5, 0, 6, 4, 2, 0),
)
TEST_COUNTS = (
    (578, 843, 564, 131, 215, 27, 24, 101),
    (4, 743, 0, 0, 28, 7, 9, 0),
    (147, 362, 37, 1, 96, 11, 18, 0),
    (66, 154, 73, 23, 84, 10, 0, 42),
    (49, 66, 0, 0, 49, 0, 0, 0),
    (9, 74, 0, 0, 4, 0, 1, 0),
)
TRAIN_SIZES = tuple(map(sum, TRAIN_COUNTS))
_COLUMNS = (*CLASSES, "UNK")


def transform(image_size: int | None) -> ImageTransform:
    """FLamby's geometry at any size: of 224 pixels a crop of 200."""
    return ImageTransform(image_size or DEFAULT_SIZE, margin=224 / 200, how=LESIONS)


def scan(root: Path, center: int, classes: Sequence[str] | None) -> SourceIndex:
    """Read one centre's rows; raises DataError (E-DATA-02, E-DATA-07) when the layout itself is not there."""
    folder = _locate(root)
    rows = read_table(folder / SPLIT_FILE, ("image", "target", "center", "fold"))
    stored = {file.stem: file for file in (folder / IMAGES).glob("*.jpg")}
    groups = _groups(folder / GROUP_FILE)
    mine = [row for row in rows if row["center"] in (str(center), f"{center}.0")]
    if not mine:
        raise DataError(
            "E-DATA-08",
            f"expected rows of centre {center} in {folder / SPLIT_FILE}, found the centres "
            f"{', '.join(sorted({row['center'] for row in rows}))}: use one of these, or the whole data set",
        )
    sound = [row for row in mine if not _contradiction(row)]
    items = tuple(_item(row, folder, groups) for row in sound)
    missing = [item.name for item in items if item.name not in stored]
    problems = (
        *_disagreements(rows, mine, set(stored)),
        *problem(
            "E-DATA-04",
            f"images of centre {center} listed in {SPLIT_FILE} that do not exist in {IMAGES}",
            missing,
            "Restore these files, or remove their rows",
            records=True,
        ),
    )
    split_groups = groups_in_both_splits(items)
    notes = (
        (f"{len(split_groups)} lesions have images in both train and test, as in FLamby's split",)
        if split_groups
        else ()
    )
    return SourceIndex(f"isic2019/center{center}", tuple(classes or CLASSES), items, problems, notes)


def parts(clients: int) -> tuple[int, ...]:
    """Share `clients` among the centres by their published training images, by largest remainder and at least one each.

    20 clients (FedGELA) are 10, 3, 3, 2, 1, 1. Raises ConfigError (E-CFG-08) for fewer clients than centres.
    """
    if clients < CENTERS:
        raise ConfigError("E-CFG-08", f"expected at least {CENTERS} clients, one per centre, found {clients}: add some")
    ideal = [clients * n / sum(TRAIN_SIZES) for n in TRAIN_SIZES]
    counts = [max(1, int(share)) for share in ideal]
    while sum(counts) != clients:
        step = 1 if sum(counts) < clients else -1
        open_ = [k for k in range(CENTERS) if step > 0 or counts[k] > 1]
        most = max(open_, key=lambda k: step * (ideal[k] - counts[k]))
        counts[most] += step
    return tuple(counts)


def center_of(clients: int, client: int) -> tuple[int, int, int]:
    """Return a client's centre, its position among the centre's clients, and how many those are."""
    center = 0
    for center, count in enumerate(parts(clients)):
        if client < count:
            return center, client, count
        client -= count
    raise ValueError(f"expected a client below {clients}, found {center}")


def split_center(index: SourceIndex, place: int, count: int, seed: int, origin: str) -> SourceIndex:
    """Keep one of `count` equal random parts of a centre's train and test images."""
    kept: list[Item] = []
    for split in SPLITS:
        items = [item for item in index.items if item.split is split]
        order = rng.numpy_stream(seed, "partition", "clients", index.origin, split.value).permutation(len(items))
        kept += [items[i] for i in np.sort(np.array_split(order, count)[place])]
    return replace(index, origin=origin, items=tuple(kept))


def _locate(root: Path) -> Path:
    for folder in (root, root / "isic2019"):
        if (folder / SPLIT_FILE).is_file() and (folder / IMAGES).is_dir():
            return folder
    raise DataError(
        "E-DATA-02",
        f"expected {SPLIT_FILE} and {IMAGES}/ in {root} or {root / 'isic2019'}, found neither place complete: point "
        "the data root at FLamby's Fed-ISIC2019 folder or its parent",
    )


def _groups(file: Path) -> dict[str, str]:
    return {r["image"]: r["lesion_id"] for r in read_table(file, ("image", "lesion_id"))} if file.exists() else {}


def _item(row: Row, folder: Path, groups: dict[str, str]) -> Item:
    name = row["image"]
    split = Split(row["fold"])
    return Item(folder / IMAGES / f"{name}.jpg", name, _COLUMNS[_target(row)], split, groups.get(name) or None)


def _target(row: Row) -> int:
    text = row["target"].removesuffix(".0")
    return int(text) if text.isdecimal() and int(text) < len(_COLUMNS) else -1


def _contradiction(row: Row) -> str:
    if _target(row) < 0:
        return f"target {row['target']!r}"
    if row["fold"] not in ("train", "test"):
        return f"fold {row['fold']!r}"
    center = row["center"].removesuffix(".0")
    if "fold2" in row and row["fold2"] != f"{row['fold']}_{center}":
        return f"fold2 {row['fold2']!r}, fold {row['fold']!r}, center {center!r}"
    hot = [c for c in _COLUMNS if row.get(c, "0") in ("1", "1.0")]
    if "MEL" in row and hot != [_COLUMNS[_target(row)]]:
        return f"target {row['target']} but marked {'+'.join(hot) or 'nothing'}"
    return ""


def _disagreements(rows: Sequence[Row], mine: Sequence[Row], stored: set[str]) -> tuple[CheckProblem, ...]:
    wrong = [f"{row['image']}: {fault}" for row in mine if (fault := _contradiction(row))]
    names = {row["image"] for row in mine}
    times = Counter(row["image"] for row in rows)
    twice = sorted(name for name in names if times[name] > 1)
    unlisted = sorted(stored - set(times))
    repair = f"Take {SPLIT_FILE} from the same release of the data set as the images"
    return (
        *problem("E-DATA-07", f"rows of {SPLIT_FILE} that contradict themselves", wrong, repair),
        *problem("E-DATA-07", f"images listed more than once in {SPLIT_FILE}", twice, repair),
        *problem("E-DATA-07", f"images that no row of {SPLIT_FILE} lists", unlisted, f"{repair}, or move them away"),
    )
