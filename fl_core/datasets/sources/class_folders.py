"""A folder of images, one subfolder per class: `PATH/<class>/**/*.jpg`, or `PATH/{train,test}/<class>/**/*.jpg`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fl_core.datasets.augmentation import PHOTOS
from fl_core.datasets.checks import Item, SourceIndex, problem
from fl_core.datasets.examples import SPLITS
from fl_core.datasets.image_files import SUFFIXES, ImageTransform
from fl_core.errors import DataError
from fl_core.types.enums import Split

DEFAULT_SIZE = 224
TEST_SHARE = 0.2


def transform(image_size: int | None) -> ImageTransform:
    return ImageTransform(image_size or DEFAULT_SIZE, how=PHOTOS)


def scan(root: Path, classes: Sequence[str] | None) -> SourceIndex:
    """List a folder; raises DataError (E-DATA-02) when there is no such folder or nothing in it.

    Without a train/ and test/ level a stratified fifth of each class is held out, chosen by a hash of the file
    names: the same images on every machine, and nearly the same after images are added.
    """
    if not root.is_dir():
        raise DataError("E-DATA-02", f"expected a folder of class subfolders at {root}, found none: check the path")
    levels = _subfolders(root)
    notes: tuple[str, ...] = ()
    problems = problem(
        "E-DATA-07",
        f"images in {root} outside any class subfolder",
        [file.name for file in sorted(root.iterdir()) if _is_image(file)],
        "Move them into the subfolder of their class",
    )
    if {folder.name for folder in levels} & {"train", "test"}:
        beside = [folder for folder in levels if folder.name not in ("train", "test")]
        problems += problem(
            "E-DATA-07",
            "subfolders beside train/ and test/ (images in them)",
            [f"{folder.name!r}: {len(_images(folder))}" for folder in beside],
            "Move them below train/ or test/, or away",
        )
        items = [item for s in SPLITS for item in listed(root, root / s.value, s) if (root / s.value).is_dir()]
        names = {c.name for s in SPLITS if (root / s.value).is_dir() for c in _subfolders(root / s.value)}
    else:
        items = _hold_out(listed(root, root, Split.TRAIN))
        names = {folder.name for folder in levels}
        notes = ("no train/ and test/ level: a fifth of each class, chosen by file name, is held out as test",)
    if not names:
        raise DataError("E-DATA-02", f"expected one subfolder per class in {root}, found none: check the path")
    return SourceIndex(f"folder:{root}", tuple(classes or sorted(names)), tuple(items), problems, notes)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if _is_image(path))


def listed(root: Path, level: Path, split: Split) -> list[Item]:
    if not level.is_dir():
        return []
    return [
        Item(path, path.relative_to(root).as_posix(), folder.name, split)
        for folder in _subfolders(level)
        for path in _images(folder)
    ]


def _hold_out(items: list[Item]) -> list[Item]:
    """Turn the fifth of each class with the smallest name hashes into test examples; one of two, none of one."""
    test: set[str] = set()
    for label in {item.label for item in items}:
        names = [item.name for item in items if item.label == label]
        ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        test |= set(ranked[: max(1, round(TEST_SHARE * len(names)))] if len(names) > 1 else [])
    return [Item(i.path, i.name, i.label, Split.TEST if i.name in test else Split.TRAIN) for i in items]
