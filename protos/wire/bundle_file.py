"""A bundle that stays on the disk: a tensor is read when it is asked for, so twelve of them take no memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fl_core.errors import ProtocolError
from fl_core.types.values import Part, StoredTensors
from protos.wire.codec import TensorFile


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
    """A bundle in a file, its totals read when used; raises ProtocolError (E-WIRE-06) when it holds something else."""

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
