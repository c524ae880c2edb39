"""The kinds of runs. All differences between them are defined in these objects. Nothing here loads torch.

base         the interface of a kind
training     hospitals train one model together
evaluation   a model is measured at the hospitals, without training
survey       hospitals count their records
"""

from __future__ import annotations

from fl_core.kinds.base import RunKind as RunKind
from fl_core.kinds.evaluation import EvaluationRun
from fl_core.kinds.survey import SurveyRun
from fl_core.kinds.training import TrainingRun

_KINDS: list[RunKind] = [SurveyRun(), EvaluationRun(), TrainingRun()]


def kind_of(method: str, rounds: int) -> RunKind:
    """Return the kind of a run: the first that recognises it, otherwise a training."""
    return next(kind for kind in _KINDS if kind.recognises(method, rounds))


def kinds() -> tuple[RunKind, ...]:
    return tuple(_KINDS)


def register(kind: RunKind) -> None:
    """Add a kind, which is tried before the existing ones; it replaces a kind of the same name."""
    _KINDS[:] = [kind, *(other for other in _KINDS if other.name != kind.name)]


def unregister(kind: RunKind) -> None:
    _KINDS.remove(kind)
