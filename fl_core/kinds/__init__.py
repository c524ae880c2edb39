"""What kinds of run there are. Whoever has to tell one from another asks its object. Nothing here loads torch.

base         what a kind says of itself
training     hospitals train one model together
evaluation   a model is measured at the hospitals, and nobody trains
survey       hospitals count their records
"""

from __future__ import annotations

from fl_core.kinds.base import RunKind as RunKind
from fl_core.kinds.evaluation import EvaluationRun
from fl_core.kinds.survey import SurveyRun
from fl_core.kinds.training import TrainingRun

_KINDS: list[RunKind] = [SurveyRun(), EvaluationRun(), TrainingRun()]


def kind_of(method: str, rounds: int) -> RunKind:
    """Return the one kind that a run is: the first that recognises it; every run that no other does is a training."""
    return next(kind for kind in _KINDS if kind.recognises(method, rounds))


def kinds() -> tuple[RunKind, ...]:
    return tuple(_KINDS)


def register(kind: RunKind) -> None:
    """Add a kind, which is asked before those that are there; in the place of one of its name."""
    _KINDS[:] = [kind, *(other for other in _KINDS if other.name != kind.name)]


def unregister(kind: RunKind) -> None:
    _KINDS.remove(kind)
