"""A CSV file that lists images: header path,label,group,split; paths are relative to the file.

group: the privacy unit (patient, lesion), for every image or for none; no group may have images in both splits.
split: train or test.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fl_core.datasets.checks import Item, SourceIndex, groups_in_both_splits, problem
from fl_core.datasets.label_dictionary import Translator, read_dictionary
from fl_core.datasets.sources.csv_reader import Row, read_rows
from fl_core.text import composed
from fl_core.types.enums import Split

COLUMNS = ("path", "label", "group", "split")


def scan(file: Path, classes: Sequence[str] | None) -> SourceIndex:
    """Read a manifest; raises DataError (E-DATA-02, E-DATA-07) when it is no such table."""
    table = read_rows(file, COLUMNS)
    wrong = [(line, fault) for line, row in table.rows if (fault := _fault(row))]
    wrong += [(line, "more or fewer cells than the header has") for line in table.ragged]
    labels = Translator(read_dictionary(file.parent))
    items = tuple(
        Item(_located(file.parent, row["path"]), row["path"], label, Split(row["split"]), row["group"] or None)
        for _, row in table.rows
        if not _fault(row) and (label := labels(composed(row["label"]), Split(row["split"]))) is not None
    )
    lost = [item.name for item in items if not _is_file(item.path)]
    remedy = f"Restore these files below {file.parent}, or remove their rows"
    if any("\\" in name or name[1:3] == ":/" for name in lost):
        remedy = f"Paths of Windows (backslashes, drive letters): write them as they lie below {file.parent}, with /"
    times = Counter(item.path.resolve() for item in items)
    twice = sorted({item.name for item in items if times[item.path.resolve()] > 1})
    problems = (
        *problem(
            "E-DATA-07",
            f"rows of {file.name} that are malformed",
            [f"line {line}: {fault}" for line, fault in sorted(wrong)],
            "Correct these rows, and quote cells that hold a comma",
        ),
        *problem("E-DATA-07", "images listed more than once", twice, "Keep one row per image"),
        *problem(
            "E-DATA-04",
            f"images in {file.name} without a file",
            lost,
            remedy,
            records=True,
        ),
        *problem(
            "E-DATA-07",
            "groups with images in both train and test",
            groups_in_both_splits(items),
            "Move all images of a group into one split: otherwise the test measures memorisation",
        ),
    )
    space = tuple(classes or labels.space({composed(row["label"]) for _, row in table.rows if not _fault(row)}))
    return SourceIndex(f"manifest:{file}", space, items, problems, labels=labels)


def _fault(row: Row) -> str:
    if not row["path"]:
        return "no path"
    if not row["label"]:
        return "no label"
    return "" if row["split"] in ("train", "test") else f"split {row['split'][:40]!r}, which is neither train nor test"


def _located(folder: Path, text: str) -> Path:
    """Find a file as the list names it, else with the separators of Windows or in another Unicode form."""
    ways = (text, text.replace("\\", "/"))
    paths = [folder / unicodedata.normalize(form, way) for way in ways for form in ("NFC", "NFD")]
    return next((path for path in (folder / text, *paths) if _is_file(path)), folder / text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file
        return False
