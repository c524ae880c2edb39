"""What is known of a round after its close: plain numbers, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_core.kinds import TaskKind


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What is known of one round after its close.

    correct, examples: (C,) over the union of the test sets, for the model *before* the round's training;
    missing: silo -> reason; clipped: values that the grid cut off.
    """

    round: int
    kind: TaskKind
    correct: tuple[float, ...]
    examples: tuple[float, ...]
    included: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    clipped: int = 0

    @property
    def accuracy(self) -> float:
        """Return correct / examples over all classes, 0 without test examples."""
        return sum(self.correct) / n if (n := sum(self.examples)) else 0.0

    def class_accuracy(self) -> list[float | None]:
        """Return the accuracy per class, None where no silo has a test example."""
        return [c / n if n else None for c, n in zip(self.correct, self.examples, strict=True)]
