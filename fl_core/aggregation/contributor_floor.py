"""The contributor floor of masked runs: rows of a class are sent only if at least k hospitals contribute to their sum.

Before round 0 a census counts the hospitals H_j that will contribute rows of class j: one word for each class and silo,
1 or 0, summed under masks. H is public from then on, and each silo leaves out rows of classes with H_j < k. If sums per
class are also opened in rounds with absent hospitals, k grows by the number that may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fl_core.errors import RefusedError
from fl_core.tensors import Tensor, torch
from fl_core.types.interfaces import Guard, LocalData
from fl_core.types.values import Bundle, Layout, Part, PartSpec, RoundContext, Tensors

HOSPITALS = "hospitals"
"""The part of a census, and the group and tensor of the state with its result."""
CENSUS = f"{HOSPITALS}.weight"
"""The grid segment of a census."""


def census_layout(n_classes: int) -> Layout:
    return {HOSPITALS: PartSpec({}, (n_classes,))}


def census(data: LocalData, context: RoundContext, rows: bool = True) -> Bundle:
    """Return the part of a census: the classes whose rows a silo will contribute; none if it submits none.

    rows: whether the run's updates have rows of classes; if not, the result is the classes that the silo trains.
    Guarantees: a class is counted only if no rule of the hospital suppresses its rows.
    """
    contributed = data.contributes().float()
    return {HOSPITALS: Part({}, contributed if context.prototypes or not rows else torch.zeros_like(contributed))}


@dataclass(frozen=True)
class ContributorFloor(Guard):
    """Leaves out rows of classes that fewer than `least` hospitals have.

    parts: those with rows of classes: one row per class, or equally many per class with those of a class together.

    Guarantees: without the run's census, every row is left out.
    """

    parts: frozenset[str]
    n_classes: int
    least: int
    hospitals: Tensor | None = None
    group: ClassVar[str] = HOSPITALS

    def initial_setting(self) -> Tensors:
        return {HOSPITALS: torch.zeros(self.n_classes)}

    def with_setting(self, setting: Tensors | None) -> ContributorFloor:
        """Apply the result of the census; raises RefusedError (E-RUN-51) on an invalid one."""
        counts = None if setting is None else setting.get(HOSPITALS)
        if counts is None or counts.shape != (self.n_classes,):
            raise RefusedError(
                "E-RUN-51", f"the number of hospitals for each of {self.n_classes} classes was not sent with the model"
            )
        return replace(self, hospitals=counts)

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:  # noqa: ARG002
        return {name: self._without_rare_rows(part) if name in self.parts else part for name, part in bundle.items()}

    def _without_rare_rows(self, part: Part) -> Part:
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
