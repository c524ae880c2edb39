"""A bundle that stays on the disk: what is read of it is what is asked for, so twelve of them take no memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from fl_core.blockwise.buffer_pool import MEMORY
from fl_core.blockwise.lazy_tensors import Deferred, Filler, Numbers, numpy_type
from fl_core.errors import ProtocolError
from fl_core.types.values import Part
from protos.wire.codec import Entry, Tensors

Known = Mapping[Entry, tuple[float, float]]
"""Smallest and largest number of tensors of a file, see `protos.wire.streaming_minmax`."""


class FileTensors(Deferred):
    """Tensors of a file, read anew whenever somebody asks.

    Not mapped into memory: pages that are mapped count as this process's until they are taken out, for which every
    processor is interrupted, and a file that somebody cuts would end the process.
    Raises ProtocolError (E-WIRE-06) where a tensor can no longer be read: the disk fails, or somebody has cut the file.
    """

    def __init__(self, file: BinaryIO, entries: Mapping[str, Entry], known: Known) -> None:
        super().__init__({name: entry.shape for name, entry in entries.items()})
        self._file, self._entries, self._known = file, entries, known

    def dtype_of(self, name: str) -> torch.dtype:
        """Name the type of a tensor's numbers."""
        return self._entries[name].dtype

    def extremes(self, name: str) -> tuple[float, float] | None:
        """Give smallest and largest number where they were noted when the file arrived."""
        return self._known.get(self._entries[name])

    def filler(self, name: str) -> Filler:
        """Read."""
        dtype, _, begin = self._entries[name]

        def fill(start: int, out: Numbers) -> None:
            self._read(name, begin + start * dtype.itemsize, out.view(np.uint8))

        return fill

    def numbers(self, name: str) -> Numbers:
        """Read a tensor as a flat array; in one call, since of most models' tensors most are small."""
        entry = self._entries[name]
        found = np.empty(entry.numbers, numpy_type(entry.dtype))
        self._read(name, entry.begin, found.view(np.uint8))
        return found

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor."""
        entry = self._entries[name]
        raw = MEMORY.empty((entry.numbers * entry.dtype.itemsize,), torch.uint8)
        self._read(name, entry.begin, raw.numpy())
        return raw.view(entry.dtype).reshape(entry.shape)

    def _read(self, name: str, begin: int, room: Numbers) -> None:
        left, cause = room.data, "the file ends before it"
        try:
            while left and (found := os.preadv(self._file.fileno(), [left], begin)):
                left, begin = left[found:], begin + found
        except OSError as error:
            cause = str(error)
        if left:
            raise ProtocolError("E-WIRE-06", f"tensor {name!r} of {Path(self._file.name).name} cannot be read: {cause}")


class FileBundle(Mapping[str, Part]):
    """A bundle in a file; weights are read at once, totals when they are used.

    known: what was noted of these very bytes when they arrived.
    Raises ProtocolError (E-WIRE-06) when the file holds something else.
    """

    def __init__(self, file: Path, known: Known | None = None) -> None:
        known = known or {}
        tensors = Tensors(file)
        totals, weights = {name: dict[str, Entry]() for name in tensors.groups}, dict[str, Entry]()
        for path, entry in zip(tensors.paths, tensors.entries, strict=True):
            match path:
                case [name, "total", key] if name in totals:
                    totals[name][key] = entry
                case [name, "weight"] if name in totals:
                    weights[name] = entry
                case _:
                    raise ProtocolError("E-WIRE-06", f"expected a part of a bundle, found the path {path}")
        if missing := [name for name in totals if name not in weights]:
            raise ProtocolError("E-WIRE-06", f"expected a weight with every part, found none for {missing}")
        weighed = FileTensors(tensors.file, weights, known)
        self._parts = {
            name: Part(FileTensors(tensors.file, total, known), weighed[name]) for name, total in totals.items()
        }
        self._dtypes = {
            name: {weights[name].dtype, *(entry.dtype for entry in total.values())} for name, total in totals.items()
        }

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def dtypes(self, name: str) -> set[torch.dtype]:
        """Name the types of a part's numbers."""
        return self._dtypes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
