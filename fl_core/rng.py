"""Explicit randomness: one generator per (seed, purpose path), no global state.

`stream(seed, "round", t, "silo", k, "sgd")` is the same in every process and in every order of calls, and two
different paths give independent streams. Noise of differential privacy in deployment does not come from here.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_LOCK = threading.RLock()


def derive(seed: int, *path: str | int) -> int:
    """Hash (seed, path) to 63 bits: the seed of one stream.

    Guarantees: the encoding is injective in the path, so ("a", 12) and ("a1", 2) are different streams.
    """
    h = hashlib.sha256(str(int(seed)).encode())
    for step in path:
        kind = b"i" if isinstance(step, int) else b"s"
        raw = str(step).encode()
        h.update(kind + len(raw).to_bytes(4, "little") + raw)
    return int.from_bytes(h.digest()[:8], "little") >> 1


def stream(seed: int, *path: str | int) -> torch.Generator:
    from fl_core.tensors import torch

    return torch.Generator().manual_seed(derive(seed, *path))


def numpy_stream(seed: int, *path: str | int) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *path))


@contextmanager
def torch_scope(seed: int, *path: str | int) -> Iterator[None]:
    """Seed torch's global generators inside the block, and restore them after it.

    For library code that takes no generator (weight initialisation, dropout). The generators belong to the process, so
    blocks of several threads run one after another.
    """
    from fl_core.tensors import torch

    number = derive(seed, *path)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with _LOCK, torch.random.fork_rng(devices=list(devices)):
        seed_torch(number)
        yield


def seed_torch(number: int) -> None:
    """Seed torch's global generators anew, inside of a `torch_scope`."""
    from fl_core.tensors import torch

    # Not torch.manual_seed: without a GPU it keeps a traceback for every kind of device, for ever (0.15 ms a call).
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)
