"""`torch.nn` on NumPy: the layers after a frozen body, used in evaluations and never trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fl_core.tensors.array import Tensor
from fl_core.tensors.generator import default_generator


class Parameter(Tensor):
    """A tensor of a layer that training would change."""

    __slots__ = ()

    def __init__(self, value: Tensor) -> None:
        super().__init__(value.array)
        self.requires_grad = True


class Module:
    """A layer, with its tensors and the layers in it by name."""

    training: bool

    def __init__(self) -> None:
        for name in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(self, name, {})
        self._non_persistent_buffers_set = set[str]()
        self.training = True

    def __setattr__(self, name: str, value: object) -> None:
        kinds: Mapping[str, type] = {"_parameters": Parameter, "_modules": Module}
        place = next((place for place, kind in kinds.items() if isinstance(value, kind)), "")
        if place:
            self.__dict__[place][name] = value
        elif name in self.__dict__.get("_buffers", ()):
            self._buffers[name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - asked where an object has no such name
        for place in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(place, ()):
                return self.__dict__[place][name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def register_buffer(self, name: str, value: Tensor) -> None:
        self._buffers[name] = value

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, module in self._modules.items():
            yield from module.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for prefix, module in self.named_modules():
            for name, value in module._parameters.items():
                yield (f"{prefix}.{name}" if prefix else name), value

    def parameters(self) -> Iterator[Parameter]:
        return (value for _, value in self.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        return (value for module in self.modules() for value in module._buffers.values())

    def state_dict(self) -> dict[str, Tensor]:
        state = dict[str, Tensor]()
        for prefix, module in self.named_modules():
            for name, value in {**module._parameters, **module._buffers}.items():
                state[f"{prefix}.{name}" if prefix else name] = value
        return state

    def train(self, training: bool = True) -> Self:
        for module in self.modules():
            module.training = training
        return self

    def eval(self) -> Self:
        return self.train(False)

    def requires_grad_(self, wanted: bool = True) -> Self:
        for value in self.parameters():
            value.requires_grad = wanted
        return self

    def to(self, *_: object) -> Self:
        return self

    def cpu(self) -> Self:
        return self

    def __call__(self, x: Tensor) -> Any:  # noqa: ANN401 - what `forward` of the subclass returns
        return self.forward(x)


class Identity(Module):
    """Return the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class ReLU(Module):
    """Return the input where it is above 0, else 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)


class Linear(Module):
    """x W^T + b, with the weights that torch draws first."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias: Tensor | None = None
        kaiming = math.sqrt(3.0) * math.sqrt(2.0 / (1 + math.sqrt(5) ** 2)) / math.sqrt(in_features)
        self.weight: Tensor = Parameter(_drawn((out_features, in_features), kaiming))
        if bias:
            del self.bias
            self.bias = Parameter(_drawn((out_features,), 1 / math.sqrt(in_features)))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Sequential(Module):
    """Layers, one behind the other."""

    def __init__(self, *layers: Any) -> None:  # noqa: ANN401 - layers, or one mapping of them
        super().__init__()
        named = (
            layers[0]
            if layers and isinstance(layers[0], Mapping)
            else dict(zip(map(str, range(len(layers))), layers, strict=True))
        )
        for name, layer in named.items():
            self._modules[name] = layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._modules.values():
            x = layer(x)
        return x


class ModuleList(Module):
    """Layers in a row."""

    def __init__(self, layers: Sequence[Module]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self._modules[str(number)] = layer

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)


class _BatchNorm(Module):
    """No layer here normalises by batch statistics."""


class Conv2d(Module):
    """No layer here is a convolution."""


class RNNBase(Module):
    """No layer here is recurrent."""


def _drawn(shape: tuple[int, ...], bound: float) -> Tensor:
    low, high = np.float32(-bound), np.float32(bound)
    numbers = default_generator.uniform(math.prod(shape)) * float(high - low) + float(low)
    return Tensor(numbers.astype(np.float32).reshape(shape))


def one_hot(classes: Tensor, number: int) -> Tensor:
    return Tensor(np.eye(number, dtype=np.int64)[classes.array])


def interpolate(x: Tensor, size: tuple[int, int], *, mode: str, antialias: bool, align_corners: bool) -> Tensor:
    """Resize images (..., H, W) by torch's triangle filter: in float32, each product added with one rounding."""
    assert (mode, antialias, align_corners) == ("bilinear", True, False)
    resized = x.array
    for axis, wanted in ((-1, size[1]), (-2, size[0])):
        source = np.moveaxis(resized, axis, -1)
        total = np.zeros((*source.shape[:-1], wanted), np.float32)
        for place, weight in zip(*_taps(source.shape[-1], wanted), strict=True):
            total = (source[..., place].astype(np.float64) * weight + total).astype(np.float32)
        resized = np.moveaxis(total, -1, axis)
    return Tensor(resized)


def _taps(length: int, wanted: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the positions (taps, wanted) of the numbers that each new number is computed from, and their weights."""
    scale, half, one = np.float32(length) / np.float32(wanted), np.float32(0.5), np.float32(1)
    support, narrow = (scale, one / scale) if scale >= 1 else (one, one)
    centre = scale * (np.arange(wanted, dtype=np.float32) + half)
    first = np.maximum((centre - support + half).astype(np.int64), 0)
    last = np.minimum((centre + support + half).astype(np.int64), length)
    tap = np.arange((last - first).max())[:, None]
    distance = np.abs((tap.astype(np.float32) + first.astype(np.float32) - centre + half) * narrow)
    weights = np.where((tap < last - first) & (distance < 1), one - distance, np.float32(0))
    whole = np.zeros(wanted, np.float32)
    for row in weights:  # in torch's order
        whole = whole + row
    return np.minimum(first + tap, length - 1), (weights / whole).astype(np.float64)


functional = SimpleNamespace(one_hot=one_hot, interpolate=interpolate)
modules = SimpleNamespace(batchnorm=SimpleNamespace(_BatchNorm=_BatchNorm))
