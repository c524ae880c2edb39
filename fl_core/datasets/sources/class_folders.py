"""A folder of images, one subfolder per class: `PATH/<class>/**/*.jpg`, or `PATH/{train,test}/<class>/**/*.jpg`.

Files of operating systems, file servers and archives are ignored: hidden files, `NOT_OURS`, the index of a DICOM disk.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fl_core.datasets.augmentation import PHOTOS
from fl_core.datasets.checks import CheckProblem, Item, SourceIndex, by_extension, problem
from fl_core.datasets.decoding.dicom import Window, is_dicom, lacks_preamble
from fl_core.datasets.decoding.pixels import SUFFIXES
from fl_core.datasets.examples import SPLITS
from fl_core.datasets.image_files import ImageTransform
from fl_core.datasets.label_dictionary import FILE, Translator, read_dictionary
from fl_core.errors import DataError
from fl_core.text import composed
from fl_core.types.enums import Split

DEFAULT_SIZE = 224
TEST_SHARE = 0.2
_SYSTEMS = frozenset({"__macosx", "lost+found", "found.000", "system volume information", "recycler", "$recycle.bin"})
NOT_OURS = _SYSTEMS | {"#recycle", "#snapshot", "@eadir", "@recycle", "@recently-snapshot"}
"""Lower-case names of folders that no hospital made: thumbnails, bins, snapshots."""
LEVELS = {"train": Split.TRAIN, "training": Split.TRAIN, "test": Split.TEST, "testing": Split.TEST}
"""Lower-case names of folders that divide images and are no class."""
_INDEX = "dicomdir"


def transform(image_size: int | None, window: Window | None = None) -> ImageTransform:
    return ImageTransform(image_size or DEFAULT_SIZE, how=PHOTOS, window=window)


def scan(root: Path, classes: Sequence[str] | None) -> SourceIndex:
    """List a folder; raises DataError (E-DATA-02) if it does not exist or is empty.

    Without a train/ and test/ level a stratified fifth of each class is held out, chosen by a hash of the file names:
    the same images on every machine, and nearly the same after images are added.
    """
    if not root.is_dir():
        raise DataError("E-DATA-02", f"expected a folder of class subfolders at {root}, found none: check the path")
    tree, labels = _Tree(root), Translator(read_dictionary(root))
    levels = tree.subfolders(root)
    notes: tuple[str, ...] = ()
    problems = problem(
        "E-DATA-07",
        f"images in {root} outside any class subfolder",
        [file.name for file in tree.images_in(root)],
        "Move them into the subfolder of their class",
    )
    halves = [folder for split in SPLITS for folder in levels if LEVELS.get(folder.name.lower()) is split]
    if halves:
        problems += problem(
            "E-DATA-07",
            "subfolders next to train/ and test/ (images in them)",
            [f"{folder.name!r}: {len(tree.images(folder))}" for folder in levels if folder not in halves],
            "Move them below train/ or test/, or out of the folder",
        )
        problems += problem(
            "E-DATA-07",
            "images outside any class subfolder",
            [file.relative_to(root).as_posix() for half in halves for file in tree.images_in(half)],
            "Move them into the subfolder of their class",
        )
        items = _translated([i for half in halves for i in tree.items(half, LEVELS[half.name.lower()])], labels)
        names = {composed(c.name) for half in halves for c in tree.subfolders(half)}
    else:
        items = _hold_out(_translated(tree.items(root, Split.TRAIN), labels), labels.coarse)
        names = {composed(folder.name) for folder in levels}
        notes = ("no train/ and test/ level: a fifth of each class, chosen by file name, is held out as test",)
    if not names:
        loose = sum(problem.count for problem in problems)
        contents, remedy = (
            ("none", "check the path")
            if not loose
            else (f"{loose} images outside any class", "put each into a subfolder named after its class")
        )
        raise DataError("E-DATA-02", f"expected one subfolder per class in {root}, found {contents}: {remedy}")
    problems += tree.problems()
    notes += tree.notes()
    space = tuple(classes or labels.space(names))
    unread = by_extension([path for path in tree.unread if path != root / FILE])
    return SourceIndex(f"folder:{root}", space, tuple(items), problems, notes, unread=unread, labels=labels)


def _translated(items: list[Item], labels: Translator) -> list[Item]:
    pairs = ((item, labels(item.label, item.split)) for item in items)
    return [replace(item, label=label) for item, label in pairs if label is not None]


def listed(root: Path, level: Path, split: Split) -> list[Item]:
    """List the images of one level of class subfolders."""
    return _Tree(root).items(level, split) if level.is_dir() else []


class FolderContents(NamedTuple):
    """The contents of a folder with any subfolders: images, other files, unreadable entries."""

    images: list[Path]
    unread: list[Path]
    problems: tuple[CheckProblem, ...]


def list_images(root: Path) -> FolderContents:
    """List a folder of images without classes."""
    tree = _Tree(root)
    images = [root / name for name, _ in tree.images(root)]
    return FolderContents(images, sorted(tree.unread), tree.problems())


class _Tree:
    """The contents of a folder; subfolders are read once, hidden files ignored, links to folders not followed."""

    def __init__(self, root: Path) -> None:
        self._root, self._skip = root, len(str(root / "x")) - 1
        self._levels: dict[Path, list[os.DirEntry[str]]] = {}
        self.unread: list[Path] = []
        self._closed: list[str] = []
        self._links: list[str] = []
        self._skipped = Counter[str]()

    def subfolders(self, folder: Path) -> list[Path]:
        return sorted(folder / entry.name for entry in self._level(folder) if _is_folder(entry))

    def images_in(self, folder: Path) -> list[Path]:
        """List the images of a folder itself."""
        entries = [entry for entry in self._level(folder) if not _is_folder(entry)]
        return sorted(Path(entry.path) for entry in entries if self._size_of_image(entry) is not None)

    def images(self, folder: Path) -> list[tuple[str, int]]:
        """List the images of a folder and of all below it: names within the root, and bytes."""
        images: list[tuple[str, int]] = []
        waiting = [str(folder)]
        while waiting:
            for entry in self._entries(waiting.pop()):
                if not _is_folder(entry):
                    if (size := self._size_of_image(entry)) is not None:
                        images.append((entry.path[self._skip :], size))
                elif entry.is_symlink():
                    self._links.append(self._name(entry.path))
                else:
                    waiting.append(entry.path)
        return sorted(images, key=lambda image: image[0].split("/"))  # as paths are sorted

    def items(self, level: Path, split: Split) -> list[Item]:
        return [
            Item(self._root / name, name, composed(folder.name), split, size=size)
            for folder in self.subfolders(level)
            for name, size in self.images(folder)
        ]

    def notes(self) -> tuple[str, ...]:
        listed = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in sorted(self._skipped.items()))
        return (f"system folders, which are left out: {listed}",) if listed else ()

    def problems(self) -> tuple[CheckProblem, ...]:
        closed = sorted(set(self._closed))
        return (
            *problem("E-DATA-04", "unreadable files, folders and links", closed, "Give access, or remove them"),
            *problem(
                "E-DATA-07",
                "links to folders, which are not followed, below a class",
                sorted(self._links),
                "Put the folders there, or use a manifest",
            ),
        )

    def _level(self, folder: Path) -> list[os.DirEntry[str]]:
        """Return the contents of a folder of class subfolders, cached."""
        if folder not in self._levels:
            self._levels[folder] = self._entries(str(folder))
        return self._levels[folder]

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return [entry for entry in entries if not entry.name.startswith(".") and not self._is_skipped(entry)]
        except OSError as error:
            self._closed.append(self._name(os.fsdecode(error.filename or folder)))
            return []

    def _is_skipped(self, entry: os.DirEntry[str]) -> bool:
        skipped = entry.name.lower() in NOT_OURS and _is_folder(entry)
        self._skipped.update([entry.name] if skipped else ())
        return skipped

    def _size_of_image(self, entry: os.DirEntry[str]) -> int | None:
        """Return the bytes of an image file; None for another, which is recorded. Each file is checked once."""
        try:
            status = entry.stat()
        except OSError:
            self._closed.append(self._name(entry.path))
            return None
        suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - a Path takes as long as all the rest
        if stat.S_ISREG(status.st_mode) and (suffix in SUFFIXES or _is_other_dicom(entry)):
            return status.st_size
        self.unread.append(Path(entry.path))
        return None

    def _name(self, path: str) -> str:
        return Path(path).relative_to(self._root).as_posix()


def _is_other_dicom(entry: os.DirEntry[str]) -> bool:
    """Tell by the mark, or by a first tag; a file that lacks the mark is reported when it is decoded."""
    path = Path(entry.path)
    return entry.name.lower() != _INDEX and (is_dicom(path) or lacks_preamble(path))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _hold_out(items: list[Item], coarse: Collection[str]) -> list[Item]:
    """Turn the fifth of each class with the smallest name hashes into test examples; one of two, none of one.

    Coarse labels are only trained on.
    """
    test: set[str] = set()
    for label in {item.label for item in items} - set(coarse):
        names = [item.name for item in items if item.label == label]
        ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
        test |= set(ranked[: max(1, round(TEST_SHARE * len(names)))] if len(names) > 1 else [])
    return [replace(i, split=Split.TEST) if i.name in test else i for i in items]
