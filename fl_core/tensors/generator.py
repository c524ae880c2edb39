"""Torch's random numbers on the CPU, to the last bit: its Mersenne Twister, and how it makes numbers of its words."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class Generator:
    """A Mersenne Twister, as `torch.Generator` on the CPU."""

    def __init__(self) -> None:
        self._twister = np.random.RandomState(0)

    def manual_seed(self, seed: int) -> Self:
        self._twister = np.random.RandomState(seed & 0xFFFFFFFF)
        return self

    def words(self, n: int) -> NDArray[np.int64]:
        """Return the next n words of 32 bits."""
        return self._twister.randint(0, 1 << 32, n, dtype=np.uint32).astype(np.int64)

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Return n numbers of [0, 1) with 24 random bits each, as torch makes float32."""
        return (self.words(n) & 0xFFFFFF).astype(np.float64) * 2.0**-24

    def get_state(self) -> Any:  # noqa: ANN401 - NumPy's own
        return self._twister.get_state()

    def set_state(self, state: Any) -> None:  # noqa: ANN401
        self._twister.set_state(state)


default_generator = Generator()


def permutation(n: int, generator: Generator) -> NDArray[np.int64]:
    """Shuffle 0 to n - 1 as `torch.randperm` does."""
    order = np.arange(n)
    for i, word in enumerate(generator.words(max(n - 1, 0)).tolist()):
        other = i + word % (n - i)
        order[i], order[other] = order[other], order[i]
    return order
