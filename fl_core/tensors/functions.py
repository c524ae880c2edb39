"""The functions of the module `torch` on NumPy. Each gives the same result as torch's, up to rounding of sums."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from fl_core.tensors import generator as _generator
from fl_core.tensors import layers as nn
from fl_core.tensors.array import (
    DTYPES,
    FLOAT32,
    Array,
    Device,
    DType,
    Number,
    Sorted,
    Tensor,
    combined,
    common_type,
    each,
    plain,
    promoted,
    sizes,
)
from fl_core.tensors.generator import Generator, default_generator

__all__ = ["Generator", "Tensor", "default_generator", "nn"]

__version__ = f"numpy {np.__version__}"
dtype, device = DType, Device
uint8, int32, int64, float16, float32, float64 = (
    DTYPES[np.dtype(name)] for name in ("uint8", "int32", "int64", "float16", "float32", "float64")
)
bool = DTYPES[np.dtype(np.bool_)]
long, bfloat16 = int64, None
"""NumPy has no bfloat16: no tensor has this type."""
nan = float("nan")
_threads = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]


# ---- made ------------------------------------------------------------------------------------------------------------


def tensor(data: Any, dtype: DType | None = None) -> Tensor:  # noqa: ANN401
    """Copy numbers; plain ones become int64 or float32, those of NumPy keep their type."""
    array = np.array(plain(data))
    if dtype is None and not isinstance(data, np.ndarray | np.generic) and array.dtype == np.float64:
        dtype = FLOAT32
    return Tensor(array if dtype is None else array.astype(dtype.numpy))


def as_tensor(data: Any, dtype: DType | None = None) -> Tensor:  # noqa: ANN401
    if isinstance(data, Tensor):
        return data if dtype is None else data.to(dtype)
    if isinstance(data, np.ndarray):
        return Tensor(data if dtype is None else data.astype(dtype.numpy, copy=False))
    return tensor(data, dtype)


def from_numpy(array: Array) -> Tensor:
    return Tensor(array)


def zeros(*shape: Any, dtype: DType = FLOAT32, device: Any = None) -> Tensor:  # noqa: ANN401, ARG001
    return Tensor(np.zeros(sizes(shape), dtype.numpy))


def ones(*shape: Any, dtype: DType = FLOAT32, device: Any = None) -> Tensor:  # noqa: ANN401, ARG001
    return Tensor(np.ones(sizes(shape), dtype.numpy))


def empty(*shape: Any, dtype: DType = FLOAT32) -> Tensor:  # noqa: ANN401
    return Tensor(np.empty(sizes(shape), dtype.numpy))


def full(shape: Sequence[int], value: Number, dtype: DType | None = None) -> Tensor:
    return Tensor(np.full(sizes(shape), value, (tensor(value).dtype if dtype is None else dtype).numpy))


def zeros_like(value: Tensor, dtype: DType | None = None) -> Tensor:
    return Tensor(np.zeros(value.shape, (dtype or value.dtype).numpy))


def ones_like(value: Tensor) -> Tensor:
    return Tensor(np.ones(value.shape, value.array.dtype))


def full_like(value: Tensor, number: Number) -> Tensor:
    return Tensor(np.full(value.shape, number, value.array.dtype))


def arange(*ends: int, device: Any = None) -> Tensor:  # noqa: ANN401, ARG001
    return Tensor(np.arange(*ends, dtype=np.int64))


def eye(size: int, dtype: DType = FLOAT32) -> Tensor:
    return Tensor(np.eye(size, dtype=dtype.numpy))


def randperm(n: int, generator: Generator) -> Tensor:
    return Tensor(_generator.permutation(n, generator))


def rand(*shape: Any, generator: Generator) -> Tensor:  # noqa: ANN401
    return Tensor(generator.uniform(math.prod(sizes(shape))).astype(np.float32).reshape(sizes(shape)))


def randint(most: int, shape: Sequence[int], generator: Generator) -> Tensor:
    return Tensor((generator.words(math.prod(shape)) % most).reshape(shape))


def randn(*shape: int, generator: Generator) -> Tensor:
    """Draw numbers that are normally distributed; their last bits are not torch's."""
    first, second = generator.uniform(2 * math.prod(shape)).reshape(2, *shape)
    return Tensor((np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)).astype(np.float32))


# ---- put together, taken apart ---------------------------------------------------------------------------------------


def cat(values: Sequence[Tensor], dim: int = 0) -> Tensor:
    kind: Any = None
    for value in values:
        kind = promoted(kind, value.array.dtype)
    return Tensor(np.concatenate([value.array.astype(kind, copy=False) for value in values], axis=dim))


def stack(values: Sequence[Tensor], dim: int = 0) -> Tensor:
    return cat([value.unsqueeze(dim) for value in values], dim)


def split(value: Tensor, size: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Cut along the first dimension into pieces of a size, or of these sizes; of none, one piece of none."""
    if isinstance(size, int):
        return tuple(value[start : start + size] for start in range(0, max(len(value), 1), size))
    ends = np.cumsum(size)
    return tuple(value[int(end) - n : int(end)] for n, end in zip(size, ends, strict=True))


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    kind = common_type(a, b)
    return Tensor(np.where(condition.array, np.asarray(plain(a), kind), np.asarray(plain(b), kind)))


def repeat_interleave(values: Tensor, times: Tensor) -> Tensor:
    return Tensor(np.repeat(values.array, times.array))


def nonzero(value: Tensor) -> Tensor:
    return Tensor(np.argwhere(value.array))


def tril(value: Tensor, diagonal: int = 0) -> Tensor:
    return Tensor(np.tril(value.array, diagonal))


def tril_indices(rows: int, columns: int, offset: int = 0) -> Tensor:
    return Tensor(np.stack(np.tril_indices(rows, offset, columns)))


def diag(value: Tensor) -> Tensor:
    return Tensor(np.diag(value.array))


# ---- each number, and sums -------------------------------------------------------------------------------------------


def isfinite(value: Tensor) -> Tensor:
    return Tensor(np.isfinite(value.array))


def isnan(value: Tensor) -> Tensor:
    return Tensor(np.isnan(value.array))


def nan_to_num(value: Tensor, nan: Number = 0.0) -> Tensor:
    return value.nan_to_num(nan)


def log(value: Tensor) -> Tensor:
    return each(np.log, value)


def log1p(value: Tensor) -> Tensor:
    return each(np.log1p, value)


def asinh(value: Tensor) -> Tensor:
    return each(np.arcsinh, value)


def sqrt(value: Tensor) -> Tensor:
    return each(np.sqrt, value)


def rsqrt(value: Tensor) -> Tensor:
    return 1.0 / each(np.sqrt, value)


def round(value: Tensor) -> Tensor:
    return value.round()


def sigmoid(value: Tensor) -> Tensor:
    return each(lambda x: 1 / (1 + np.exp(-x)), value)


def softmax(value: Tensor, dim: int) -> Tensor:
    powers = each(lambda x: np.exp(x - x.max(axis=dim, keepdims=True)), value)
    return powers / powers.sum(dim, keepdim=True)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    return combined(np.maximum, a, b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return combined(np.minimum, a, b)


def div(a: Tensor, b: Tensor | Number, *, rounding_mode: str = "", out: Tensor | None = None) -> Tensor:
    """Divide; rounding_mode: "trunc", towards zero, which for whole numbers is exact."""
    if rounding_mode == "trunc" and not a.is_floating_point():
        quotient = combined(lambda x, y: np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y)), a, b)
    else:
        quotient = a / b
        quotient = each(np.trunc, quotient) if rounding_mode == "trunc" else quotient
    return quotient if out is None else out.copy_(quotient)


def bincount(value: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return Tensor(np.bincount(value.array, None if weights is None else weights.array, minlength))


def unique(value: Tensor, *, return_inverse: Any = False, return_counts: Any = False) -> Any:  # noqa: ANN401
    """Return the values in order, and where asked for the place of each number among them, and how often it is."""
    parts = np.unique(value.array, return_inverse=return_inverse, return_counts=return_counts)
    return tuple(map(Tensor, parts)) if isinstance(parts, tuple) else Tensor(parts)


def sort(value: Tensor) -> Sorted:
    order = np.argsort(value.array, kind="stable")
    return Sorted(Tensor(np.take_along_axis(value.array, order, -1)), Tensor(order))


def argsort(value: Tensor, *, stable: Any = True) -> Tensor:  # noqa: ANN401, ARG001 - it always is
    return Tensor(np.argsort(value.array, kind="stable"))


def searchsorted(ordered: Tensor, values: Tensor, *, right: Any = False) -> Tensor:  # noqa: ANN401
    return Tensor(np.searchsorted(ordered.array, values.array, "right" if right else "left"))


def outer(a: Tensor, b: Tensor) -> Tensor:
    return Tensor(np.outer(a.array, b.array))


def einsum(terms: str, *values: Tensor) -> Tensor:
    return Tensor(np.einsum(terms, *(value.array for value in values), optimize=True))


def equal(a: Tensor, b: Tensor) -> Any:  # noqa: ANN401
    return a.shape == b.shape and np.array_equal(a.array, b.array)


def promote_types(a: DType, b: DType) -> DType:
    return DTYPES[promoted(a.numpy, b.numpy)]


def get_default_dtype() -> DType:
    return FLOAT32


def finfo(kind: DType) -> Any:  # noqa: ANN401
    return np.finfo(kind.numpy)


def iinfo(kind: DType) -> Any:  # noqa: ANN401
    return np.iinfo(kind.numpy)


def cholesky_solve(right: Tensor, factor: Tensor) -> Tensor:
    """Solve a system from the lower triangle of its matrix."""
    return Tensor(np.linalg.solve(factor.array.T, np.linalg.solve(factor.array, right.array)))


def _cholesky(a: Tensor) -> tuple[Tensor, Tensor]:
    try:
        return Tensor(np.linalg.cholesky(a.array)), tensor(0)
    except np.linalg.LinAlgError:
        return a, tensor(1)


def _vector_norm(value: Tensor, *, dim: int, keepdim: Any = False) -> Tensor:  # noqa: ANN401
    return Tensor(np.linalg.norm(value.array, axis=dim, keepdims=keepdim))


linalg = SimpleNamespace(
    eigh=lambda a: tuple(map(Tensor, np.linalg.eigh(a.array))), cholesky_ex=_cholesky, vector_norm=_vector_norm
)


# ---- the process -----------------------------------------------------------------------------------------------------


@contextmanager
def no_grad() -> Iterator[None]:
    """Do nothing: there are no gradients."""
    yield


@contextmanager
def _forked(devices: Sequence[int] = ()) -> Iterator[None]:  # noqa: ARG001
    state = default_generator.get_state()
    try:
        yield
    finally:
        default_generator.set_state(state)


def get_num_threads() -> int:
    return _threads[0]


def set_num_threads(number: int) -> None:
    """Set the number of images that pass through a body at once. Sums of NumPy do not depend on it."""
    _threads[0] = number


random = SimpleNamespace(fork_rng=_forked)
overrides = SimpleNamespace(TorchFunctionMode=nullcontext)
cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
version = SimpleNamespace(cuda=None)
backends = SimpleNamespace(cudnn=SimpleNamespace(allow_tf32=False, benchmark=False))
