"""What stands for torch where it is not installed gives what torch gives: types, shapes, promotion and numbers."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_core.tensors import functions as lean

ROOT = Path(__file__).parents[3]
DRAW = np.random.default_rng(5)
F32, F64 = DRAW.standard_normal((6, 4)).astype(np.float32), DRAW.standard_normal((6, 4))
INTS, MASK = DRAW.integers(-5, 9, (6, 4)), DRAW.random((6, 4)) > 0.5
LABELS, BYTES = np.array([0, 2, 1, 2, 0, 3]), DRAW.integers(0, 255, (6, 4), dtype=np.uint8)
SQUARE = F64.T @ F64 + np.eye(4)
WILD = np.array([[1.0, np.nan, np.inf, -np.inf], [0.0, -0.0, 1e30, -2.5]], dtype=np.float32)


def exact(t: Any) -> dict[str, Callable[[], Any]]:
    """Calls whose results are the same to the last bit; t: torch, or what stands for it."""
    f, d, i, m, y, b, w = (t.from_numpy(a.copy()) for a in (F32, F64, INTS, MASK, LABELS, BYTES, WILD))
    one, two = t.tensor(0.5, dtype=t.float64), t.tensor(3)
    g = lambda: t.Generator().manual_seed(2**40 + 7)  # noqa: E731
    return {
        "f + d": lambda: f + d,
        "f * 0-dim double": lambda: f * one,
        "0-dim double * f": lambda: one * f,
        "i * 0-dim double": lambda: i * one,
        "f - 1.5": lambda: f - 1.5,
        "1.5 - i": lambda: 1.5 - i,
        "i + 2": lambda: i + 2,
        "i / 2": lambda: i / 2,
        "i / f": lambda: i / f,
        "1 / 0-dim": lambda: 1.0 / two,
        "b * i": lambda: b * i,
        "b / 255": lambda: b.float() / 255,
        "i % 3": lambda: i % 3,
        "i // 3": lambda: i // 3,
        "i >> 1": lambda: i >> 1,
        "f ** 2": lambda: f**2,
        "m & ~m": lambda: m & ~m,
        "m | (f > 0)": lambda: m | (f > 0),
        "-f": lambda: -f,
        "compare with a number": lambda: f >= 0.3,
        "compare types": lambda: i == f.round(),
        "not equal": lambda: i != 2,
        "m.sum": lambda: m.sum(0),
        "i.sum keepdim": lambda: i.sum(1, keepdim=True),
        "i.sum all": lambda: i.sum(),
        "any": lambda: m.any(1),
        "all": lambda: m.all(),
        "max": lambda: d.max(),
        "amax": lambda: d.abs().amax(1, keepdim=True),
        "argmax": lambda: f.argmax(1),
        "cumsum": lambda: i.cumsum(0),
        "clamp": lambda: f.clamp(-0.5, 0.5),
        "clamp whole by float": lambda: i.clamp(min=1.0),
        "clamp by tensor": lambda: t.minimum(t.maximum(d, -one), one),
        "nan_to_num": lambda: w.nan_to_num(0.0, 0.0, 0.0),
        "nan_to_num largest": lambda: w.nan_to_num(),
        "masked_fill": lambda: f.masked_fill(m, float("-inf")),
        "where scalar": lambda: t.where(m, f, 0.0),
        "where types": lambda: t.where(m, f, d),
        "where numbers": lambda: t.where(m, 1.0, -1.0).double(),
        "isfinite": lambda: t.isfinite(w),
        "isnan": lambda: t.isnan(w).flatten(1).any(1),
        "round": lambda: t.round(d / 2.0**-14) * 2.0**-14,
        "trunc_": lambda: (d * 3).trunc_().long(),
        "sqrt": lambda: t.sqrt(d.abs()),
        "reciprocal": lambda: i.clamp(min=1).reciprocal(),
        "long": lambda: f.long(),
        "to a tensor": lambda: f.to(d),
        "to a type": lambda: i.to(t.uint8),
        "T": lambda: f.T,
        "permute": lambda: f.reshape(2, 3, 4).permute(2, 0, 1).contiguous(),
        "view": lambda: f.view(3, -1),
        "view bytes": lambda: f.view(-1).view(t.uint8),
        "flatten": lambda: f.view(2, 3, 4).flatten(1),
        "flatten two": lambda: f.view(2, 3, 4).flatten(0, 1),
        "unflatten": lambda: f.unflatten(0, (2, 3)),
        "unsqueeze": lambda: f.unsqueeze(1),
        "squeeze": lambda: f[:1].squeeze(0),
        "expand": lambda: f[:, :1].expand(-1, 3),
        "diagonal": lambda: f.view(2, 3, 4).diagonal(dim1=1, dim2=2),
        "gather": lambda: f.gather(1, y.unsqueeze(1)).squeeze(1),
        "index": lambda: f[y],
        "index by mask": lambda: f[m],
        "index by two": lambda: f[y, y],
        "index by a list": lambda: f[[0, 2]],
        "ellipsis": lambda: f.view(2, 3, 4)[..., 1:3],
        "one row": lambda: f[-1],
        "repeat_interleave": lambda: t.repeat_interleave(t.arange(4), y[:4]),
        "repeat each": lambda: y.repeat_interleave(2),
        "cat": lambda: t.cat((f, d)),
        "cat columns": lambda: t.cat((f, f[:, :1]), dim=1),
        "stack": lambda: t.stack([f, f], 1),
        "split": lambda: t.split(f, 4)[1],
        "split sizes": lambda: t.split(f, [1, 2, 3])[2],
        "split none": lambda: t.split(f[:0], 4)[0],
        "nonzero": lambda: t.nonzero(m),
        "tril": lambda: t.tril(d[:4], -1),
        "tril_indices": lambda: t.tril_indices(4, 4, -1),
        "diag": lambda: t.diag(d[0]),
        "bincount": lambda: t.bincount(y, minlength=6),
        "bincount weights": lambda: t.bincount(y, weights=d[:, 0], minlength=6),
        "unique": lambda: t.unique(i),
        "unique inverse": lambda: t.unique(i[0], return_inverse=True)[1],
        "unique counts": lambda: t.unique(y, return_counts=True)[1],
        "sort": lambda: t.sort(d[:, 0]).values,
        "argsort": lambda: t.argsort(y, stable=True),
        "searchsorted": lambda: t.searchsorted(t.sort(d[:, 0]).values, d[:, 1], right=True),
        "outer": lambda: t.outer(d[0], d[1]),
        "div trunc": lambda: t.div(i, two, rounding_mode="trunc"),
        "index_add_": lambda: t.zeros(4, 4).index_add_(0, y, f),
        "scatter_reduce": lambda: t.zeros(4, dtype=t.float64).scatter_reduce(0, y, d[:, 0], "amax"),
        "one_hot": lambda: t.nn.functional.one_hot(y, 5),
        "tensor": lambda: t.tensor([0.1, 0.2]),
        "tensor of whole": lambda: t.tensor([[1, 2], [3, 4]]),
        "tensor of NumPy's": lambda: t.tensor(F64[0, 0]),
        "tensor of bool": lambda: t.tensor([True, False]),
        "full": lambda: t.full((2,), -1),
        "full of float": lambda: t.full((2,), 0.5),
        "zeros": lambda: t.zeros(2, 3, dtype=t.int32),
        "zeros like": lambda: t.zeros_like(f, dtype=t.float64),
        "arange": lambda: t.arange(2, 5),
        "new_full": lambda: b.new_full((1, 2), 7),
        "randperm": lambda: t.randperm(50, generator=g()),
        "rand": lambda: t.rand(3, 4, generator=g()),
        "randint": lambda: t.randint(7, (9,), generator=g()),
    }


def rounded(t: Any) -> dict[str, Callable[[], Any]]:
    """Calls that are sums, roots or powers, whose last bits may differ."""
    f, d, s, y = (t.from_numpy(a.copy()) for a in (F32, F64, SQUARE, LABELS))
    image = t.from_numpy(np.random.default_rng(1).standard_normal((1, 3, 20, 20)).astype(np.float32))
    shrink = {"mode": "bilinear", "antialias": True, "align_corners": False}
    return {
        "f.sum": lambda: f.sum(),
        "mean": lambda: f.mean((0, 1)),
        "var": lambda: d.var(unbiased=True),
        "var of all": lambda: d.var(correction=0),
        "norm": lambda: d.norm(dim=1, keepdim=True),
        "matmul": lambda: f @ f.T,
        "softmax": lambda: t.softmax(d, dim=1),
        "sigmoid": lambda: t.sigmoid(f),
        "log": lambda: t.log(d.abs()),
        "log1p": lambda: t.log1p(d.abs()),
        "asinh": lambda: t.asinh(d),
        "rsqrt": lambda: t.rsqrt(d.abs()),
        "einsum": lambda: t.einsum("nd,kcd->nkc", f, f.view(2, 3, 4)),
        "eigh": lambda: t.linalg.eigh(s)[0],
        "vector_norm": lambda: t.linalg.vector_norm(d, dim=1, keepdim=True),
        "cholesky": lambda: t.cholesky_solve(d.T, t.linalg.cholesky_ex(s)[0]),
        "not positive": lambda: t.linalg.cholesky_ex(-s)[1].bool(),
        "smaller image": lambda: t.nn.functional.interpolate(image, (7, 9), **shrink),
        "larger image": lambda: t.nn.functional.interpolate(image, (33, 33), **shrink),
        "layers": lambda: layers(t)(f),
        "nothing": lambda: y,
    }


def layers(t: Any) -> Any:
    t.default_generator.manual_seed(11)
    return t.nn.Sequential(OrderedDict(a=t.nn.Linear(4, 5), b=t.nn.ReLU(), c=t.nn.Linear(5, 2, bias=False)))


def same(made: Any, wanted: torch.Tensor, rtol: float) -> None:
    assert (str(made.dtype), tuple(made.shape)) == (str(wanted.dtype), tuple(wanted.shape))
    if rtol:
        np.testing.assert_allclose(made.numpy(), wanted.detach().numpy(), rtol=rtol, atol=rtol)
    else:
        np.testing.assert_array_equal(made.numpy(), wanted.numpy())


@pytest.mark.parametrize("call", exact(torch))
def test_exact_results_are_those_of_torch(call: str) -> None:
    same(exact(lean)[call](), exact(torch)[call](), 0.0)


@pytest.mark.parametrize("call", rounded(torch))
def test_other_results_are_those_of_torch_up_to_rounding(call: str) -> None:
    same(rounded(lean)[call](), rounded(torch)[call](), 2e-6)


def test_a_layer_draws_the_weights_that_torch_draws() -> None:
    made, wanted = layers(lean), layers(torch)
    for name, value in wanted.state_dict().items():
        same(made.state_dict()[name], value.detach(), 0.0)
    assert [n for n, _ in made.named_parameters()] == [n for n, _ in wanted.named_parameters()]
    assert [n for n, _ in made.named_modules()] == [n for n, _ in wanted.named_modules()]


def test_a_change_in_place_is_seen_through_a_view() -> None:
    for t in (torch, lean):
        whole = t.zeros(4, dtype=t.float64)
        part = whole[1:3]
        part += 2
        part.mul_(t.tensor(3.0))
        whole[3] = 1
        assert whole.tolist() == [0, 6, 6, 1]


def test_what_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError):
        lean.zeros(2).backward()  # type: ignore[attr-defined]


def test_a_broken_torch_is_not_replaced() -> None:
    tree = ast.parse((ROOT / "fl_core/tensors/__init__.py").read_text())
    handler = next(node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    assert ast.unparse(handler.type) == "ModuleNotFoundError"
