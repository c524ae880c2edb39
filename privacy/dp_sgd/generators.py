"""Where randomness enters a step: layers that draw in training, and generators that a loss can reach."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fl_core.errors import RefusedError

_DEEP = 6
"""How deep a generator is looked for: a function's cells, their attributes, and so on."""


def disable_random_layers(model: nn.Module, run: Callable[[], object]) -> None:
    while drawing := _drawing(model, run):
        for module in drawing:
            module.training = False


def _drawing(model: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    found: list[nn.Module] = []
    states: list[Tensor] = []

    def before(_: nn.Module, __: object) -> None:
        states.append(torch.get_rng_state())

    def after(module: nn.Module, _: object, __: object) -> None:
        drew = not torch.equal(states.pop(), torch.get_rng_state())
        if drew and module.training and not any(m in found for m in list(module.modules())[1:]):
            found.append(module)

    handles = [m.register_forward_pre_hook(before) for m in model.modules()]
    handles += [m.register_forward_hook(after) for m in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


class DrawDetector:
    """Tells whether a loss draws random numbers: from generators that it can reach, or from torch's own."""

    def __init__(self, loss: object) -> None:
        self._held = list(_generators(loss, set(), _DEEP))
        self._before: list[Tensor] = []

    def begin(self) -> None:
        self._before = self._states()

    def check(self) -> None:
        """Raise RefusedError (E-PRIV-16) when one drew since `begin`."""
        if any(not torch.equal(a, b) for a, b in zip(self._before, self._states(), strict=True)):
            raise RefusedError(
                "E-PRIV-16",
                "expected a loss that draws no random numbers, found that it does: draws follow the places of a batch, "
                "which move when another example comes",
            )

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(g.get_state() for g in self._held)]


def _generators(value: object, met: set[int], deep: int) -> Iterator[torch.Generator]:
    if isinstance(value, torch.Generator):
        yield value
        return
    if id(value) in met or not deep or isinstance(value, Tensor | nn.Module | str | int | float | type(None)):
        return
    met.add(id(value))
    for held in _held_by(value):
        yield from _generators(held, met, deep - 1)


def _held_by(value: object) -> list[object]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        return [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)] + list(
            value.__defaults__ or ()
        )
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in fields(value)]
    return list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []


def _filled(cell: object) -> bool:
    try:
        return cell.cell_contents is not None  # type: ignore[attr-defined]
    except ValueError:
        return False
