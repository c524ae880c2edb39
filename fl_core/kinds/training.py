"""A training: hospitals train one model together, round by round, and measure it before each round and at the end."""

from __future__ import annotations

from fl_core.kinds.base import RunKind


class TrainingRun(RunKind):
    """Any run that no other kind recognises. A census before its first round and a withdrawal are parts of it."""

    name = "training"
    trains = True
    measures = True

    def recognises(self, method: str, rounds: int) -> bool:  # noqa: ARG002
        return True
