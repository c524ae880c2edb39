"""State and Bundle <-> files: safetensors, never pickle.

A file holds the tensors under running numbers and one metadata entry, the list of their paths, so that a name may
contain any character. Equal states give equal bytes, hence equal digests.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from fl_core.errors import ProtocolError
from fl_core.types.values import Bundle, Part, State, StoredTensors, Tensors
from service_core.storage.digests import file_digest

TensorPath = Sequence[str]
_Content = tuple[dict[str, Tensor], dict[str, str]]
"""Numbered tensors and the metadata that names them."""
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_MAX_HEADER_BYTES = 16 << 20
"""Some hundred thousand tensors: a longer header is no model's."""
_MAX_DIMENSIONS, _MAX_NUMBERS = 64, 1 << 48


def pack_state(state: State) -> bytes:
    """Write a State; groups and names in sorted order."""
    return save(*_of_state(state))


def pack_bundle(bundle: Bundle) -> bytes:
    """Write a Bundle; parts in sorted order, each total before its weight."""
    return save(*_of_bundle(bundle))


def write_state(state: State, file: Path) -> tuple[str, int]:
    """Write the bytes of `pack_state`, without syncing them, and return their digest and number; raises OSError."""
    return _write(_of_state(state), file)


def write_bundle(bundle: Bundle, file: Path) -> tuple[str, int]:
    """Write the bytes of `pack_bundle`, as `write_state` does."""
    return _write(_of_bundle(bundle), file)


def _of_state(state: State) -> _Content:
    entries = [((group, name), v) for group, values in sorted(state.items()) for name, v in sorted(values.items())]
    return _numbered(entries, sorted(state))


def _of_bundle(bundle: Bundle) -> _Content:
    entries: list[tuple[TensorPath, Tensor]] = []
    for name, part in sorted(bundle.items()):
        entries += [((name, "total", key), v) for key, v in sorted(part.total.items())]
        entries.append(((name, "weight"), part.weight))
    return _numbered(entries, sorted(bundle))


def _numbered(entries: Sequence[tuple[TensorPath, Tensor]], groups: Sequence[str]) -> _Content:
    paths = json.dumps({"groups": list(groups), "paths": [list(path) for path, _ in entries]}, separators=(",", ":"))
    tensors, storages = dict[str, Tensor](), set[int]()
    for name, (_, value) in zip(_names(len(entries)), entries, strict=True):
        tensor = value.detach().cpu().contiguous()
        if (storage := tensor.untyped_storage().data_ptr()) in storages:  # safetensors refuses tensors that share one
            tensor = tensor.clone()
        storages.add(storage)
        tensors[name] = tensor
    return tensors, {"consilium": paths}


def _names(count: int) -> list[str]:
    return [f"{number:06d}" for number in range(count)]


def _write(content: _Content, file: Path) -> tuple[str, int]:
    tensors, metadata = content
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else 0, f"{file} cannot be written: {error}") from error
    return file_digest(file), file.stat().st_size


class TensorFile:
    """An open file of tensors: what it holds is known, and read when asked for.

    paths: of each tensor, by its place   shapes, dtypes: at the same places
    Raises ProtocolError (E-WIRE-06) when the file is not ours: safetensors refuses offsets that are outside the file,
    overlap, leave gaps or do not fit their tensors; the rest is checked here.
    """

    def __init__(self, file: Path) -> None:
        self.name = file.name
        try:
            self._tensors = _open(file)
            header = json.loads((self._tensors.metadata() or {})["consilium"])
            self.groups, self.paths = _strings(header["groups"]), [tuple(_strings(path)) for path in header["paths"]]
            self._names = _names(len(self.paths))
            if sorted(self._tensors.keys()) != self._names or len(set(self.paths)) != len(self.paths):
                raise ValueError("the header and the tensors disagree")
            slices = [self._tensors.get_slice(name) for name in self._names]
            self.shapes = [tuple(entry.get_shape()) for entry in slices]
            if any(map(_is_absurd, self.shapes)):
                raise ValueError(f"a shape of more than {_MAX_DIMENSIONS} dimensions or {_MAX_NUMBERS} numbers")
            if unknown := {entry.get_dtype() for entry in slices} - set(_DTYPES):
                raise ValueError(f"numbers of the kinds {sorted(unknown)}, none of {[*_DTYPES]}")
            self.dtypes = [_DTYPES[entry.get_dtype()] for entry in slices]
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError("E-WIRE-06", f"expected tensors of Consilium in {file.name}, found: {error}") from error

    def read(self, place: int) -> Tensor:
        """Read a tensor; raises ProtocolError (E-WIRE-06) when that fails, for instance because the file was cut."""
        try:
            tensor: Tensor = self._tensors.get_tensor(self._names[place])
        except (SafetensorError, OSError) as error:
            path = "/".join(self.paths[place])
            raise ProtocolError("E-WIRE-06", f"tensor {path!r} of {self.name} cannot be read: {error}") from error
        return tensor


def _open(file: Path) -> Any:  # noqa: ANN401 - the library has no types for it
    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
    if length > _MAX_HEADER_BYTES:  # to read one takes many times its length in memory
        raise ValueError(f"a header of {length} bytes, more than {_MAX_HEADER_BYTES}")
    return safe_open(file, "pt", backend="pread")  # not mapped: whoever cut a mapped file would end this process


def _is_absurd(shape: tuple[int, ...]) -> bool:
    """Tell whether torch has no strides for a shape, or its product takes long: safetensors allows any beside a 0."""
    return len(shape) > _MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) > _MAX_NUMBERS


def _strings(names: object) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise ValueError("names of groups or tensors that are not lists of strings")
    return names


def read_state(file: Path) -> State:
    """Read a State; raises ProtocolError (E-WIRE-06) when the file holds something else."""
    tensors = TensorFile(file)
    state: dict[str, dict[str, Tensor]] = {group: {} for group in tensors.groups}
    for place, path in enumerate(tensors.paths):
        if len(path) != 2 or path[0] not in state:
            raise ProtocolError("E-WIRE-06", f"expected group and name, found the path {path}")
        state[path[0]][path[1]] = tensors.read(place)
    return state


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


class BundleTensors(StoredTensors):
    """Tensors of a file, read anew each time; raises ProtocolError (E-WIRE-06) as `TensorFile.read`."""

    def __init__(self, file: TensorFile, places: Mapping[str, int]) -> None:
        self.shapes = {name: file.shapes[place] for name, place in places.items()}
        self._file, self._places = file, places

    def __getitem__(self, name: str) -> Tensor:
        return self._file.read(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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
            raise ProtocolError("E-WIRE-06", f"expected a weight with every part, found none for {missing}")
        self._parts = {
            name: Part(BundleTensors(file, total), file.read(weights[name])) for name, total in totals.items()
        }
        self._dtypes = {
            name: {file.dtypes[place] for place in (weights[name], *total.values())} for name, total in totals.items()
        }

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def dtypes(self, name: str) -> set[torch.dtype]:
        return self._dtypes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
