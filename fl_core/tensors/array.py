"""A tensor on NumPy, with the names, types and rules of torch; missing attributes raise AttributeError.

Types are promoted as in torch: a tensor with dimensions keeps its type in an operation with one without dimensions or
with a plain number, unless that is of a higher kind (bool, whole, floating point).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Number = bool | int | float
Int = int  # a tensor's methods have the names int, bool and float
Bool = bool
Float = float


class DType:
    """The type of a tensor's numbers; its text is torch's, which digests and files contain."""

    def __init__(self, name: str) -> None:
        self.name, self.numpy = name, np.dtype(name)
        self.itemsize = self.numpy.itemsize
        self.is_floating_point = self.numpy.kind == "f"

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _dtype_of, (self.numpy,)


DTYPES = {
    np.dtype(name): DType(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
BOOL, INT64, FLOAT32 = (DTYPES[np.dtype(name)] for name in ("bool", "int64", "float32"))


def _dtype_of(kind: np.dtype[Any]) -> DType:
    return DTYPES[kind]


class Device:
    """The CPU; a GPU needs torch."""

    def __init__(self, name: str | Device) -> None:
        self.type, _, number = str(name).partition(":")
        self.index = int(number) if number else None

    def __repr__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __enter__(self) -> None:
        """Do nothing: new tensors lie on the CPU, and only a size is asked of those that torch would not make."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


CPU = Device("cpu")


class Sorted(NamedTuple):
    """What sorting and extremes along a dimension return."""

    values: Tensor
    indices: Tensor


class Tensor:
    """Numbers of one type in one shape."""

    __slots__ = ("__weakref__", "array", "requires_grad")
    __hash__ = object.__hash__

    def __init__(self, array: Any) -> None:  # noqa: ANN401 - scalars of NumPy as well
        self.array: Array = np.asarray(array)
        self.requires_grad = False

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> DType:
        return DTYPES[self.array.dtype]

    @property
    def shape(self) -> tuple[Int, ...]:
        return self.array.shape

    @property
    def device(self) -> Device:
        return CPU

    @property
    def itemsize(self) -> Int:
        return self.array.itemsize

    def element_size(self) -> Int:
        return self.array.itemsize

    def numel(self) -> Int:
        return self.array.size

    def dim(self) -> Int:
        return self.array.ndim

    def is_floating_point(self) -> Bool:
        return self.dtype.is_floating_point

    def requires_grad_(self, wanted: Bool = True) -> Self:
        self.requires_grad = wanted
        return self

    def tolist(self) -> Any:  # noqa: ANN401
        return self.array.tolist()

    def item(self) -> Any:  # noqa: ANN401
        return self.array.item()

    def numpy(self) -> Array:
        return self.array

    def __repr__(self) -> str:
        return f"tensor({self.array!r})"

    def __len__(self) -> Int:
        return len(self.array)

    def __iter__(self) -> Iterator[Tensor]:
        return map(Tensor, self.array)

    def __bool__(self) -> Bool:
        return bool(self.array)

    def __int__(self) -> Int:
        return int(self.array.item())

    def __float__(self) -> Float:
        return float(self.array.item())

    def __index__(self) -> Int:
        return int(self.array.item())

    def __getitem__(self, key: Any) -> Tensor:  # noqa: ANN401
        return Tensor(self.array[plain(key)])

    def __setitem__(self, key: Any, value: Tensor | Number) -> None:  # noqa: ANN401
        self.array[plain(key)] = value.array if isinstance(value, Tensor) else value

    # ---- types and places ----------------------------------------------------------------------------------------

    def to(self, *wanted: Any, non_blocking: Bool = False, copy: Bool = False) -> Tensor:  # noqa: ANN401, ARG002
        """Return the numbers as another type, or as that of another tensor; any device is the CPU."""
        for one in wanted:
            kind = one.dtype if isinstance(one, Tensor) else one
            if isinstance(kind, DType):
                return self._as(kind, copy)
        return self.clone() if copy else self

    def _as(self, kind: DType, copy: Bool = False) -> Tensor:
        if self.array.dtype == kind.numpy and not copy:
            return self
        with np.errstate(all="ignore"):
            return Tensor(self.array.astype(kind.numpy))

    def double(self) -> Tensor:
        return self._as(DTYPES[np.dtype(np.float64)])

    def float(self) -> Tensor:
        return self._as(FLOAT32)

    def long(self) -> Tensor:
        return self._as(INT64)

    def int(self) -> Tensor:
        return self._as(DTYPES[np.dtype(np.int32)])

    def bool(self) -> Tensor:
        return self._as(BOOL)

    def cpu(self) -> Tensor:
        return self

    def detach(self) -> Tensor:
        return Tensor(self.array) if self.requires_grad else self

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array).reshape(self.shape))

    def clone(self) -> Tensor:
        return Tensor(self.array.copy())

    # ---- shapes --------------------------------------------------------------------------------------------------

    @property
    def T(self) -> Tensor:  # noqa: N802
        return Tensor(self.array.T)

    def reshape(self, *shape: Any) -> Tensor:  # noqa: ANN401
        return Tensor(self.array.reshape(sizes(shape)))

    def view(self, *shape: Any) -> Tensor:  # noqa: ANN401
        """Return the same memory in another shape, or as another type."""
        if isinstance(shape[0], DType):
            return Tensor(self.array.view(shape[0].numpy))
        viewed = self.array.view()
        viewed.shape = sizes(shape)
        return Tensor(viewed)

    def flatten(self, start: Int = 0, end: Int = -1) -> Tensor:
        first, last = int(start) % max(self.dim(), 1), int(end) % max(self.dim(), 1)
        middle = math.prod(self.shape[first : last + 1])
        return Tensor(self.array.reshape(*self.shape[:first], middle, *self.shape[last + 1 :]))

    def unflatten(self, at: Int, shape: Sequence[Int]) -> Tensor:
        place = int(at) % self.dim()
        return Tensor(self.array.reshape(*self.shape[:place], *map(int, shape), *self.shape[place + 1 :]))

    def unsqueeze(self, at: Int) -> Tensor:
        return Tensor(np.expand_dims(self.array, int(at)))

    def squeeze(self, at: Int) -> Tensor:
        return Tensor(np.squeeze(self.array, int(at))) if self.shape[int(at)] == 1 else self

    def permute(self, *order: Int) -> Tensor:
        return Tensor(self.array.transpose(*map(int, order)))

    def expand(self, *shape: Any) -> Tensor:  # noqa: ANN401
        wanted = sizes(shape)
        added = len(wanted) - self.dim()
        whole = [self.shape[i - added] if size == -1 else size for i, size in enumerate(wanted)]
        return Tensor(np.broadcast_to(self.array, whole))

    def expand_as(self, other: Tensor) -> Tensor:
        return Tensor(np.broadcast_to(self.array, other.shape))

    def diagonal(self, *, dim1: Int = 0, dim2: Int = 1) -> Tensor:
        return Tensor(self.array.diagonal(axis1=int(dim1), axis2=int(dim2)))

    def gather(self, at: Int, index: Tensor) -> Tensor:
        return Tensor(np.take_along_axis(self.array, index.array, int(at)))

    def repeat_interleave(self, times: Int) -> Tensor:
        return Tensor(np.repeat(self.array, int(times)))

    def new_zeros(self, *shape: Any) -> Tensor:  # noqa: ANN401
        return Tensor(np.zeros(sizes(shape), self.array.dtype))

    def new_ones(self, *shape: Any) -> Tensor:  # noqa: ANN401
        return Tensor(np.ones(sizes(shape), self.array.dtype))

    def new_empty(self, *shape: Any) -> Tensor:  # noqa: ANN401
        return Tensor(np.empty(sizes(shape), self.array.dtype))

    def new_full(self, shape: Sequence[Int], value: Number) -> Tensor:
        return Tensor(np.full(sizes(shape), value, self.array.dtype))

    # ---- arithmetic ----------------------------------------------------------------------------------------------

    def __add__(self, other: Tensor | Number) -> Tensor:
        return combined(np.add, self, other)

    def __radd__(self, other: Number) -> Tensor:
        return combined(np.add, other, self)

    def __sub__(self, other: Tensor | Number) -> Tensor:
        return combined(np.subtract, self, other)

    def __rsub__(self, other: Number) -> Tensor:
        return combined(np.subtract, other, self)

    def __mul__(self, other: Tensor | Number) -> Tensor:
        return combined(np.multiply, self, other)

    def __rmul__(self, other: Number) -> Tensor:
        return combined(np.multiply, other, self)

    def __truediv__(self, other: Tensor | Number) -> Tensor:
        return combined(np.true_divide, self, other, floating=True)

    def __rtruediv__(self, other: Number) -> Tensor:
        return combined(np.true_divide, other, self, floating=True)

    def __floordiv__(self, other: Tensor | Number) -> Tensor:
        return combined(np.floor_divide, self, other)

    def __mod__(self, other: Tensor | Number) -> Tensor:
        return combined(np.mod, self, other)

    def __pow__(self, other: Tensor | Number) -> Tensor:
        return combined(np.power, self, other)

    def __rshift__(self, other: Tensor | Number) -> Tensor:
        return combined(np.right_shift, self, other)

    def __and__(self, other: Tensor | Number) -> Tensor:
        return combined(np.bitwise_and, self, other)

    def __or__(self, other: Tensor | Number) -> Tensor:
        return combined(np.bitwise_or, self, other)

    def __invert__(self) -> Tensor:
        return Tensor(~self.array)

    def __neg__(self) -> Tensor:
        return Tensor(-self.array)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return combined(np.equal, self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return combined(np.not_equal, self, other)

    def __lt__(self, other: Tensor | Number) -> Tensor:
        return combined(np.less, self, other)

    def __le__(self, other: Tensor | Number) -> Tensor:
        return combined(np.less_equal, self, other)

    def __gt__(self, other: Tensor | Number) -> Tensor:
        return combined(np.greater, self, other)

    def __ge__(self, other: Tensor | Number) -> Tensor:
        return combined(np.greater_equal, self, other)

    def __matmul__(self, other: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(self.array @ other.array)

    def copy_(self, other: Tensor) -> Self:
        with np.errstate(all="ignore"):
            self.array[...] = other.array
        return self

    def __iadd__(self, other: Tensor | Number) -> Self:
        return self.copy_(self + other)

    def __isub__(self, other: Tensor | Number) -> Self:
        return self.copy_(self - other)

    def __imul__(self, other: Tensor | Number) -> Self:
        return self.copy_(self * other)

    def __itruediv__(self, other: Tensor | Number) -> Self:
        return self.copy_(self / other)

    def __ior__(self, other: Tensor | Number) -> Self:
        return self.copy_(self | other)

    add_, mul_, div_ = __iadd__, __imul__, __itruediv__

    def index_add_(self, at: Int, index: Tensor, rows: Tensor) -> Self:
        np.add.at(np.moveaxis(self.array, int(at), 0), index.array, np.moveaxis(rows.array, int(at), 0))
        return self

    def scatter_reduce(self, at: Int, index: Tensor, values: Tensor, reduce: str) -> Tensor:
        assert (at, reduce) == (0, "amax")
        reduced = self.clone()
        np.maximum.at(reduced.array, index.array, values.array)
        return reduced

    # ---- each number ---------------------------------------------------------------------------------------------

    def abs(self) -> Tensor:
        return Tensor(np.abs(self.array))

    def square(self) -> Tensor:
        return self * self

    def sqrt(self) -> Tensor:
        return each(np.sqrt, self)

    def reciprocal(self) -> Tensor:
        return 1.0 / self

    def exp(self) -> Tensor:
        return each(np.exp, self)

    def round(self) -> Tensor:
        return each(np.rint, self)

    def round_(self) -> Self:
        return self.copy_(self.round())

    def trunc_(self) -> Self:
        return self.copy_(each(np.trunc, self))

    def floor(self) -> Tensor:
        return each(np.floor, self)

    def clamp(self, min: Tensor | Number | None = None, max: Tensor | Number | None = None) -> Tensor:
        kept = self
        for bound, choose in ((min, np.maximum), (max, np.minimum)):
            kept = kept if bound is None else combined(choose, kept, bound)
        return kept

    def clamp_(self, min: Number | None = None, max: Number | None = None) -> Self:
        return self.copy_(self.clamp(min, max))

    def nan_to_num(self, nan: Number = 0.0, posinf: Number | None = None, neginf: Number | None = None) -> Tensor:
        return Tensor(np.nan_to_num(self.array, nan=nan, posinf=posinf, neginf=neginf))

    def masked_fill(self, mask: Tensor, value: Number) -> Tensor:
        return Tensor(np.where(mask.array, np.asarray(value, self.array.dtype), self.array))

    # ---- over a dimension ----------------------------------------------------------------------------------------

    def sum(self, dim: Any = None, keepdim: Bool = False) -> Tensor:  # noqa: ANN401
        kind = None if self.is_floating_point() else np.int64
        return Tensor(self.array.sum(axis=dim, dtype=kind, keepdims=keepdim))

    def mean(self, dim: Any = None, keepdim: Bool = False) -> Tensor:  # noqa: ANN401
        with np.errstate(all="ignore"):
            return Tensor(self.array.sum(axis=dim, keepdims=keepdim) / self.array.dtype.type(self._along(dim)))

    def var(self, *, correction: Number = 1, unbiased: Bool = True) -> Tensor:
        spread = (self - self.mean()).square().sum()
        return spread / (self.numel() - (correction if unbiased else 0))

    def norm(self, *, dim: Int, keepdim: Bool = False) -> Tensor:
        return self.square().sum(int(dim), keepdim).sqrt()

    def any(self, dim: Int | None = None) -> Tensor:
        return Tensor(self.array.any(axis=None if dim is None else int(dim)))

    def all(self, dim: Int | None = None) -> Tensor:
        return Tensor(self.array.all(axis=None if dim is None else int(dim)))

    def max(self) -> Tensor:
        return Tensor(self.array.max())

    def min(self) -> Tensor:
        return Tensor(self.array.min())

    def amax(self, dim: Int, keepdim: Bool = False) -> Tensor:
        return Tensor(self.array.max(axis=int(dim), keepdims=keepdim))

    def argmax(self, dim: Int) -> Tensor:
        return Tensor(self.array.argmax(axis=int(dim)))

    def cumsum(self, dim: Int) -> Tensor:
        return Tensor(self.array.cumsum(axis=int(dim), dtype=None if self.is_floating_point() else np.int64))

    def _along(self, dim: Any) -> Any:  # noqa: ANN401
        axes = () if dim is None else dim if isinstance(dim, tuple) else (dim,)
        return math.prod(self.shape[axis] for axis in axes) if axes else self.array.size


def plain(key: Any) -> Any:  # noqa: ANN401
    """Return an index, a number or a nested list with arrays in the place of tensors."""
    if isinstance(key, Tensor):
        return key.array
    return type(key)(map(plain, key)) if isinstance(key, list | tuple) else key


def sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    """Read sizes that are given one by one or as one sequence."""
    whole = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    return tuple(map(int, whole))


def each(operation: Callable[[Array], Any], value: Tensor) -> Tensor:
    """Apply a function to every number; whole ones become float32 first."""
    with np.errstate(all="ignore"):
        return Tensor(operation((value if value.is_floating_point() else value.float()).array))


def combined(operation: Callable[..., Any], a: Any, b: Any, *, floating: bool = False) -> Tensor:  # noqa: ANN401
    """Apply a function to two tensors or numbers, in the type that torch gives it; floating: whole numbers are not."""
    kind = common_type(a, b)
    kind = FLOAT32.numpy if floating and kind.kind != "f" else kind
    with np.errstate(all="ignore"):
        return Tensor(operation(_cast(a, kind), _cast(b, kind)))


def _cast(value: Tensor | Number, kind: np.dtype[Any]) -> Array:
    array = value.array if isinstance(value, Tensor) else np.asarray(value)
    return array.astype(kind, copy=False)


def common_type(*values: Tensor | Number) -> np.dtype[Any]:
    """Return the type of a result of these operands."""
    wide, single, bare = (None, None, None)
    for value in values:
        if not isinstance(value, Tensor):
            bare = promoted(bare, _of_number(value))
        elif value.dim():
            wide = promoted(wide, value.array.dtype)
        else:
            single = promoted(single, value.array.dtype)
    kind = wide
    for lower in (single, bare):
        if lower is not None and (kind is None or _rank(lower) > _rank(kind)):
            kind = promoted(kind, lower)
    assert kind is not None
    return kind


def promoted(a: np.dtype[Any] | None, b: np.dtype[Any] | None) -> np.dtype[Any]:
    """Return the type for numbers of two types: the one of the higher kind, or of one kind the wider one."""
    if a is None or b is None:
        one = b if a is None else a
        assert one is not None
        return one
    if _rank(a) != _rank(b):
        return a if _rank(a) > _rank(b) else b
    return np.promote_types(a, b)


def _rank(kind: np.dtype[Any]) -> int:
    return {"b": 0, "u": 1, "i": 1, "f": 2}[kind.kind]


def _of_number(value: Number) -> np.dtype[Any]:
    if isinstance(value, bool | np.bool_):
        return BOOL.numpy
    return INT64.numpy if isinstance(value, int | np.integer) else FLOAT32.numpy
