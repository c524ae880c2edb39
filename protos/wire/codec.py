"""State and Bundle <-> bytes: safetensors, never pickle.

A file holds the tensors under running numbers and one metadata entry, the list of their paths, so that a name may
contain any character. Equal states give equal bytes, hence equal digests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fl_core.errors import ProtocolError
from fl_core.types.values import Bundle, State
from protos.storage.digests import digest as digest
from protos.storage.digests import file_digest as file_digest
from protos.storage.digests import write_sealed
from protos.storage.file_recycling import open_shared

TensorPath = Sequence[str]
_Entries = Sequence[tuple[TensorPath, Tensor]]
_TYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Types of numbers and their names in the format, in the order in which their tensors lie in a file."""
_ORDER = {dtype: place for place, dtype in enumerate(_TYPES)}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
LENGTH = 8
"""Bytes that say how long the index is, in front of it."""
_MOST_DIMENSIONS, _MOST_NUMBERS = 64, 1 << 48
_MOST_INDEX = 16 << 20
"""Bytes of an index at most, some hundred thousand tensors: a longer one is no model's."""


def pack_state(state: State) -> bytes:
    """Write a State; groups and names in sorted order."""
    return b"".join(_of_state(state))


def pack_bundle(bundle: Bundle) -> bytes:
    """Write a Bundle; parts in sorted order, each total before its weight."""
    return b"".join(_of_bundle(bundle))


def write_state(state: State, file: Path, sync: bool = True) -> tuple[str, int]:
    """Bring the bytes of `pack_state` to the disk and return their digest and number; see `write_sealed`."""
    return write_sealed(file, _of_state(state), sync)


def write_bundle(bundle: Bundle, file: Path, sync: bool = True) -> tuple[str, int]:
    """Bring the bytes of `pack_bundle` to the disk and return their digest and number; see `write_sealed`."""
    return write_sealed(file, _of_bundle(bundle), sync)


def nbytes(groups: Iterable[Mapping[str, Tensor]]) -> int:
    """Sum the bytes of tensors: about the size of their file."""
    return sum(v.nbytes for group in groups for v in group.values())


def _of_state(state: State) -> Iterator[memoryview]:
    entries = [((group, name), v) for group, values in sorted(state.items()) for name, v in sorted(values.items())]
    return _content(entries, sorted(state))


def _of_bundle(bundle: Bundle) -> Iterator[memoryview]:
    entries: list[tuple[TensorPath, Tensor]] = []
    for name, part in sorted(bundle.items()):
        entries += [((name, "total", key), v) for key, v in sorted(part.total.items())]
        entries.append(((name, "weight"), part.weight))
    return _content(entries, sorted(bundle))


def _content(entries: _Entries, groups: Sequence[str]) -> Iterator[memoryview]:
    """Give the tensors numbers, write down their paths, and give header and tensors piece by piece, without a copy.

    The bytes are those of `safetensors.torch.save`, whose format is: the header's length (8 bytes, little-endian), the
    header in JSON, filled up with spaces to a multiple of 8, and the tensors, the types of largest alignment first.
    https://github.com/huggingface/safetensors#format
    """
    paths = json.dumps({"groups": list(groups), "paths": [list(path) for path, _ in entries]}, separators=(",", ":"))
    if unknown := {v.dtype for _, v in entries} - set(_ORDER):
        raise ValueError(f"expected numbers of the kinds {[*_ORDER]}, found {unknown}")
    numbered = sorted(enumerate(v for _, v in entries), key=lambda entry: _ORDER[entry[1].dtype])
    header: dict[str, object] = {"__metadata__": {"consilium": paths}}
    end, names = 0, _names(len(entries))
    for i, v in numbered:
        begin, end = end, end + v.nbytes
        header[names[i]] = {"dtype": _TYPES[v.dtype], "shape": list(v.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(LENGTH, "little") + text)
    for _, v in numbered:
        if v.numel():
            yield _bytes(v)


def _bytes(v: Tensor) -> memoryview:
    """View a tensor's bytes, or those of its copy on the CPU; few calls, since a model has many tensors."""
    known = v.view(torch.int16) if v.dtype == torch.bfloat16 else v  # NumPy has no such numbers
    data = known.numpy(force=True).data
    return (data if data.c_contiguous else np.ascontiguousarray(data).data).cast("B")


class Entry(NamedTuple):
    """Where a tensor lies in a file; begin: offset of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numbers(self) -> int:
        """Count its numbers."""
        return math.prod(self.shape)


class Tensors:
    """A file of tensors, open to be read: what lies where.

    While it is open, or mapped into memory, it is not written over (`protos.storage.file_recycling`). Raises
    ProtocolError (E-WIRE-06) when the file is not ours.
    """

    def __init__(self, file: Path) -> None:
        self.file = open_shared(file)
        try:
            length = int.from_bytes(self.file.read(LENGTH), "little")
            if length > _MOST_INDEX:
                raise ValueError(f"an index of {length} bytes, more than {_MOST_INDEX}")
            with safe_open(file, "pt") as checked:  # every offset is inside the file, and belongs to one tensor
                header = json.loads((checked.metadata() or {})["consilium"])
                self.groups, self.paths = _strings(header["groups"]), [_strings(path) for path in header["paths"]]
                held = tuple(sorted(checked.keys()))
                names = _names(len(held))
                if held != names or len(held) != len(self.paths):
                    raise ValueError("the header and the tensors disagree")
            index = json.loads(self.file.read(length))
            found = entries_of({name: index[name] for name in names}, LENGTH + length)
            self.entries = list(found.values())
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            self.file.close()
            raise ProtocolError("E-WIRE-06", f"expected tensors of Consilium in {file.name}, found: {error}") from error


def _strings(found: object) -> list[str]:
    """Take a list of strings; raises ValueError on anything else."""
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError("names of groups or tensors that are not lists of strings")
    return found


def entries_of(index: Mapping[str, Mapping[str, Any]], start: int) -> dict[str, Entry]:
    """Read the index of a file of tensors, without its metadata. start: offset of the first tensor's first byte.

    Raises ValueError, KeyError, TypeError or AttributeError on what is none, in time that its length bounds.
    """
    for found in index.values():  # a product of ever so many numbers takes the square of their digits
        shape = found["shape"]
        if len(shape) > _MOST_DIMENSIONS or not all(isinstance(n, int) and 0 <= n < _MOST_NUMBERS for n in shape):
            raise ValueError(f"a shape that is not of up to {_MOST_DIMENSIONS} integers from 0 to {_MOST_NUMBERS - 1}")
    if unknown := {found["dtype"] for found in index.values()} - set(_DTYPES):
        raise ValueError(f"numbers of the kinds {unknown}, none of {[*_DTYPES]}")
    return {
        name: Entry(_DTYPES[found["dtype"]], tuple(found["shape"]), start + found["data_offsets"][0])
        for name, found in index.items()
    }


def _names(count: int) -> tuple[str, ...]:
    """Give so many tensors numbers."""
    return tuple(f"{number:06d}" for number in range(count))


def read_state(file: Path) -> State:
    """Read a State; raises ProtocolError (E-WIRE-06) when the file holds something else.

    Its tensors are the file mapped into memory: what is not read is not loaded.
    """
    tensors = Tensors(file)
    state: dict[str, dict[str, Tensor]] = {group: {} for group in tensors.groups}
    with tensors.file:
        mapped = mmap(tensors.file.fileno(), 0, access=ACCESS_COPY)
    for path, (dtype, shape, begin) in zip(tensors.paths, tensors.entries, strict=True):
        if len(path) != 2 or path[0] not in state:
            raise ProtocolError("E-WIRE-06", f"expected group and name, found the path {path}")
        empty, count = torch.empty(shape, dtype=dtype) if 0 in shape else None, math.prod(shape)
        value = torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin) if empty is None else empty
        state[path[0]][path[1]] = value.reshape(shape)
    return state
