"""Where noise comes from: the operating system's entropy in deployment, a seed in tests and simulations.

`SecureNoise` is a ChaCha20 keystream under a key from the operating system, one per purpose, never stored and never in
a checkpoint: uniforms of 53 bits, Gaussians by Box and Muller in float64. `SeededNoise` is reproducible, so what it
makes is not private, and says so. Gaussians in floating point leave a residual risk (Mironov, CCS 2012): what leaves a
hospital is rounded to the run's fixed-point grid after training, and no claim is made bit by bit.
"""

from __future__ import annotations

import math
import os
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from torch import Tensor

from fl_core import rng

_BLOCK = 1 << 16


class Noise(Protocol):
    """A source of randomness for mechanisms."""

    private: bool
    """Whether what it protects may be called private."""

    def gaussian(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Draw float64 Gaussians of mean 0."""
        ...

    def uniform(self, n: int) -> Tensor:
        """Draw float64 uniforms of [0, 1) (n,)."""
        ...


class SecureNoise:
    """Noise that nobody can predict or repeat.

    Guarantees: two instances, and two calls, never use the same keystream; the state is nowhere written.
    """

    private = True

    def __init__(self) -> None:
        key, nonce = os.urandom(32), os.urandom(16)
        self._stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a source of noise cannot be copied or stored: a second copy would repeat its noise")

    def uniform(self, n: int) -> Tensor:
        """Draw float64 uniforms of [0, 1) with 53 random bits each (n,)."""
        return torch.from_numpy(self._uniform(n))

    def gaussian(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Draw float64 Gaussians of mean 0, in blocks that stay in the processor's cache."""
        drawn = np.empty(math.prod(shape), dtype=np.float64)
        for start in range(0, len(drawn), _BLOCK):
            part = drawn[start : start + _BLOCK]
            half = -(-len(part) // 2)
            radius = np.sqrt(-2.0 * np.log1p(-self._uniform(half)))  # 1 - u is never 0
            angle = 2.0 * math.pi * self._uniform(half)
            pair = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
            np.multiply(pair[: len(part)], std, out=part)
        return torch.from_numpy(drawn).reshape(shape)

    def _uniform(self, n: int) -> NDArray[np.float64]:
        bits = np.frombuffer(self._stream.update(bytes(8 * n)), dtype="<u8") >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53


class SeededNoise:
    """Reproducible noise for tests and simulations; nothing made with it is private.

    path: what the noise is for, for instance ("round", 3, "silo", 1, "noise"): other paths give other noise.
    """

    private = False

    def __init__(self, seed: int, *path: str | int) -> None:
        self._generator = rng.stream(seed, *path)

    def uniform(self, n: int) -> Tensor:
        """Draw float64 uniforms of [0, 1) (n,)."""
        return torch.rand(n, generator=self._generator, dtype=torch.float64)

    def gaussian(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Draw float64 Gaussians of mean 0."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).mul_(std)


def poisson_sample(noise: Noise, n: int, rate: float) -> Tensor:
    """Draw each of n units with probability `rate`, independently; return the indices drawn, possibly none."""
    return torch.nonzero(noise.uniform(n) < rate).flatten()


def labels(noise: Noise, n: int, groups: int) -> Tensor:
    """Draw a group of {0, ..., groups - 1} for each of n units, uniformly and independently."""
    return (noise.uniform(n) * groups).long().clamp_(max=groups - 1)
