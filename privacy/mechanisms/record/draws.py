"""Randomness inside a unit's contribution: augmentation, dropout, stochastic depth, a sub-sample of the unit.

It is secret, fresh, independent of other units, and never derived from the run's public seed. With a reproducible
source, in tests, it depends on (seed, step, the record's content), never on the position in a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from fl_core import rng
from fl_core.tensors import Tensor, nn, torch
from fl_core.types.values import Examples, LossFn
from privacy.mechanisms.noise.sources import NoiseSource

_KEYS: WeakKeyDictionary[Examples, NDArray[np.uint64]] = WeakKeyDictionary()
"""Cache of record keys, so that data sets in memory are hashed once."""
_BATCH = 256
_HEAD, _WORDS = 24, 624
"""Layout of the state of torch's Mersenne Twister: bytes before its words, and the number of 8-byte words."""
DrawPath = tuple[str | int, ...]
"""The purpose of a draw, within a round of a silo: ("sgd", 0, "step", 12)."""


class Draws:
    """The random draws of one call of `sgd`, except its sample and its noise.

    unit_by_unit: whether each unit is computed separately, so that a layer's draws can follow from the unit's content:
    if the source is reproducible and the model draws random numbers.
    """

    def __init__(self, noise: NoiseSource, examples: Examples, augment: bool, path: DrawPath, stochastic: bool) -> None:
        self.path = path
        self._noise, self._examples = noise, examples
        self._augment = augment
        self._secret = torch.Generator().manual_seed(noise.seed(*path, "augment")) if augment else None
        if self._secret is not None and noise.private:
            _fill(self._secret, noise)
        self.unit_by_unit = stochastic and not noise.private

    def scope(self) -> AbstractContextManager[None]:
        return layers_scope(self._noise, *self.path)

    def seed_of_units(self, index: Tensor, step: int) -> int | None:
        """Derive the seed of the layers' draws for units; None unless `unit_by_unit`."""
        if not self.unit_by_unit:
            return None
        keys = map(int, np.sort(self._keys(index)))
        return self._noise.seed(*self.path, "step", step, "layers", "unit", *keys)

    def for_units(self, index: Tensor, step: int) -> AbstractContextManager[None]:
        return unit_scope(self.seed_of_units(index, step))

    def for_group(self, group: int, step: int) -> AbstractContextManager[None]:
        seed = None if self._noise.private else self._noise.seed(*self.path, "step", step, "layers", "group", group)
        return unit_scope(seed)

    def read(self, index: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Read the records at `index` (B,), augmented if the schedule asks for it."""
        if not self._augment or not len(index):
            return self._examples.batch(index)
        if self._noise.private:
            return self._examples.batch(index, self._secret)
        keys = self._keys(index)
        pairs = [
            self._examples.batch(i, self._augmentation_draws(step, k))
            for i, k in zip(torch.split(index, 1), keys, strict=True)
        ]
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

    def subset(self, members: Tensor, most: int, step: int) -> Tensor:
        keys = () if self._noise.private else map(int, np.sort(self._keys(members)))
        seed = self._noise.seed(*self.path, "step", step, "subset", *keys)
        return members[torch.randperm(len(members), generator=torch.Generator().manual_seed(seed))[:most]]

    def _augmentation_draws(self, step: int, key: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._noise.seed(*self.path, "step", step, "augment", int(key)))

    def _keys(self, index: Tensor) -> NDArray[np.uint64]:
        keys: NDArray[np.uint64] = record_keys(self._examples)[index.numpy()]
        return keys


@contextmanager
def layers_scope(noise: NoiseSource, *path: str | int) -> Iterator[None]:
    """Let layers draw from a source inside the block."""
    with rng.torch_scope(noise.seed(*path, "layers")):
        if noise.private:
            _fill(torch.default_generator, noise)
        yield


def unit_scope(seed: int | None) -> AbstractContextManager[None]:
    """Let layers draw from a seed inside the block; None changes nothing."""
    return nullcontext() if seed is None else rng.torch_scope(seed)


def record_keys(examples: Examples) -> NDArray[np.uint64]:
    """Return a key for each record (n,): from its path if it is a file, otherwise from its content."""
    keys = _KEYS.get(examples)
    if keys is None:
        paths = getattr(examples, "paths", None)
        names = _contents(examples) if paths is None else (str(p).encode() for p in paths)
        keys = np.array([_key(name) for name in names], dtype=np.uint64)
        _KEYS[examples] = keys
    return keys


def _fill(generator: torch.Generator, noise: NoiseSource) -> None:
    """Fill all of a CPU generator's state from `noise`. A seed has only 32 bits, which an attacker could try out."""
    state = generator.get_state()
    words = (noise.uniform(_WORDS) * 2.0**32).long()
    state[_HEAD : _HEAD + 8 * _WORDS] = words.view(torch.uint8)
    generator.set_state(state)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    before = model.training
    model.train()
    try:
        yield
    finally:
        model.train(before)


def is_stochastic(model: nn.Module, loss: LossFn, x: Tensor, y: Tensor) -> bool:
    with rng.torch_scope(0), torch.no_grad(), _training(model):
        before = _states(x.device)
        loss(model, x, y)
        return any(not torch.equal(a, b) for a, b in zip(before, _states(x.device), strict=True))


def _states(device: torch.device) -> list[Tensor]:
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def _contents(examples: Examples) -> Iterator[bytes]:
    for index in torch.split(torch.arange(len(examples)), _BATCH):
        x, y = examples.batch(index)
        for row, label in zip(x.cpu(), y.tolist(), strict=True):
            yield row.contiguous().numpy().tobytes() + str(label).encode()


def _key(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
