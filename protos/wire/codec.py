"""State and Bundle <-> files: safetensors, never pickle.

A file holds the tensors under running numbers and one metadata entry, the list of their paths, so that a name may
contain any character. Equal states give equal bytes, hence equal digests.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fl_core.errors import ProtocolError
from fl_core.types.computed_tensors import StoredTensors
from fl_core.types.values import Bundle, Part, State, Tensors
from service_core.storage.digests import Hasher, write_all

if TYPE_CHECKING:  # a service without a run reads files and computes nothing
    import torch
    from torch import Tensor

TensorPath = Sequence[str]
_Content = tuple[Sequence["_Entry"], Sequence[str]]
"""What is written, in the order of the numbers, and the names of all groups."""
_DTYPES = {
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Torch's name of each and its bytes, in the order in which safetensors writes them."""
_KINDS = {f"torch.{dtype}": (place, kind) for place, (kind, (dtype, _)) in enumerate(_DTYPES.items())}
_PIECE = 1 << 20
"""Bytes that are written and hashed at a time, while they are in the processor's cache."""
_BLOCK = 1 << 17
"""Numbers that are read or computed, written and hashed at a time."""
_MAX_HEADER_BYTES = 16 << 20
"""Enough for some hundred thousand tensors; no model has more."""
_MAX_DIMENSIONS, _MAX_NUMBERS = 64, 1 << 48


def pack_state(state: State) -> bytes:
    """Write a State; groups and names in sorted order."""
    return b"".join(map(bytes, _pieces(_of_state(state))))


def pack_bundle(bundle: Bundle) -> bytes:
    """Write a Bundle; parts in sorted order, each total before its weight."""
    return b"".join(map(bytes, _pieces(_of_bundle(bundle))))


def write_state(state: State, file: Path) -> tuple[str, int]:
    """Write the bytes of `pack_state`, without syncing them, and return their digest and number; raises OSError."""
    return _write(_of_state(state), file)


def write_bundle(bundle: Bundle, file: Path) -> tuple[str, int]:
    """Write the bytes of `pack_bundle`, as `write_state` does."""
    return _write(_of_bundle(bundle), file)


class _Entry(NamedTuple):
    """A tensor that is written: its place in the groups, and where its numbers come from."""

    path: TensorPath
    tensors: Tensors
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, path: TensorPath, tensors: Tensors, name: str) -> _Entry:
        if isinstance(tensors, StoredTensors):
            return cls(path, tensors, name, tensors.dtype(name), tensors.shapes[name])
        return cls(path, tensors, name, tensors[name].dtype, tuple(tensors[name].shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[_KINDS[str(self.dtype)][1]][1]

    def pieces(self) -> Iterator[memoryview]:
        """Give its bytes in pieces that stay in the processor's cache; each is valid until the next one."""
        if isinstance(self.tensors, StoredTensors):
            yield from map(_bytes_of, self.tensors.blocks(self.name, _BLOCK))
            return
        data = _bytes_of(self.tensors[self.name].detach().cpu().contiguous())
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


def _of_state(state: State) -> _Content:
    entries = [
        _Entry.of((group, key), values, key) for group, values in sorted(state.items()) for key in sorted(values)
    ]
    return entries, sorted(state)


def _of_bundle(bundle: Bundle) -> _Content:
    entries = list[_Entry]()
    for name, part in sorted(bundle.items()):
        entries += [_Entry.of((name, "total", key), part.total, key) for key in sorted(part.total)]
        entries.append(_Entry.of((name, "weight"), {"weight": part.weight}, "weight"))
    return entries, sorted(bundle)


def _names(count: int) -> list[str]:
    return [f"{number:06d}" for number in range(count)]


def _write(content: _Content, file: Path) -> tuple[str, int]:
    """Write a file and hash what is written: nothing is read back."""
    hasher, size = Hasher(), 0
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with FileIO(descriptor, "w") as out:
            for piece in _pieces(content):
                write_all(out, piece)
                hasher.update(piece)
                size += len(piece)
    except OSError as error:
        raise OSError(error.errno, f"{file} cannot be written: {error.strerror}") from error
    return hasher.hexdigest(), size


def _pieces(content: _Content) -> Iterator[memoryview]:
    """Give the bytes of a file that safetensors would write; each piece is valid until the next one."""
    entries, groups = content
    named = list(zip(_names(len(entries)), entries, strict=True))
    named.sort(key=lambda item: (_KINDS[str(item[1].dtype)][0], item[0]))
    yield memoryview(_header(named, entries, groups))
    for _, entry in named:
        yield from entry.pieces()


def _header(named: Sequence[tuple[str, _Entry]], entries: Sequence[_Entry], groups: Sequence[str]) -> bytes:
    paths = json.dumps({"groups": groups, "paths": [list(entry.path) for entry in entries]}, separators=(",", ":"))
    header, end = dict[str, object]({"__metadata__": {"consilium": paths}}), 0
    for name, entry in named:
        begin, end = end, end + entry.nbytes
        kind = _KINDS[str(entry.dtype)][1]
        header[name] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(value: Tensor) -> memoryview:
    """View the bytes of a contiguous tensor."""
    from fl_core.tensors import torch

    return value.reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """An open file of tensors: what it holds is known, and read when asked for.

    paths: of each tensor, by its place   shapes, kinds: at the same places, kinds as in the file
    Raises ProtocolError (E-WIRE-06) when the file is not ours: safetensors refuses offsets that are outside the file,
    overlap, leave gaps or do not fit their tensors; the rest is checked here.
    """

    def __init__(self, file: Path) -> None:
        self.name = file.name
        try:
            with file.open("rb", buffering=0) as opened:
                length = int.from_bytes(opened.read(8), "little")
                if length > _MAX_HEADER_BYTES:  # to read one takes many times its length in memory
                    raise ValueError(f"a header of {length} bytes, more than {_MAX_HEADER_BYTES}")
                # Not mapped: whoever cut a mapped file would end this process.
                tensors: Any = safe_open(file, "np", backend="pread")  # for its header alone
                self._file = os.dup(opened.fileno())
            finalize(self, os.close, self._file)
            header = json.loads((tensors.metadata() or {})["consilium"])
            self.groups, self.paths = _strings(header["groups"]), [tuple(_strings(path)) for path in header["paths"]]
            names = _names(len(self.paths))
            if sorted(tensors.keys()) != names or len(set(self.paths)) != len(self.paths):
                raise ValueError("the header and the tensors disagree")
            slices = [tensors.get_slice(name) for name in names]
            self.shapes = [tuple(entry.get_shape()) for entry in slices]
            if any(map(_is_absurd, self.shapes)):
                raise ValueError(f"a shape of more than {_MAX_DIMENSIONS} dimensions or {_MAX_NUMBERS} numbers")
            self.kinds = [str(entry.get_dtype()) for entry in slices]
            if unknown := set(self.kinds) - set(_DTYPES):
                raise ValueError(f"numbers of the kinds {sorted(unknown)}, none of {[*_DTYPES]}")
            self._begins, begin = dict[int, int](), 8 + length
            for place in map(int, tensors.offset_keys()):  # one behind the other: safetensors refuses gaps
                self._begins[place] = begin
                begin += math.prod(self.shapes[place]) * _DTYPES[self.kinds[place]][1]
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError("E-WIRE-06", f"{file.name} does not contain tensors of Consilium: {error}") from error

    def dtype(self, place: int) -> torch.dtype:
        from fl_core.tensors import torch

        dtype: torch.dtype | None = getattr(torch, _DTYPES[self.kinds[place]][0])
        if dtype is None:  # without torch
            raise ProtocolError(
                "E-WIRE-06", f"expected numbers of a kind that NumPy has in {self.name}, found {self.kinds[place]}"
            )
        return dtype

    def read(self, place: int) -> Tensor:
        """Read a tensor; raises ProtocolError (E-WIRE-06) when that fails, for instance because the file was cut."""
        from fl_core.tensors import torch

        tensor = torch.empty(self.shapes[place], dtype=self.dtype(place))
        self._read_into(_bytes_of(tensor), place, 0)
        return tensor

    def arrays(self, part: str) -> dict[str, NDArray[np.uint8]]:
        """Read the tensors of bytes of a part of a bundle; raises as `read`."""
        read = dict[str, NDArray[np.uint8]]()
        for place, path in enumerate(self.paths):
            if path[:2] == (part, "total") and self.kinds[place] == "U8":
                read[path[2]] = np.empty(self.shapes[place], np.uint8)
                self._read_into(read[path[2]].reshape(-1).data, place, 0)
        return read

    def blocks(self, place: int, size: int) -> Iterator[Tensor]:
        """Read a tensor's numbers, `size` at a time, all into the same memory; raises as `read`."""
        from fl_core.tensors import torch

        left, at = math.prod(self.shapes[place]), 0
        room = torch.empty(min(left, size), dtype=self.dtype(place))
        memory = _bytes_of(room)
        while left:
            if left < len(room):
                room, memory = room[:left], memory[: left * room.itemsize]
            self._read_into(memory, place, at)
            yield room
            at += len(memory)
            left -= len(room)

    def digest(self, group: str) -> str:
        """Return `tensor_maps.digest` of a group of a State, a piece in memory at a time; raises as `read`."""
        hasher, room = hashlib.sha256(), memoryview(bytearray(_PIECE))
        for path, place in sorted((path, place) for place, path in enumerate(self.paths) if path[0] == group):
            shape, (dtype, width) = self.shapes[place], _DTYPES[self.kinds[place]]
            hasher.update(f"{path[-1]}|torch.{dtype}|{shape}|".encode())
            size = math.prod(shape) * width
            for at in range(0, size, _PIECE):
                piece = room[: min(_PIECE, size - at)]
                self._read_into(piece, place, at)
                hasher.update(piece)
        return hasher.hexdigest()

    def _read_into(self, room: memoryview, place: int, at: int) -> None:
        """Fill memory with the bytes of a tensor that begin at `at`."""
        at += self._begins[place]
        try:
            while room:
                if not (size := os.preadv(self._file, [room], at)):
                    raise OSError("the file ends before")
                room, at = room[size:], at + size
        except OSError as error:
            path = "/".join(self.paths[place])
            raise ProtocolError("E-WIRE-06", f"tensor {path!r} of {self.name} cannot be read: {error}") from error


def _is_absurd(shape: tuple[int, ...]) -> bool:
    """Tell whether torch has no strides for a shape, or its product takes long: safetensors allows any beside a 0."""
    return len(shape) > _MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) > _MAX_NUMBERS


def _strings(names: object) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise ValueError("names of groups or tensors that are not lists of strings")
    return names


def open_state(file: Path) -> State:
    """Open a State that stays in its file; raises ProtocolError (E-WIRE-06) when the file holds something else."""
    tensors = TensorFile(file)
    places: dict[str, dict[str, int]] = {group: {} for group in tensors.groups}
    for place, path in enumerate(tensors.paths):
        if len(path) != 2 or path[0] not in places:
            raise ProtocolError("E-WIRE-06", f"expected group and name, found the path {path}")
        places[path[0]][path[1]] = place
    return {group: FileTensors(tensors, names) for group, names in places.items()}


def read_state(file: Path) -> State:
    """Read a State into memory; raises as `open_state`, and as `TensorFile.read`."""
    return {group: dict(values) for group, values in open_state(file).items()}


WEIGHTS = "weights"
"""The one group of an object of weights that a run begins with; a server's state never has it alone."""


def write_weights(weights: Tensors, file: Path) -> tuple[str, int]:
    """Write weights that a run begins with, as `write_state` does."""
    return write_state({WEIGHTS: weights}, file)


def read_weights(file: Path) -> Tensors:
    """Read what `write_weights` wrote; raises ProtocolError (E-WIRE-06) when the file holds something else."""
    state = read_state(file)
    if list(state) != [WEIGHTS]:
        raise ProtocolError(
            "E-WIRE-06", f"expected an object of weights, found one of {', '.join(state)[:80] or 'none'}"
        )
    return state[WEIGHTS]


class FileTensors(StoredTensors):
    """Tensors of a file, read anew each time; raises ProtocolError (E-WIRE-06) as `TensorFile.read`."""

    def __init__(self, file: TensorFile, places: Mapping[str, int]) -> None:
        self.shapes = {name: file.shapes[place] for name, place in places.items()}
        self._file, self._places = file, places

    def __getitem__(self, name: str) -> Tensor:
        return self._file.read(self._places[name])

    def blocks(self, name: str, size: int) -> Iterator[Tensor]:
        return self._file.blocks(self._places[name], size)

    def dtype(self, name: str) -> torch.dtype:
        return self._file.dtype(self._places[name])


class BundleFile(Mapping[str, Part]):
    """A bundle that stays on the disk: its totals are read when they are asked for, so twelve of them take no memory.

    Raises ProtocolError (E-WIRE-06) when the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        file = TensorFile(path)
        totals, weights = {name: dict[str, int]() for name in file.groups}, dict[str, int]()
        for place, entry in enumerate(file.paths):
            match entry:
                case (name, "total", key) if name in totals:
                    totals[name][key] = place
                case (name, "weight") if name in totals:
                    weights[name] = place
                case _:
                    raise ProtocolError("E-WIRE-06", f"expected a part of a bundle, found the path {entry}")
        if missing := [name for name in totals if name not in weights]:
            raise ProtocolError("E-WIRE-06", f"every part needs a weight, and {missing} have none")
        self._parts = {name: Part(FileTensors(file, total), file.read(weights[name])) for name, total in totals.items()}
        self._dtypes = {
            name: {file.dtype(place) for place in (weights[name], *total.values())} for name, total in totals.items()
        }

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def dtypes(self, name: str) -> set[torch.dtype]:
        return self._dtypes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def read_bytes(file: Path, part: str) -> dict[str, NDArray[np.uint8]]:
    """Read the tensors of bytes of a part of a bundle, without torch; raises ProtocolError as `TensorFile`."""
    return TensorFile(file).arrays(part)
