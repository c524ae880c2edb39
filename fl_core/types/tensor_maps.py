"""Arithmetic on named tensors, with which methods work on models of any structure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from fl_core.errors import ProtocolError
from fl_core.tensors import Tensor, nn, torch
from fl_core.types.computed_tensors import StoredTensors
from fl_core.types.values import Tensors


def as_numpy(value: Tensor) -> NDArray[np.generic]:
    """Return a tensor's numbers, if possible without a copy; bfloat16 becomes float32."""
    numbers = value.detach().float() if value.dtype == torch.bfloat16 else value.detach()  # NumPy has no bfloat16
    return numbers.cpu().numpy()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their names in `state_dict`, neither copied nor detached.

    It takes a quarter of the time of `state_dict`, which matters for small models. It calls no hooks, since our models
    have none.
    """
    tensors: dict[str, Tensor] = {}
    _collect(model, "", tensors)
    return tensors


def _collect(module: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            tensors[prefix + name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            tensors[prefix + name] = buffer
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", tensors)


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Copy every floating-point parameter and buffer of `model`.

    Integer buffers (BatchNorm's `num_batches_tracked`) are left out: they are counters, whose average has no meaning,
    and our forward passes do not read them.
    """
    return {name: v.detach().clone() for name, v in named_tensors(model).items() if v.is_floating_point()}


def stored_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for a model's file: those of `copy_state`, not copied, and ONNX graphs as bytes."""
    return {n: v.detach() for n, v in named_tensors(model).items() if v.is_floating_point() or is_graph(n, v)}


def is_graph(name: str, value: Tensor) -> bool:
    """Tell whether a tensor contains the bytes of a graph's file."""
    return value.dtype == torch.uint8 and name.rpartition(".")[2] == "graph"


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Copy the trainable parameters alone, without buffers."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def load_state(model: nn.Module, values: Tensors) -> None:
    """Overwrite parameters and buffers by name, in place; raises ProtocolError (E-WIRE-06) on another name or shape.

    Guarantees: if `values` came from `copy_state` of the same model, all of them are overwritten.
    """
    state = named_tensors(model)
    with torch.no_grad():
        for name, value in values.items():
            if (place := state.get(name)) is None or place.shape != value.shape:
                actual = "no such tensor" if place is None else tuple(place.shape)
                raise ProtocolError("E-WIRE-06", f"expected {name} {tuple(value.shape)} in the model, found {actual}")
            place.copy_(value)


def add(a: Tensors, b: Tensors, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: v + (b[name] if scale == 1.0 else scale * b[name]) for name, v in a.items()}


def in_memory(state: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return a state with all tensors in memory, so that none is computed or read on each access."""
    return {group: dict(values) if isinstance(values, StoredTensors) else values for group, values in state.items()}


def sub(a: Tensors, b: Tensors) -> dict[str, Tensor]:
    return {name: v - b[name] for name, v in a.items()}


def scale(a: Tensors, factor: float) -> dict[str, Tensor]:
    return {name: factor * v for name, v in a.items()}


def zeros(a: Tensors) -> dict[str, Tensor]:
    return {name: torch.zeros_like(v) for name, v in a.items()}


def select(a: Tensors, keep: Callable[[str], bool]) -> dict[str, Tensor]:
    return {name: v for name, v in a.items() if keep(name)}


def squared_distance(a: Mapping[str, Tensor], b: Tensors) -> Tensor:
    """Return sum ||a - b||_2^2 over all entries of `a`, differentiable."""
    return torch.stack([(v - b[name]).square().sum() for name, v in a.items()]).sum()


def signature(msg: Mapping[str, Tensors]) -> dict[str, object]:
    """Return the names, shapes and types of the tensors of each group."""
    return {group: {n: (tuple(v.shape), v.dtype) for n, v in values.items()} for group, values in msg.items()}


def all_finite(a: Tensors) -> bool:
    """Tell whether no entry is NaN or infinite."""
    return all(bool(torch.isfinite(v).all()) for v in a.values())


def count(a: Tensors) -> int:
    return sum(v.numel() for v in a.values())


def digest(a: Tensors) -> str:
    """Return the SHA-256, in hex, over names, types, shapes and bytes in the order of the names."""
    h = hashlib.sha256()
    for name in sorted(a):
        v = a[name]
        h.update(f"{name}|{v.dtype}|{tuple(v.shape)}|".encode())
        h.update(v.detach().cpu().contiguous().view(-1).numpy().data)
    return h.hexdigest()
