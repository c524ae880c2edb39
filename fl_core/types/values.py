"""The basic values: tensors by name, weighted sums, the public facts of a run.

State is passed as arguments, never kept in objects. Only a `Bundle` of `Part`s leaves a silo. A part is a weighted sum
that is not yet divided by its weight. So deltas weighted by examples, prototypes weighted by class counts and metrics
weighted by test examples are sent in one message, and all can be added under a mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from fl_core.errors import ConfigError, ProtocolError
from fl_core.types.computed_tensors import StoredTensors, mean_of
from fl_core.types.enums import Weighing
from fl_core.types.survey import MIN_PATIENTS, SurveyQuestion

if TYPE_CHECKING:  # annotations do not need torch
    import torch
    from torch import Tensor, nn

Tensors = Mapping[str, "Tensor"]
"""Parameter name -> tensor; float32, or integers once on the fixed-point grid."""


State = Mapping[str, Tensors]
"""Group -> Tensors, for instance {"w": ..., "prototypes": ...}. A checkpoint is a State."""


@dataclass(frozen=True, slots=True)
class Part:
    """A weighted sum that is not yet divided by its weight: total = sum_k w_k v_k, weight = sum_k w_k.

    total:  name -> (...) or, with one weight per row, (C, ...)
    weight: () for one weight per silo, (C,) for one per leading row (class)
    """

    total: Tensors
    weight: Tensor

    @classmethod
    def of(cls, value: Tensors, weight: float | Tensor = 1.0) -> Part:
        """Weigh `value` and wrap it; a (C,) weight multiplies the leading rows."""
        from fl_core.tensors import torch

        w = torch.as_tensor(weight, dtype=torch.float32)
        return cls({name: v * _rows(w, v) for name, v in value.items()}, w)

    def __add__(self, other: Part) -> Part:
        """Add two parts of one shape; raises ProtocolError (E-WIRE-06) when names or shapes differ."""
        if (mine := PartSpec.of(self)) != (theirs := PartSpec.of(other)):
            raise ProtocolError("E-WIRE-06", f"expected a part of {mine}, found {theirs}: they come from two layouts")
        return Part({name: v + other.total[name] for name, v in self.total.items()}, self.weight + other.weight)

    def mean(self, default: Tensors | None = None) -> Tensors:
        """Divide by the weight, in float64, and return float32; it is computed on access if the total is.

        | weight of a row | result of that row            |
        |-----------------|-------------------------------|
        | > 0             | total / weight                |
        | 0               | `default`'s row, or 0 without |
        """
        from fl_core.tensors import torch

        w = self.weight.double()
        if w.dim() == 0 and w > 0:
            if isinstance(self.total, StoredTensors):
                return mean_of(self.total, w)
            return {name: (v.double() / w).float() for name, v in self.total.items()}
        safe = torch.where(w > 0, w, torch.ones_like(w))
        mean: dict[str, Tensor] = {}
        for name, v in self.total.items():
            rest = torch.zeros_like(v, dtype=torch.float32) if default is None else default[name].float()
            mean[name] = torch.where(_rows(w > 0, v), (v.double() / _rows(safe, v)).float(), rest)
        return mean


def _rows(weight: Tensor, value: Tensor) -> Tensor:
    """Shape a () or (C,) weight so that it broadcasts over the trailing dimensions of `value`."""
    return weight if weight.dim() == 0 else weight.reshape(-1, *([1] * (value.dim() - 1)))


Bundle = Mapping[str, Part]
"""Part name -> Part. Nothing else leaves a silo; metrics are parts too."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """The public shape of a part. It is equal for every silo of a run, independent of the silo's classes."""

    shapes: Mapping[str, tuple[int, ...]]
    weight_shape: tuple[int, ...]

    @classmethod
    def of(cls, part: Part) -> PartSpec:
        if isinstance(part.total, StoredTensors):
            shapes = part.total.shapes
        else:
            shapes = {name: tuple(v.shape) for name, v in part.total.items()}
        return cls(dict(sorted(shapes.items())), tuple(part.weight.shape))


@dataclass(frozen=True, slots=True)
class PartRule:
    """The meaning of a part, so that false claims can be refused.

    weight: meaning of the weight   counts: the tensor of the total that counts training examples; empty without one
    steps: the tensor that counts optimiser steps; empty without one   level: whether the values are absolute (a head)
    and not differences (its change).
    """

    weight: Weighing = Weighing.EXAMPLES
    counts: str = ""
    steps: str = ""
    level: bool = False


Layout = Mapping[str, PartSpec]
"""Part name -> its spec: the layout of a run's bundles, frozen in the manifest."""


class Losses(NamedTuple):
    """The result of a loss function. Under DP its two terms are bounded by different mechanisms.

    per_example: (B,), entry i depends on example i alone; clipped per example
    coupled:     (), may mix the examples of the batch; clipped per microbatch. None when there is none.
    """

    per_example: Tensor
    coupled: Tensor | None = None

    def objective(self) -> Tensor:
        """Reduce to the scalar that a non-private step minimises: mean(per_example) + coupled."""
        mean = self.per_example.mean()
        return mean if self.coupled is None else mean + self.coupled


@dataclass(frozen=True, slots=True)
class RoundContext:
    """The public facts of a run and of one round of it, at the server or for one silo.

    n_silos N, n_classes C, rounds T, round t (0-based), cohort |S_t| (planned, public). silo: the index in the run's
    roster, -1 at the server   seed: the run's, for the silo's random streams   prototypes: False for a silo that
    submits none in this run (drawn before round 1, or the hospital's own opt-out): it still receives and uses them.
    units: the silo's declared size in a masked run, which must not use its true size; otherwise 0.
    """

    n_silos: int
    n_classes: int
    rounds: int = 1
    round: int = 0
    cohort: int = 0
    silo: int = -1
    seed: int = 0
    prototypes: bool = True
    units: int = 0

    def for_silo(self, silo: int, seed: int, prototypes: bool = True, units: int = 0) -> RoundContext:
        return replace(self, silo=silo, seed=seed, prototypes=prototypes, units=units)


Progress = Callable[[int, int], None]
"""Called with (done, total) after every step and every batch; it may raise to stop the work."""


class LocalResult(NamedTuple):
    """The result of `Method.local`: the bundle leaves the silo, the state stays."""

    bundle: Bundle
    state: State


@dataclass(frozen=True, slots=True)
class ExampleSums:
    """A `sum` query: one row per example and name, summed over the examples.

    rows: (x (B, ...), y (B,)) -> name -> (B, ...)
    """

    rows: Callable[[Tensor, Tensor], Tensors]


@dataclass(frozen=True, slots=True)
class ClassSums:
    """A joint `sum` query: per class, the sum of a d-vector and the number of examples.

    It is one query, so that under DP one noise draw and one ledger entry cover both. Since an example has one class,
    the joint sensitivity is sqrt(R^2 + lambda^2) (bound R on the vector, lambda on the count), without a factor C.

    vectors: (x (B, ...), y (B,)) -> (B, d). Result: {"sum": (C, d), "count": (C,)}; classes never seen are rows of 0.
    """

    vectors: Callable[[Tensor, Tensor], Tensor]
    n_classes: int


@dataclass(frozen=True, slots=True)
class BatchSums:
    """A `sum` query whose sums are computed per batch, for sums that are larger than the examples. Never private.

    sums: (x (B, ...), y (B,)) -> name -> sum over the batch, of one shape for any B, also 0
    kept: (x, y) -> (B,) bool, the examples that `sums` reads; None: all.
    """

    sums: Callable[[Tensor, Tensor], Tensors]
    kept: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class MomentSums:
    """A joint `sum` query: second moments of a D-vector, and its sums per class.

    vectors: (x (B, ...), y (B,)) -> (B, D), whose last entry is `constant` times a weight of the class, so that a sum
    per class ends in a count   second: False leaves the moments out, as zeros without noise   joint: the sum over all
    classes is row 0, and the other rows are zeros without noise   share: of the run's 1 / z^2, in private data.

    In private data a vector counts with length 1 at most: a record moves (svec(u u^T), u (x) e_y), where svec counts
    entries beside the diagonal sqrt(2) times, by at most sqrt(2), or by 1 without moments. Result: {"a": (D, D),
    "b": (C, D), "variance": ()} in float64, the last of the noise on each number of svec(A) and B, 0 without noise.
    """

    vectors: Callable[[Tensor, Tensor], Tensor]
    width: int
    n_classes: int
    constant: float
    second: bool = True
    joint: bool = False
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class SurveySums:
    """A `sum` query over all records of a hospital, of both splits: how they divide among the cells of questions.

    allowed: names of the questions that are answered, None: all   least: smallest number of patients that leaves
    without noise   records_are_patients: the hospital declares that each record is of another patient   unnamed: the
    data name no patients, and there is no such declaration. The cells of all questions are concatenated (cells,).
    Result in float64, plain: {"images", "patients", "held", "unnamed"}, in private data {"patients", "held", "unnamed",
    "variance"}: see `fl_core.survey.answers`.
    """

    questions: tuple[SurveyQuestion, ...]
    n_classes: int
    allowed: frozenset[str] | None = None
    least: int = MIN_PATIENTS
    private: bool = False
    records_are_patients: bool = False
    unnamed: bool = False

    @property
    def cells(self) -> int:
        return sum(question.count(self.n_classes) for question in self.questions)

    def answers(self, question: SurveyQuestion) -> bool:
        return self.allowed is None or question.name in self.allowed


Query = ExampleSums | ClassSums | BatchSums | MomentSums | SurveySums
LossFn = Callable[["nn.Module", "Tensor", "Tensor"], Losses]
PenaltyFn = Callable[["nn.Module"], "Tensor"]


@dataclass(frozen=True, slots=True)
class SgdOptions:
    """Options of one call of `sgd` that differ from the run's schedule.

    epochs, steps: length; `steps` overrides `epochs` and the schedule's limit   lr_scale: factor on the schedule's rate
    penalty, shift: added to the gradient before the momentum buffer, and in private data after clipping and noise; they
    must not depend on examples. A penalty is part of the objective, so the schedule's `clip_norm` bounds its gradient
    together with the loss's; a shift is added afterwards   only: selects the parameters that are trained
    no_momentum: selects those of them that are trained without momentum and decay, and outside of `clip_norm`.
    """

    epochs: float | None = None
    steps: int | None = None
    lr_scale: float = 1.0
    penalty: PenaltyFn | None = None
    shift: Tensors | None = None
    only: Callable[[str], bool] | None = None
    no_momentum: Callable[[str], bool] | None = None


AS_SCHEDULED = SgdOptions()


class Examples(ABC):
    """A silo's examples of one split, read batch by batch.

    labels: (n,) int64, or (n, L) for several labels at once (see `types/targets.py`)   groups: the privacy unit of each
    example (lesion, patient); None if the data name none.
    """

    labels: Tensor
    groups: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read the examples at `index` (B,): x (B, *shape) float32, y (B,); augmented when a generator is given."""

    def stored(self, index: Tensor) -> Tensor:  # noqa: ARG002
        """Read x at `index` (B,) in its stored form; `prepared` finishes it on any device.

        Raises ConfigError (E-CFG-08) if these examples have no stored form.
        """
        raise self._no_device_augmentation()

    def prepared(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:  # noqa: ARG002
        """Convert the result of `stored` to that of `batch`, on the device of `x`. augment: a generator on the CPU.

        Raises as `stored`.
        """
        raise self._no_device_augmentation()

    def _no_device_augmentation(self) -> ConfigError:
        return ConfigError(
            "E-CFG-08",
            f"expected examples that can be augmented on a device, found {type(self).__name__}, which augments while "
            "reading: leave train.augment_on_device out",
        )

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Read all examples once, in order, without augmentation."""
        from fl_core.tensors import torch

        for index in torch.split(torch.arange(len(self)), size):
            if len(index):
                yield self.batch(index)
