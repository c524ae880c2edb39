"""Hospitals of uneven size: each has a share of every class, and each next one less of it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Uneven:
    """Silo k has `ratio` times as many examples as silo k - 1, of all classes alike."""

    silos: int = 4
    ratio: float = 0.5

    def partition(self, train: np.ndarray, test: np.ndarray, n_classes: int, seed: int) -> list[np.ndarray]:
        """Return positions in `train`; examples of the test split are then divided in the same proportions."""
        sizes = self.ratio ** np.arange(self.silos)
        ends = np.cumsum(sizes / sizes.sum())[:-1]
        order = np.random.default_rng(seed).permutation(len(train))
        by_class = [order[train[order] == c] for c in range(n_classes)]
        shares = [np.split(index, (ends * len(index)).astype(int)) for index in by_class]
        return [np.concatenate([share[k] for share in shares]) for k in range(self.silos)]
