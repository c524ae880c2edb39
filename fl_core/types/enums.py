"""The closed choices, apart from the tensors: a command that only needs these does not load torch."""

from __future__ import annotations

from enum import Enum


class Coupling(Enum):
    """Whether the loss of one example depends on the other examples of its batch."""

    EXAMPLE = "example"
    BATCH = "batch"


class TaskKind(Enum):
    """What a silo is asked to do in a round: train (and evaluate what it received), or only evaluate.

    CENSUS: before round 0 of a masked run, say of which classes it will contribute rows.
    """

    TRAIN = "train"
    EVALUATE = "evaluate"
    CENSUS = "census"


class Split(Enum):
    """Which of a silo's examples a `sum` query runs over.

    GLOBAL is a public test set, equal at every silo: no silo's secret. Where there is none, it has no example.
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
"""What targets of records can be beside a class."""


class Weighing(Enum):
    """What a silo's weight of a part is: what a coordinator can hold it to.

    EXAMPLES: a number of its training examples, in all or per row   ONCE: 1, or 0 where it has nothing to send
    QUALITY: a number per row that the method makes, of at most e or the silo's examples.
    """

    EXAMPLES = "examples"
    ONCE = "once"
    QUALITY = "quality"
