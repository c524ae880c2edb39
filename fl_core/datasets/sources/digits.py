"""1,797 real handwritten digits, 8x8, from scikit-learn; among simulated hospitals. Runs without any data on disk.

Alpaydin and Kaynak (1998), "Optical recognition of handwritten digits", UCI machine learning repository.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_core import rng
from fl_core.datasets.augmentation import DIGITS
from fl_core.datasets.checks import CheckReport, problem
from fl_core.datasets.examples import SiloDataset, TensorExamples, fingerprint
from fl_core.datasets.partition.federations import Partitioner
from fl_core.errors import DataError
from fl_core.tensors import Tensor, torch
from fl_core.types.enums import Split
from fl_core.types.records import Schema

CLASSES = tuple("0123456789")
SHAPE = (1, 8, 8)
TEST_SHARE = 0.2


class DigitShare(NamedTuple):
    """One silo's digits: x (n, 1, 8, 8) in [0, 1] and the digit names, train and test.

    public: the whole test split, where the silo's own test digits were held out of its training digits
    """

    origin: str
    space: tuple[str, ...]
    pixels: tuple[Tensor, Tensor]
    names: tuple[list[str], list[str]]
    public: tuple[Tensor, list[str]] | None = None

    def _examples(self, x: Tensor, names: Sequence[str]) -> TensorExamples:
        """Label digits by their place in the label space; -1 outside it, which only the public split may have."""
        place = [self.space.index(n) if n in self.space else -1 for n in names]
        return TensorExamples(x, torch.tensor(place, dtype=torch.int64), how=DIGITS)

    def dataset(self) -> SiloDataset:
        """Make the examples; raises DataError (E-DATA-05) when a digit of this silo is outside the label space."""
        report = self.report()
        report.require_sound()
        train, test = (self._examples(x, names) for x, names in zip(self.pixels, self.names, strict=True))
        public = self._examples(*self.public) if self.public else None
        return SiloDataset(Schema(SHAPE, self.space), train, test, self.origin, report.fingerprint, public)

    def report(self) -> CheckReport:
        both = [*self.names[0], *self.names[1]]
        unknown = [name for name in both if name not in self.space]
        problems = problem(
            "E-DATA-05",
            f"digits outside the label space ({', '.join(self.space)})",
            [f"{name!r}: {unknown.count(name)}" for name in sorted(set(unknown))],
            "Start a run with these `classes`",
            len(unknown),
        )
        pixels = [(x * 16).to(torch.uint8).numpy().tobytes() for x in self.pixels]
        return CheckReport(
            self.origin,
            self.space,
            {
                s: tuple(n.count(c) for c in self.space)
                for s, n in zip((Split.TRAIN, Split.TEST), self.names, strict=True)
            },
            problems,
            sizes={SHAPE[1:]: len(both)},
            fingerprint=fingerprint(*pixels, *self.names),
        )


def share(federation: Partitioner, silo: int, classes: Sequence[str] | None) -> DigitShare:
    """Hold out a stratified fifth, the same in every run, partition both splits and take one silo's.

    classes: the run's label space, the ten digits by default. Raises DataError (E-DATA-02) when scikit-learn's file of
    the digits is not there.
    """
    images, digits = _digits()
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, *SHAPE)
    train, test = [], []
    for c in range(len(CLASSES)):
        index = rng.numpy_stream(0, "digits", "split", c).permutation(np.flatnonzero(digits == c))
        cut = round(TEST_SHARE * len(index))
        test.append(index[:cut])
        train.append(index[cut:])
    at = [np.sort(np.concatenate(split)) for split in (train, test)]
    part = federation.partition(digits[at[0]], digits[at[1]], len(CLASSES))[silo]
    has_hold_out = len(part.held_out) > 0
    mine = at[0][part.train], at[0][part.held_out] if has_hold_out else at[1][part.test], at[1]
    names = [[CLASSES[c] for c in digits[index]] for index in mine]
    origin = f"digits/{federation.text}/{silo}"
    public = (x[mine[2]], names[2]) if has_hold_out else None
    return DigitShare(origin, tuple(classes or CLASSES), (x[mine[0]], x[mine[1]]), (names[0], names[1]), public)


@cache
def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read the digits, 64 numbers from 0 to 16 each, and what they are, as scikit-learn's `load_digits` gives them.

    From the library's own file: to import it takes nearly as long as to import torch, and each silo is a process.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError(
            "E-DATA-02",
            "expected scikit-learn, which contains the digits, found none: pip install 'consilium-fl[research]'",
        )
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.exists():
        raise DataError(
            "E-DATA-02", f"expected scikit-learn's digits in {file}, found none: pip install 'consilium-fl[research]'"
        )
    rows = np.loadtxt(file, delimiter=",")
    images, digits = rows[:, :-1], rows[:, -1].astype(np.int64)
    for kept in (images, digits):
        kept.flags.writeable = False
    return images, digits
