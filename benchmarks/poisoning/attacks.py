"""What a bad hospital sends: its honest update, changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from consilium.research.engines.in_process import SiloShare
from fl_core.errors import UnavailableError
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import SiloPort
from fl_core.types.values import Bundle, Examples, Part, RoundContext, State

Change = Callable[[Bundle], Bundle]


def _delta(factor: float, weight: float = 1.0) -> Change:
    def change(sent: Bundle) -> Bundle:
        part = sent["delta"]
        total = {key: v * (factor * weight) for key, v in part.total.items()}
        return {**sent, "delta": Part(total, part.weight * weight)}

    return change


def _false_metrics(sent: Bundle) -> Bundle:
    part = sent["metrics"]
    return {**sent, "metrics": Part({"correct": part.total["correct"] + 65_000}, part.weight)}


def _wrong_shape(sent: Bundle) -> Bundle:
    part = sent["delta"]
    total = {key: v.flatten()[:-1] if v.numel() > 1 else v for key, v in part.total.items()}
    return {**sent, "delta": Part(total, part.weight)}


def _nothing(_: Bundle) -> Bundle:
    raise UnavailableError("E-RUN-13", "absent")


def _as_sent(sent: Bundle) -> Bundle:
    return sent


ATTACKS: dict[str, Change] = {
    "none": _as_sent,
    "absent": _nothing,
    "weight x1000": _delta(1.0, 1000.0),
    "sign flip": _delta(-1.0),
    "sign flip x10": _delta(-10.0),
    "sign flip x1000": _delta(-1000.0),
    "x10": _delta(10.0),
    "x1000": _delta(1000.0),
    "NaN": _delta(float("nan")),
    "wrong shape": _wrong_shape,
    "false metrics": _false_metrics,
    "labels reversed": _as_sent,  # the update is honest; its training labels are not
    "labels turned by one": _as_sent,
}


@dataclass(frozen=True, slots=True)
class BadSilo:
    """A silo that changes what it sends in training rounds."""

    inner: SiloPort
    change: Change

    @property
    def name(self) -> str:
        return self.inner.name

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle:
        sent = self.inner.round(msg, context, kind)
        return self.change(sent) if kind is TaskKind.TRAIN else sent

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        self.inner.settle(context, kind, included)


class Relabelled(Examples):
    """Examples under a label list in another order; order (C,): the new place of each class."""

    def __init__(self, inner: Examples, order: Tensor) -> None:
        self._inner, self._order = inner, order
        self.labels = order[inner.labels]
        self.groups = inner.groups

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        x, y = self._inner.batch(index, augment)
        return x, self._order[y]


def with_bad_data(shares: list[SiloShare], attack: str, bad: int, classes: int) -> list[SiloShare]:
    """Relabel the training examples of one silo where the attack is that; its test labels stay."""
    orders = {"labels reversed": torch.arange(classes).flip(0), "labels turned by one": torch.arange(classes).roll(-1)}
    if attack not in orders:
        return shares
    relabelled = SiloShare(Relabelled(shares[bad].train, orders[attack]), shares[bad].test)
    return [relabelled if k == bad else share for k, share in enumerate(shares)]
