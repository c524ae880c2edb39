"""Measures the memory of live tensors after each operation of torch.

A separate module, since it needs torch: `memory_need` also runs without torch, and then counts in another way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fl_core.errors import RefusedError
from fl_core.training.memory import FEW


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """After each operation, adds up the tensors made since the start; raises above a limit."""

    def __init__(self, device: torch.device, most: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._most = device, most
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes = 0
        self.training = False
        self.after: list[int] = []
        self.in_training: list[bool] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes as long as the step

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor) and value.device.type == self._device.type:
                self._note(value.untyped_storage())
        self.after.append(self._bytes)
        self.in_training.append(self.training)
        if self._most is not None and self._bytes > self._most:
            raise RefusedError(
                "E-RUN-38",
                f"not enough free memory on {self._device} for a step of {FEW[-1]} examples: choose a smaller model "
                "or smaller images",
            )
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return

        def freed(_: object) -> None:
            self._bytes -= size
            self._held.pop(key, None)

        self._held[key] = weakref.ref(storage, freed)
        self._bytes += size
