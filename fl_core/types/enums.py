"""Enums. They are in a module without tensors, so that commands that only need enums do not load torch."""

from __future__ import annotations

from enum import Enum


class Coupling(Enum):
    """Whether the loss of one example depends on the other examples of its batch."""

    EXAMPLE = "example"
    BATCH = "batch"


class TaskKind(Enum):
    """A silo's task in a round. The values are stored on disk and used in digests.

    TRAIN: train, and measure the received model   EVALUATE: the last task of every run: only measure   CENSUS: before
    round 0 of a masked run, state the classes whose rows the silo will contribute.
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
        """Whether the task needs only records, so that no model is sent with it."""
        return self is TaskKind.CENSUS

    def rounds(self, number: int) -> range:
        """Return the rounds with this task in a run of `number` rounds."""
        last = {TaskKind.TRAIN: range(number), TaskKind.EVALUATE: range(number, number + 1)}
        return last.get(self, range(1))

    def drawn(self, cohort: int) -> int:
        """Return the cohort size, in a run that draws `cohort` silos; 0: all silos."""
        return cohort if self.trains else 0

    def label(self, round: int) -> str:
        """Name the task for people, who count rounds from 1."""
        return self._label.format(round + 1)


class Split(Enum):
    """Which of a silo's examples a `sum` query uses.

    GLOBAL is a public test set, equal at every silo. It may be empty.
    """

    TRAIN = "train"
    TEST = "test"
    GLOBAL = "global"


class Capability(Enum):
    """A capability that a run can need and a method can lack."""

    SECURE_AGGREGATION = "secure aggregation"
    DIFFERENTIAL_PRIVACY = "record-level differential privacy"
    PARTIAL_PARTICIPATION = "partial participation"
    ADAPTIVE_OPTIMIZER = "an adaptive optimizer"
    COARSE_LABELS = "coarse labels, which mean one of several classes"
    MULTI_LABEL = "several labels at once"


Targets = frozenset[Capability]
ANY_TARGET: Targets = frozenset({Capability.COARSE_LABELS, Capability.MULTI_LABEL})
"""Possible targets of records besides a class."""


class Weighing(Enum):
    """The meaning of a silo's weight for a part, which the coordinator checks.

    EXAMPLES: a number of its training examples, in total or per row   ONCE: 1, or 0 if it has nothing to send
    QUALITY: a number per row that the method computes, at most e or the number of the silo's examples.
    """

    EXAMPLES = "examples"
    ONCE = "once"
    QUALITY = "quality"
