"""How a federation splits a data set: examples per silo and class, as a table and as a heat map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from consilium.research.simulate.runner import own_references, read_silos, silo_names
from coordinator.config.manifest_builder import schema_of
from coordinator.config.run_spec import RunSpec
from fl_core import datasets
from fl_core.datasets.catalogue import PUBLISHED
from fl_core.datasets.sources import isic2019
from fl_core.errors import ConfigError
from fl_core.errors.extras import require
from fl_core.types.enums import Split
from service_core.storage.private_files import write_figure

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.ticker import Locator

SHOWN = 26
"""Largest number of classes for which the table has a column per class."""
NAMED = 40
"""Largest number of silos or classes for which the plot names each."""


@dataclass(frozen=True, slots=True)
class SplitTable:
    """Number of examples per silo and class. train, test: (silos, C)   title: data and federation."""

    title: str
    silos: tuple[str, ...]
    classes: tuple[str, ...]
    train: tuple[tuple[int, ...], ...]
    test: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, spec: RunSpec, title: str, classes: tuple[str, ...], counts: Iterable[Sequence[Sequence[int]]]
    ) -> SplitTable:
        """Build from (train, test) counts of each silo."""
        train, test = ([tuple(row) for row in half] for half in zip(*counts, strict=True))
        return cls(title, tuple(silo_names(spec, len(train))), classes, tuple(train), tuple(test))

    def as_json(self) -> dict[str, object]:
        return {
            "split": self.title,
            "silos": list(self.silos),
            "classes": list(self.classes),
            "train": [list(row) for row in self.train],
            "test": [list(row) for row in self.test],
        }


def on_disk(spec: RunSpec, data_root: Path | None) -> SplitTable:
    """Count the examples of each silo in a simulation; raises ConfigError and DataError as `datasets.check`."""
    reports = read_silos(spec, data_root, datasets.check_all)
    for report in reports:
        report.require_sound()
    how = "of their own" if own_references(spec) else datasets.federation_text(spec.federation)
    title = f"{spec.data['name']} {how}"
    return SplitTable.of(
        spec, title, reports[0].classes, ((r.counts[Split.TRAIN], r.counts[Split.TEST]) for r in reports)
    )


def published(spec: RunSpec) -> SplitTable:
    """Split the published class counts.

    Guarantees: the same numbers as from the data, except for equal shares (iid), which are another random draw.
    Raises ConfigError: E-CFG-23 if no counts are published (users or hospitals decide the split), E-CFG-08 if they
    cannot be split this way.
    """
    name, text = str(spec.data["name"]), datasets.federation_text(spec.federation)
    if name == "isic2019":
        return _isic(spec, text)
    setting = PUBLISHED.get(name)
    if setting is None or not setting.train:
        valid = ", ".join([*(n for n, k in PUBLISHED.items() if k.train), "isic2019"])
        raise ConfigError(
            "E-CFG-23", f"--published: expected data with published class counts ({valid}), found {name}: leave it out"
        )
    train, test = (np.repeat(np.arange(len(counts)), counts) for counts in (setting.train, setting.test))
    classes, counts = schema_of(spec).classes, []
    for share in datasets.parse_federation(text).partition(train, test, len(setting.train)):
        test_labels = train[share.held_out] if len(share.held_out) else test[share.test]
        counts.append([np.bincount(y, minlength=len(classes)).tolist() for y in (train[share.train], test_labels)])
    return SplitTable.of(spec, f"{name} {text}", classes, counts)


def _isic(spec: RunSpec, text: str) -> SplitTable:
    """Return FLamby's counts per centre. The counts of a split centre need the data itself."""
    references = [datasets.parse(r) for r in datasets.federation("isic2019", text)]
    if any(ref.clients for ref in references):
        raise ConfigError(
            "E-CFG-23", f"--published: expected whole centres of isic2019, found {text}: leave the option out"
        )
    centers = [ref.silo or 0 for ref in references]
    counts = ((isic2019.TRAIN_COUNTS[k], isic2019.TEST_COUNTS[k]) for k in centers)
    return SplitTable.of(spec, f"isic2019 {text}", isic2019.CLASSES, counts)


def draw(table: SplitTable, file: Path) -> None:
    """Draw a PNG heat map of training examples by silo (rows) and class (columns), with zeros in white.

    Raises ConfigError (E-CFG-23) on another kind of file.
    """
    if file.suffix.lower() != ".png":
        raise ConfigError("E-CFG-23", f"--plot: expected a file that ends in .png, found {file}: rename it")
    mpl = require("matplotlib", "research", "pictures")  # takes a second to import, so only here
    mpl.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = np.ma.masked_equal(np.array(table.train), 0)
    rows, columns = counts.shape
    wide, high = min(3.5 + 0.55 * columns, 16.0), min(1.8 + 0.4 * rows, 14.0)
    figure = Figure(figsize=(wide, high), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(counts, cmap="viridis_r", aspect="auto", vmin=0, interpolation="nearest")
    axes.set_title(f"{table.title}: training examples")
    axes.set_xlabel("class")
    _name(axes.xaxis, table.classes, MaxNLocator(integer=True))
    _name(axes.yaxis, table.silos, MaxNLocator(integer=True))
    axes.set_ylabel("silo")
    if columns <= NAMED and max(map(len, table.classes)) > 3:
        axes.tick_params(axis="x", rotation=45)
    if rows <= 25 and columns <= 20:
        half = 0.4 * counts.max()
        for r, c in zip(*np.nonzero(~np.ma.getmaskarray(counts)), strict=True):
            colour = "white" if counts[r, c] > half else "black"
            axes.text(c, r, str(counts[r, c]), ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, label="examples")
    write_figure(file, figure)


def _name(axis: Axis, names: Sequence[str], numbers: Locator) -> None:
    """Label every row or column if there are at most `NAMED`, otherwise some."""
    if len(names) <= NAMED:
        axis.set_ticks(range(len(names)), [repr(n)[1:-1] if n.isspace() else n for n in names])
    else:
        axis.set_major_locator(numbers)
