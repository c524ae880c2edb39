"""Public data sets that come as trees of image files (CIFAR10 as JPEG, CINIC10, TinyImageNet), read when first used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fl_core.csv_reader import read_lines
from fl_core.datasets.catalogue import PUBLISHED
from fl_core.datasets.checks import Item, SourceIndex, problem
from fl_core.datasets.image_files import ImageTransform
from fl_core.datasets.partition.federations import Partitioner, SiloIndices
from fl_core.datasets.sources.arrays import no_data_root
from fl_core.datasets.sources.class_folders import listed
from fl_core.types.enums import Split

TREES = {"cifar10": ("", "cifar10", "cifar10-jpeg"), "cinic10": ("", "cinic10", "CINIC-10")}
TINY = ("", "tinyimagenet", "tiny-imagenet-200")


def transform(name: str) -> ImageTransform:
    published = PUBLISHED[name]
    return ImageTransform(published.shape[-1], how=published.how, mean=published.mean, std=published.std)


def located(name: str, root: Path) -> Path | None:
    if name == "tinyimagenet":
        return next((root / at for at in TINY if (root / at / "wnids.txt").is_file()), None)
    wanted = [f"{split}/{PUBLISHED[name].classes[0]}" for split in ("train", "test")]
    return next((root / at for at in TREES[name] if all((root / at / w).is_dir() for w in wanted)), None)


@lru_cache(maxsize=2)
def scan(name: str, root: Path) -> SourceIndex:
    """List a tree, once for all silos of a simulation.

    CINIC10's valid/ is left out: its train/ and test/ are of 90,000 images each. TinyImageNet's val/ is the test split
    (its test/ has no labels), and its classes are named by their position among the sorted WordNet ids.
    Raises DataError (E-DATA-02) when the data set is not there, with its owner's address.
    """
    published, folder = PUBLISHED[name], located(name, root)
    if folder is None:
        places = TINY if name == "tinyimagenet" else TREES[name]
        raise no_data_root(name, [root / at for at in places], published.layout, published.publisher)
    if name == "tinyimagenet":
        return _scan_tiny_imagenet(folder)
    items = [item for split in (Split.TRAIN, Split.TEST) for item in listed(folder, folder / split.value, split)]
    return SourceIndex(name, published.classes, tuple(items))


@lru_cache(maxsize=2)
def shares(name: str, root: Path, federation: Partitioner) -> list[SiloIndices]:
    """Partition a tree without problems, once for all silos of a simulation."""
    return scan(name, root).shares(federation)


def take(name: str, root: Path, federation: Partitioner, silo: int, classes: Sequence[str] | None) -> SourceIndex:
    """Take one silo's share; everything, for the report, when the tree has a problem in itself."""
    whole, origin = scan(name, root), f"{name}/{federation.text}/{silo}"
    if whole.problems or {item.label for item in whole.items} - set(whole.classes):
        return replace(whole, origin=origin)
    share = whole.subset(shares(name, root, federation)[silo], origin)
    return replace(share, classes=tuple(classes or whole.classes))


def _scan_tiny_imagenet(folder: Path) -> SourceIndex:
    """List TinyImageNet by wnids.txt and val/val_annotations.txt (file, WordNet id, box; tabs between them)."""
    names = sorted(line.strip() for line in read_lines(folder / "wnids.txt") if line.strip())
    place = {wnid: f"{k:03d}" for k, wnid in enumerate(names)}
    items = [
        Item(file, file.relative_to(folder).as_posix(), place[wnid], Split.TRAIN)
        for wnid in names
        for file in sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
    ]
    unknown = []
    stored = {file.name for file in (folder / "val" / "images").glob("*.JPEG")}
    missing = []
    for line in read_lines(folder / "val" / "val_annotations.txt"):
        file, wnid = (*line.split("\t"), "", "")[:2]
        if not file:
            continue
        if wnid not in place:
            unknown.append(f"{file}: {wnid!r}")
            continue
        if file not in stored:
            missing.append(file)
        items.append(Item(folder / "val" / "images" / file, f"val/images/{file}", place[wnid], Split.TEST))
    remedy = "Extract the publisher's original archive again"
    problems = (
        *problem(
            "E-DATA-07", "rows of val_annotations.txt with a WordNet ID that is not in wnids.txt", unknown, remedy
        ),
        *problem("E-DATA-04", "images listed in val_annotations.txt that do not exist in val/images", missing, remedy),
    )
    return SourceIndex("tinyimagenet", PUBLISHED["tinyimagenet"].classes, tuple(items), problems)
