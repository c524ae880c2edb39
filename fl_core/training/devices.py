"""The device of models: choose it by name, use deterministic kernels, and move data to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fl_core.errors import ConfigError
from fl_core.tensors import Tensor, torch
from fl_core.types.values import Examples

SHARE_OF_MEMORY = 0.5
"""Share of the device's free memory for examples; models and activations need the rest."""


def choose_device(name: str) -> torch.device:
    """Read cpu, cuda, cuda:N or auto (a GPU if there is one).

    Raises ConfigError (E-CFG-02) on another word, or if this machine has no such device. Guarantees: cuDNN does not
    round float32 to the ten bits of TF32, as it does by default; use bfloat16 for speed.
    """
    torch.backends.cudnn.allow_tf32 = False
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    sound = kind in ("cpu", "cuda") and (not number or (kind == "cuda" and number.isdecimal()))
    if not sound or int(number or 0) >= count:
        raise ConfigError(
            "E-CFG-02",
            f"expected --device cpu, auto or one of {count if kind == 'cuda' else torch.cuda.device_count()} GPUs "
            f"(cuda, cuda:0, ...), found {name!r}",
        )
    return torch.device(name)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use only deterministic kernels inside the block; it raises if an operation has none.

    Guarantees: a repeated run on one machine gives the same bits, also on a GPU; the settings are restored afterwards.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


@contextmanager
def cudnn_benchmark(wanted: bool) -> Iterator[None]:
    """Let cuDNN test its kernels for each new shape and use the fastest; without a GPU it changes nothing."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class OnDevice(Examples):
    """Examples that were read once onto a device.

    as_stored: whether they are kept as `Examples.stored`, so that they can be augmented on the device; if not,
    augmented examples are read from their source.
    """

    def __init__(self, source: Examples, device: torch.device, as_stored: bool = False) -> None:
        self.labels, self.groups = source.labels, source.groups
        if (paths := getattr(source, "paths", None)) is not None:
            self.paths = paths  # a record keeps its name on any device
        self._source, self._as_stored = source, as_stored
        read = source.stored if as_stored else lambda index: source.batch(index)[0]
        self._x = torch.cat([read(index).to(device) for index in torch.split(torch.arange(len(source)), 512)])
        self._y = source.labels.to(device)

    def stored(self, index: Tensor) -> Tensor:
        return self._x[index.to(self._y.device)] if self._as_stored else self._source.stored(index)

    def prepared(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:
        return self._source.prepared(x, augment)

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        on_device = index.to(self._y.device)
        if self._as_stored:
            return self.prepared(self._x[on_device], augment), self._y[on_device]
        if augment is not None:
            return self._source.batch(index, augment)
        return self._x[on_device], self._y[on_device]


def move_to_device(
    examples: Examples, device: torch.device, free: int, as_stored: bool = False
) -> tuple[Examples, int]:
    """Move examples to a device if they fit into `free` bytes; return them, moved or not, and the bytes left."""
    if device.type == "cpu" or len(examples) == 0:
        return examples, free
    first = torch.arange(1)
    x = examples.stored(first) if as_stored else examples.batch(first)[0]
    need = len(examples) * x.numel() * x.element_size()
    return (OnDevice(examples, device, as_stored), free - need) if need <= free else (examples, free)


def memory_for_examples(device: torch.device) -> int:
    return int(SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
