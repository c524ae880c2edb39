"""Rows of a class that are opened in a masked run are sums over at least k hospitals: others stay at the silo.

Before round 0 a census counts the hospitals H_j that will contribute rows of class j: one word for each class and
silo, 1 or 0, summed under masks. H is public from then on, and each silo leaves out rows of classes with H_j < k. Where
sums per class are opened also in rounds in which a hospital is absent, so many more are asked for as may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fl_core.errors import RefusedError
from fl_core.types.interfaces import Guard, LocalData
from fl_core.types.values import Bundle, Layout, Part, PartSpec, RoundContext, Tensors

HOSPITALS = "hospitals"
"""The part of a census, and group and tensor of the state that have its answer."""
CENSUS = f"{HOSPITALS}.weight"
"""The segment of a census on the grid."""


def census_layout(n_classes: int) -> Layout:
    return {HOSPITALS: PartSpec({}, (n_classes,))}


def census(data: LocalData, context: RoundContext, rows: bool = True) -> Bundle:
    """Say of which classes a silo will contribute rows: `LocalData.contributes`, nothing where it submits none.

    rows: whether updates of the run have rows of classes; of one without, which classes the silo trains.
    Guarantees: a class is counted here only where no rule of the hospital keeps its rows back.
    """
    contributed = data.contributes().float()
    return {HOSPITALS: Part({}, contributed if context.prototypes or not rows else torch.zeros_like(contributed))}


@dataclass(frozen=True)
class ContributorFloor(Guard):
    """Leaves out rows of classes that fewer than `least` hospitals have.

    parts: that have rows of classes, one for each or as many for each, those of one class together.

    Guarantees: without the census of the run, every row is left out.
    """

    parts: frozenset[str]
    n_classes: int
    least: int
    hospitals: Tensor | None = None
    group: ClassVar[str] = HOSPITALS

    def initial_setting(self) -> Tensors:
        return {HOSPITALS: torch.zeros(self.n_classes)}

    def with_setting(self, setting: Tensors | None) -> ContributorFloor:
        """Take the answer of the census; raises RefusedError (E-RUN-51) where it is none."""
        counts = None if setting is None else setting.get(HOSPITALS)
        if counts is None or counts.shape != (self.n_classes,):
            raise RefusedError(
                "E-RUN-51", f"expected how many hospitals have each of {self.n_classes} classes beside the model"
            )
        return replace(self, hospitals=counts)

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:  # noqa: ARG002
        return {name: self._kept(part) if name in self.parts else part for name, part in bundle.items()}

    def _kept(self, part: Part) -> Part:
        assert self.hospitals is not None
        kept = self.hospitals >= self.least

        def rows(value: Tensor) -> Tensor:
            of_class, rest = divmod(len(value) if value.dim() else 0, self.n_classes)
            if not of_class or rest:
                return value
            shown = kept.repeat_interleave(of_class).reshape(-1, *[1] * (value.dim() - 1))
            return torch.where(shown, value, torch.zeros_like(value))

        total: Mapping[str, Tensor] = {key: rows(value) for key, value in part.total.items()}
        return Part(total, rows(part.weight) if part.weight.dim() else part.weight)
