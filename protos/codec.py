"""State and Bundle <-> bytes: safetensors, never pickle.

A file holds the tensors under running numbers and one metadata entry, the list of their paths, so that a name may
contain any character. Equal states give equal bytes, hence equal digests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from fl_core.errors import ProtocolError
from fl_core.types import Bundle, Part, State
from protos.digests import contribution_id as contribution_id
from protos.digests import digest as digest
from protos.digests import file_digest as file_digest

TensorPath = Sequence[str]
_Content = tuple[dict[str, Tensor], dict[str, str]]


def pack_state(state: State) -> bytes:
    """Write a State; groups and names in sorted order."""
    tensors, metadata = _of_state(state)
    return bytes(save(tensors, metadata))


def pack_bundle(bundle: Bundle) -> bytes:
    """Write a Bundle; parts in sorted order, each total before its weight."""
    tensors, metadata = _of_bundle(bundle)
    return bytes(save(tensors, metadata))


def write_state(state: State, file: Path) -> None:
    """Write the bytes of `pack_state` to a file, mode 0600, without holding them in memory."""
    tensors, metadata = _of_state(state)
    save_file(tensors, file, metadata)


def write_bundle(bundle: Bundle, file: Path) -> None:
    """Write the bytes of `pack_bundle` to a file, mode 0600, without holding them in memory."""
    tensors, metadata = _of_bundle(bundle)
    save_file(tensors, file, metadata)


def _of_state(state: State) -> _Content:
    entries = [((group, name), v) for group, values in sorted(state.items()) for name, v in sorted(values.items())]
    return _content(entries, sorted(state))


def _of_bundle(bundle: Bundle) -> _Content:
    entries: list[tuple[TensorPath, Tensor]] = []
    for name, part in sorted(bundle.items()):
        entries += [((name, "total", key), v) for key, v in sorted(part.total.items())]
        entries.append(((name, "weight"), part.weight))
    return _content(entries, sorted(bundle))


def _content(entries: Sequence[tuple[TensorPath, Tensor]], groups: Sequence[str]) -> _Content:
    """Give the tensors numbers and write down their paths."""
    tensors = {f"{i:06d}": v.detach().cpu().contiguous() for i, (_, v) in enumerate(entries)}
    header = json.dumps({"groups": list(groups), "paths": [list(path) for path, _ in entries]}, separators=(",", ":"))
    return tensors, {"consilium": header}


def _paths(file: Path) -> tuple[list[str], list[list[str]]]:
    """Read the header alone; raises ProtocolError (E-WIRE-06) when the file is not ours."""
    try:
        with safe_open(file, "pt") as f:
            header = json.loads((f.metadata() or {})["consilium"])
            groups, paths = list(header["groups"]), [list(path) for path in header["paths"]]
            if sorted(f.keys()) != [f"{i:06d}" for i in range(len(paths))]:
                raise ValueError("the header and the tensors disagree")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ProtocolError("E-WIRE-06", f"expected tensors of Consilium in {file.name}, found: {error}") from error
    return groups, paths


def read_state(file: Path) -> State:
    """Read a State; raises ProtocolError (E-WIRE-06) when the file holds something else."""
    groups, paths = _paths(file)
    state: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
    with safe_open(file, "pt") as f:
        for i, path in enumerate(paths):
            if len(path) != 2 or path[0] not in state:
                raise ProtocolError("E-WIRE-06", f"expected group and name, found the path {path}")
            state[path[0]][path[1]] = f.get_tensor(f"{i:06d}")
    return state


class FileBundle(Mapping[str, Part]):
    """A bundle that stays on disk: a part is read when it is asked for, so twelve waiting bundles cost no memory."""

    def __init__(self, file: Path) -> None:
        self._file = file
        groups, paths = _paths(file)
        self._index: dict[str, dict[str | None, str]] = {name: {} for name in groups}
        for i, path in enumerate(paths):
            if len(path) not in (2, 3) or path[0] not in self._index or path[1] not in ("total", "weight"):
                raise ProtocolError("E-WIRE-06", f"expected a part of a bundle, found the path {path}")
            self._index[path[0]][path[2] if path[1] == "total" else None] = f"{i:06d}"
        if missing := [name for name, keys in self._index.items() if None not in keys]:
            raise ProtocolError("E-WIRE-06", f"expected a weight with every part, found none for {missing}")

    def __getitem__(self, name: str) -> Part:
        with safe_open(self._file, "pt") as f:
            tensors: dict[str | None, Tensor] = {key: f.get_tensor(i) for key, i in self._index[name].items()}
        weight = tensors.pop(None)
        return Part({key: v for key, v in tensors.items() if key is not None}, weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)
