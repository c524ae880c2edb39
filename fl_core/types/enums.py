"""Enums, apart from the tensors: a command that only needs these does not load torch."""

from __future__ import annotations

from enum import Enum


class Coupling(Enum):
    """Whether the loss of one example depends on the other examples of its batch."""

    EXAMPLE = "example"
    BATCH = "batch"


class TaskKind(Enum):
    """What a silo is asked to do in a round. The values are on disk and in digests.

    TRAIN: the silo's half of a round; the received model is measured too   EVALUATE: the last task of every run, which
    only measures   CENSUS: before round 0 of a masked run, state the classes of which it will contribute rows.
    """

    TRAIN = "train", "training", "round {}"
    EVALUATE = "evaluate", "evaluating", "evaluation"
    CENSUS = "census", "counting classes", "census"

    _value_: str
    doing: str
    """The silo's activity, for people."""
    _label: str

    def __new__(cls, value: str, doing: str = "", label: str = "") -> TaskKind:
        kind = object.__new__(cls)
        kind._value_, kind.doing, kind._label = value, doing, label
        return kind

    @property
    def trains(self) -> bool:
        """Whether the updates change the server's state, and the silo has a state of its own."""
        return self is TaskKind.TRAIN

    @property
    def ends_run(self) -> bool:
        """Whether the run ends when this is closed."""
        return self is TaskKind.EVALUATE

    @property
    def census(self) -> bool:
        """Whether it is only about records: no model is sent with it."""
        return self is TaskKind.CENSUS

    def rounds(self, number: int) -> range:
        """Return the rounds with this task in a run of so many rounds."""
        last = {TaskKind.TRAIN: range(number), TaskKind.EVALUATE: range(number, number + 1)}
        return last.get(self, range(1))

    def drawn(self, cohort: int) -> int:
        """Return the cohort size, in a run that draws `cohort` silos; 0: all are asked."""
        return cohort if self.trains else 0

    def label(self, round: int) -> str:
        """Name the task for people, who count rounds from 1."""
        return self._label.format(round + 1)


class Split(Enum):
    """Which of a silo's examples a `sum` query uses.

    GLOBAL is a public test set, equal at every silo: no silo's secret. It may be empty.
    """

    TRAIN = "train"
    TEST = "test"
    GLOBAL = "global"


class Capability(Enum):
    """What a run can ask of a method, and a method can lack."""

    SECURE_AGGREGATION = "secure aggregation"
    DIFFERENTIAL_PRIVACY = "record-level differential privacy"
    PARTIAL_PARTICIPATION = "partial participation"
    ADAPTIVE_OPTIMIZER = "an adaptive optimizer"
    COARSE_LABELS = "coarse labels, records that are of one of several classes"
    MULTI_LABEL = "several labels at once"


Targets = frozenset[Capability]
ANY_TARGET: Targets = frozenset({Capability.COARSE_LABELS, Capability.MULTI_LABEL})
"""Possible targets of records besides a class."""


class Weighing(Enum):
    """The meaning of a silo's weight for a part, which the coordinator checks.

    EXAMPLES: a number of its training examples, in total or per row   ONCE: 1, or 0 if it has nothing to send QUALITY:
    a number per row that the method computes, of at most e or the silo's examples.
    """

    EXAMPLES = "examples"
    ONCE = "once"
    QUALITY = "quality"
