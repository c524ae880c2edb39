"""A folder of images, one subfolder per class: `PATH/<class>/**/*.jpg`, or `PATH/{train,test}/<class>/**/*.jpg`."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from fl_core.datasets.augmentation import PHOTOS
from fl_core.datasets.checks import CheckProblem, Item, SourceIndex, by_extension, problem
from fl_core.datasets.decoding.dicom import Window, is_dicom
from fl_core.datasets.decoding.pixels import SUFFIXES
from fl_core.datasets.examples import SPLITS
from fl_core.datasets.image_files import ImageTransform
from fl_core.errors import DataError
from fl_core.types.enums import Split

DEFAULT_SIZE = 224
TEST_SHARE = 0.2


def transform(image_size: int | None, window: Window | None = None) -> ImageTransform:
    return ImageTransform(image_size or DEFAULT_SIZE, how=PHOTOS, window=window)


def scan(root: Path, classes: Sequence[str] | None) -> SourceIndex:
    """List a folder; raises DataError (E-DATA-02) when there is no such folder or nothing in it.

    Without a train/ and test/ level a stratified fifth of each class is held out, chosen by a hash of the file
    names: the same images on every machine, and nearly the same after images are added.
    """
    if not root.is_dir():
        raise DataError("E-DATA-02", f"expected a folder of class subfolders at {root}, found none: check the path")
    tree = _Tree(root)
    levels = tree.subfolders(root)
    notes: tuple[str, ...] = ()
    problems = problem(
        "E-DATA-07",
        f"images in {root} outside any class subfolder",
        [file.name for file in tree.images_in(root)],
        "Move them into the subfolder of their class",
    )
    if {folder.name for folder in levels} & {"train", "test"}:
        halves = [root / s.value for s in SPLITS if (root / s.value).is_dir()]
        problems += problem(
            "E-DATA-07",
            "subfolders beside train/ and test/ (images in them)",
            [f"{folder.name!r}: {len(tree.images(folder))}" for folder in levels if folder not in halves],
            "Move them below train/ or test/, or away",
        )
        problems += problem(
            "E-DATA-07",
            "images outside any class subfolder",
            [file.relative_to(root).as_posix() for half in halves for file in tree.images_in(half)],
            "Move them into the subfolder of their class",
        )
        items = [item for half in halves for item in tree.items(half, Split(half.name))]
        names = {c.name for half in halves for c in tree.subfolders(half)}
    else:
        items = _hold_out(tree.items(root, Split.TRAIN))
        names = {folder.name for folder in levels}
        notes = ("no train/ and test/ level: a fifth of each class, chosen by file name, is held out as test",)
    if not names:
        raise DataError("E-DATA-02", f"expected one subfolder per class in {root}, found none: check the path")
    problems += tree.problems()
    space = tuple(classes or sorted(names))
    return SourceIndex(f"folder:{root}", space, tuple(items), problems, notes, unread=by_extension(tree.unread))


def listed(root: Path, level: Path, split: Split) -> list[Item]:
    """List the images of one level of class subfolders."""
    return _Tree(root).items(level, split) if level.is_dir() else []


class _Tree:
    """What lies below a folder, each folder read once. Hidden files are nobody's; links to folders are not followed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.unread: list[Path] = []
        self._closed: list[str] = []
        self._links: list[str] = []

    def subfolders(self, folder: Path) -> list[Path]:
        return [p for p in self._entries(folder) if p.is_dir()]

    def images_in(self, folder: Path) -> list[Path]:
        """List the images of a folder itself."""
        return [path for path in self._entries(folder) if not path.is_dir() and self._is_image(path)]

    def images(self, folder: Path) -> list[Path]:
        """List the images of a folder and of all below it."""
        found: list[Path] = []
        for at, below, names in os.walk(folder, onerror=self._note):
            below[:] = [name for name in below if not name.startswith(".")]
            self._links += [self._name(Path(at, name)) for name in below if Path(at, name).is_symlink()]
            paths = (Path(at, name) for name in names if not name.startswith("."))
            found += [path for path in paths if self._is_image(path)]
        return sorted(found)

    def items(self, level: Path, split: Split) -> list[Item]:
        return [
            Item(path, self._name(path), folder.name, split)
            for folder in self.subfolders(level)
            for path in self.images(folder)
        ]

    def problems(self) -> tuple[CheckProblem, ...]:
        closed = sorted(set(self._closed))
        return (
            *problem("E-DATA-04", "what cannot be read: files, folders, links", closed, "Give access, or remove them"),
            *problem(
                "E-DATA-07",
                "links to folders, which are not followed, below a class",
                self._links,
                "Put the folders there, or use a manifest",
            ),
        )

    def _entries(self, folder: Path) -> list[Path]:
        try:
            return sorted(p for p in folder.iterdir() if not p.name.startswith("."))
        except OSError as error:
            self._note(error)
            return []

    def _is_image(self, path: Path) -> bool:
        suffix = path.suffix.lower()
        try:
            found = path.stat().st_mode
        except OSError:
            self._closed.append(self._name(path))
            return False
        if stat.S_ISREG(found) and (suffix in SUFFIXES or (not suffix.strip(".0123456789") and is_dicom(path))):
            return True
        self.unread.append(path)
        return False

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _note(self, error: OSError) -> None:
        self._closed.append(self._name(Path(os.fsdecode(error.filename or self._root))))


def _hold_out(items: list[Item]) -> list[Item]:
    """Turn the fifth of each class with the smallest name hashes into test examples; one of two, none of one."""
    test: set[str] = set()
    for label in {item.label for item in items}:
        names = [item.name for item in items if item.label == label]
        ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
        test |= set(ranked[: max(1, round(TEST_SHARE * len(names)))] if len(names) > 1 else [])
    return [Item(i.path, i.name, i.label, Split.TEST if i.name in test else Split.TRAIN) for i in items]
