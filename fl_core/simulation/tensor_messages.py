"""Plain values and tensors between two processes of one machine: the values first, then all bytes at once.

Tensors arrive as views of one buffer. The other side is this program, started by us: nothing is checked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fl_core.types.values import Bundle, Part, State

_ALIGNED = 16
Path = tuple[str, ...]
Named = list[tuple[Path, Tensor]]


def send(connection: Connection, head: object, tensors: Named) -> None:
    flat = [_bytes(value) for _, value in tensors]
    connection.send((head, [(path, value.dtype, tuple(value.shape)) for path, value in tensors]))
    if flat:
        connection.send_bytes(torch.cat(flat).numpy().data)


def receive(connection: Connection) -> tuple[object, Named]:
    """Wait for a message; raises EOFError where the other side has ended."""
    head, specs = connection.recv()
    if not specs:
        return head, []
    raw = bytearray(connection.recv_bytes())
    buffer = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    found, start = Named(), 0
    for path, dtype, shape in specs:
        size = dtype.itemsize * torch.Size(shape).numel()
        found.append((path, buffer[start : start + size].view(dtype).view(shape)))
        start += -(-size // _ALIGNED) * _ALIGNED
    return head, found


def size(tensors: Named) -> int:
    return sum(value.numel() * value.element_size() for _, value in tensors)


def of_state(state: State) -> Named:
    """List the tensors of a state; a group without any is a path of one."""
    found: Named = []
    for group, values in state.items():
        found += [((group, name), value) for name, value in values.items()] or [((group,), torch.zeros(0))]
    return found


def to_state(tensors: Named) -> State:
    found: dict[str, dict[str, Tensor]] = {}
    for (group, *names), value in tensors:
        found.setdefault(group, {}).update(dict.fromkeys(names, value))
    return dict(found)


def of_bundle(bundle: Bundle) -> Named:
    found: Named = []
    for name, part in bundle.items():
        found += [((name, "total", key), value) for key, value in part.total.items()]
        found.append(((name, "weight"), part.weight))
    return found


def to_bundle(tensors: Named) -> Bundle:
    found, totals = dict[str, Part](), dict[str, dict[str, Tensor]]()
    for (name, *rest), value in tensors:
        total = totals.setdefault(name, {})
        if rest[0] == "total":
            total[rest[1]] = value
        else:
            found[name] = Part(total, value)
    return found


def _bytes(value: Tensor) -> Tensor:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _ALIGNED))


def copied(tensors: Sequence[tuple[Path, Tensor]]) -> Named:
    """Copy tensors out of the buffer that they share with others."""
    return [(path, value.clone()) for path, value in tensors]


def taken_apart(value: object) -> tuple[bytes, list[Tensor]]:
    """Pickle a value without its tensors, and list those, each once: they may lie in a file that holds nothing else."""
    stream, tensors = io.BytesIO(), list[Tensor]()
    places: dict[int, int] = {}

    class Outside(pickle.Pickler):
        def persistent_id(self, found: object) -> int | None:
            if not isinstance(found, Tensor):
                return None
            if id(found) not in places:
                places[id(found)] = len(tensors)
                tensors.append(found)
            return places[id(found)]

    Outside(stream).dump(value)
    return stream.getvalue(), tensors


def put_together(pickled: bytes, tensors: Sequence[Tensor]) -> object:
    """Return the value that `taken_apart` took apart. It runs code of whoever pickled it."""

    class Inside(pickle.Unpickler):
        def persistent_load(self, place: int) -> Tensor:
            return tensors[place]

    found: object = Inside(io.BytesIO(pickled)).load()
    return found
