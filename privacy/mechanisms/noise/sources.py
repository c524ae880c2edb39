"""Sources of randomness: the operating system in deployment, a seed in tests and simulations."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from fl_core import rng
from fl_core.tensors import Tensor, torch
from privacy.mechanisms.noise import discrete_gaussian as discrete


class NoiseSource(Protocol):
    """A source of randomness for mechanisms."""

    private: bool
    """Whether results with this noise may be called private."""

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        """Draw int64 noise that is as private as the Gaussian of standard deviation `sigma`, in units of its grid."""
        ...

    def uniform(self, n: int) -> Tensor:
        """Draw float64 uniforms of [0, 1) (n,)."""
        ...

    def uniform_of(self, units: UnitKeys, *path: str | int) -> Tensor:
        """Draw a uniform for each unit (n,). A reproducible source derives it only from the unit's key and `path`."""
        ...

    def seed(self, *path: str | int) -> int:
        """Draw a seed of 63 bits for a library's generator. A reproducible source derives it only from `path`."""
        ...


class UnitKeys(Protocol):
    """Units with keys. A reproducible source identifies units by key, independent of their positions."""

    def __len__(self) -> int: ...

    def keys(self) -> NDArray[np.uint64]:
        """Return a key per unit (n,). Secret sources never call this."""
        ...


class _Bytes(ABC):
    """Numbers from a stream of random bytes."""

    @abstractmethod
    def _bytes(self, n: int) -> bytes:
        """Return the next n bytes."""

    def uniform(self, n: int) -> Tensor:
        """Draw float64 uniforms of [0, 1) with 53 random bits each (n,)."""
        words = np.frombuffer(self._bytes(8 * n), dtype="<u8") >> np.uint64(11)
        return torch.from_numpy(words.astype(np.float64) * 2.0**-53)

    def discrete_gaussian(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        """Draw int64 noise; raises ConfigError (E-PRIV-20) if sigma is too small or too large for the grid."""
        return discrete.discrete_gaussian(self._bytes, math.prod(shape), sigma).reshape(shape)


class SecureNoise(_Bytes):
    """A ChaCha20 keystream under a key from the operating system.

    Guarantees: two instances, and two calls, never use the same keystream; the state is never written to disk.
    """

    private = True

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        key, nonce = os.urandom(32), os.urandom(16)
        self._stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a source of noise cannot be copied or stored: a second copy would repeat its noise")

    def uniform_of(self, units: UnitKeys, *path: str | int) -> Tensor:  # noqa: ARG002
        return self.uniform(len(units))

    def seed(self, *path: str | int) -> int:  # noqa: ARG002
        return int.from_bytes(self._bytes(8), "little") >> 1

    def _bytes(self, n: int) -> bytes:
        if os.getpid() != self._process:  # a forked process has a copy of the stream
            self._begin()
        return self._stream.update(bytes(n))


class SeededNoise(_Bytes):
    """Reproducible noise for tests and simulations; not private. Each path gives other noise."""

    private = False

    def __init__(self, seed: int, *path: str | int) -> None:
        self._seed, self._path = seed, path
        self._generator = rng.numpy_stream(seed, *path)

    def uniform_of(self, units: UnitKeys, *path: str | int) -> Tensor:
        """Derive each unit's uniform from its key, so that adding or removing a unit does not change the others."""
        return torch.from_numpy((_mixed(units.keys() ^ np.uint64(self.seed(*path))) >> np.uint64(11)) * 2.0**-53)

    def seed(self, *path: str | int) -> int:
        """Derive a seed from `path`, independent of earlier draws."""
        return rng.derive(self._seed, *self._path, *path)

    def _bytes(self, n: int) -> bytes:
        return self._generator.bytes(n)


def poisson_sample(noise: NoiseSource, units: UnitKeys, rate: float, *path: str | int) -> Tensor:
    """Draw each of n units with probability `rate`, independently; return the indices drawn, possibly none."""
    return torch.nonzero(noise.uniform_of(units, *path) < rate).flatten()


def random_groups(noise: NoiseSource, units: UnitKeys, groups: int, *path: str | int) -> Tensor:
    return (noise.uniform_of(units, *path) * groups).long().clamp_(max=groups - 1)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each word (the finaliser of SplitMix64): good enough for tests only."""
    with np.errstate(over="ignore"):
        z = words + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
