"""Plain values that need no torch: the schema of examples, the local schedule, the record of a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Protocol

from fl_core import validate
from fl_core.errors import ConfigError
from fl_core.types.clinical import ClinicalMetrics, Counts, balanced_counts, macro_mean
from fl_core.types.columns import Column
from fl_core.types.enums import TaskKind
from fl_core.validate import HalfOpenUnit, Positive, at_most, between, bounded, one_of

MAX_STEPS, MAX_STRENGTH, MAX_VIEWS = 2**31 - 1, 1e12, 64
FEATURES = "features"
PERSONAL_SCORES = ("pa", "pm_l", "pm_v")
"""Scores of personal models in `RoundRecord.personal`, measured as in `training/evaluation.py`."""
Strength = Annotated[float, bounded(between, 0, MAX_STRENGTH)]


@dataclass(frozen=True, slots=True)
class Schema:
    """The public description of the examples that every silo of a run must have: shape of x and the label space.

    columns: of a table; x is as wide as all of them   window: (centre, width) of DICOM's grey values
    multi_label: classes are labels of which a record may have several, each of them known or not
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    columns: tuple[Column, ...] = ()
    window: tuple[float, float] | None = None
    multi_label: bool = False

    @property
    def kind(self) -> str:
        return "any number of labels for each record" if self.multi_label else "one class for each record"


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The local schedule, equal at every silo.

    lr: per step; it is multiplied by `lr_decay` per round   max_steps: limit of an `sgd` call (0: none)
    clip_norm: bound of the gradient of a step, of the loss and the method's penalty together, without shifts, weight
    decay and parameters without momentum (0: off; `optimizers.correct_gradient` has the table)
    optimizer: "sgd" (momentum, nesterov) or "adam", which methods that count effective steps refuse
    amp: "bf16" or "fp16" computes losses in mixed precision (weights, sums and evaluations stay float32); "off"
    channels_last: memory order in which GPUs convolve fastest   cudnn_benchmark: a GPU tests its kernels for each shape
    and uses the fastest   compile: use torch.compile for the model's features   augment_on_device: augment examples on
    the model's device, with the same draws. These four change results only within float noise.
    micro_batch: examples of a step whose loss is computed at once (0: all). The gradients of the parts add up to that
    of the step, so less memory is needed and a hospital's processes can share the parts. Results change within float
    noise and by other draws of dropout. Not with batch norm or a loss that mixes examples.
    freeze: "features" keeps the model's body as at the start of the run. Its outputs, computed once, are the examples;
    the rest of the model is trained and sent (`training/frozen_features.py`)   views: of each image, including itself;
    a step draws one of them   drop_last: leave out the last batch of an epoch if it is shorter, as the code of FedMR's
    and FedGELA's authors does; private steps draw examples one by one.
    """

    lr: Annotated[Positive, bounded(at_most, MAX_STRENGTH)] = 0.01
    momentum: HalfOpenUnit = 0.9
    weight_decay: Strength = 1e-5
    batch_size: Annotated[int, bounded(between, 1, MAX_STEPS)] = 128
    epochs: Annotated[int, bounded(between, 1, MAX_STEPS)] = 10
    lr_decay: Annotated[float, bounded(between, 0, 10)] = 1.0
    max_steps: Annotated[int, bounded(between, 0, MAX_STEPS)] = 0
    clip_norm: Strength = 0.0
    augment: bool = False
    optimizer: Annotated[str, bounded(one_of, ("sgd", "adam"))] = "sgd"
    nesterov: bool = False
    amp: Annotated[str, bounded(one_of, ("off", "bf16", "fp16"))] = "off"
    channels_last: bool = False
    cudnn_benchmark: bool = False
    compile: bool = False
    augment_on_device: bool = False
    micro_batch: Annotated[int, bounded(between, 0, MAX_STEPS)] = 0
    freeze: Annotated[str, bounded(one_of, ("none", FEATURES))] = "none"
    views: Annotated[int, bounded(between, 1, MAX_VIEWS)] = 1
    drop_last: bool = False

    def check(self) -> None:
        """Raise ConfigError (E-CFG-02) on an impossible schedule."""
        validate.declared("E-CFG-02", "train", self)
        if self.nesterov and (self.momentum <= 0 or self.optimizer != "sgd"):
            raise ConfigError("E-CFG-02", "train.nesterov needs train.optimizer=sgd and train.momentum > 0")
        if self.augment_on_device and not self.augment:
            raise ConfigError("E-CFG-02", "train.augment_on_device needs train.augment=true: set it, or leave both out")
        frozen = self.freeze == FEATURES
        if frozen and self.augment != (self.views > 1):
            raise ConfigError(
                "E-CFG-02",
                f"expected train.augment=true and train.views=2 to {MAX_VIEWS} together with train.freeze=features, "
                f"which computes the features of each image once, found train.augment={self.augment} and "
                f"train.views={self.views}: set both, or leave both out",
            )
        if self.views > 1 and not frozen:
            raise ConfigError(
                "E-CFG-02",
                f"expected train.views=1 if the whole model is trained, found {self.views}: use train.augment=true, "
                "which draws a new view in each step, or set train.freeze=features",
            )

    def facts(self) -> dict[str, object]:
        """Return all fields for JSON, without later ones at their default, so that digests stay the same."""
        raw = asdict(self)
        for name, default in _LATER.items():
            if raw[name] == default and type(raw[name]) is type(default):
                del raw[name]
        return raw


_LATER: Mapping[str, object] = {
    "cudnn_benchmark": False,
    "compile": False,
    "augment_on_device": False,
    "micro_batch": 0,
    "freeze": "none",
    "views": 1,
    "drop_last": False,
}


@dataclass(frozen=True, slots=True)
class OwnModels:
    """Results of hospitals' local models, each on its own test images, and of the measured model on the same.

    own, measured, examples: correct answers of both and test examples (C,)   images, difference, square: sums of n, n d
    and n^2 v over the hospitals that compared scores, as in training/delong.py; d is the macro AUC of the measured
    model minus that of the local model.
    """

    own: tuple[float, ...]
    measured: tuple[float, ...]
    examples: tuple[float, ...]
    images: float = 0.0
    difference: float = 0.0
    square: float = 0.0

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> OwnModels:
        local, measured, examples = (tuple(raw[name]) for name in ("own", "measured", "examples"))
        return cls(local, measured, examples, raw["images"], raw["difference"], raw["square"])

    @property
    def auc_ahead(self) -> tuple[float, float] | None:
        """Return the measured model's macro AUC minus the local models', and its standard error; None if unknown."""
        return (self.difference / self.images, math.sqrt(self.square) / self.images) if self.images > 0 else None


@dataclass(frozen=True, slots=True)
class HospitalResult:
    """One hospital's part of an evaluation's sums, shown with its consent. Fields as in `RoundRecord`."""

    correct: tuple[float, ...]
    examples: tuple[float, ...]
    clinical: ClinicalMetrics | None = None
    own: OwnModels | None = None

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> HospitalResult:
        clinical, local = raw["clinical"], raw.get("own")
        metrics = clinical and ClinicalMetrics.of(clinical)
        return cls(tuple(raw["correct"]), tuple(raw["examples"]), metrics, local and OwnModels.of(local))


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The result of a closed round.

    correct, examples: (C,) over the union of the test sets, for the model *before* the round's training;
    missing: silo -> reason; clipped: values that the grid clipped; personal: means and standard deviations over the
    round's silos (pa, pm_l, pm_v, ga; with _std: standard deviations) of the personal models *after* its training;
    cut: silo -> the clipped parts of its update; medians: of the norms of accepted updates, by block; clinical: over
    the test sets of the silos that send them, None in runs with accuracies only; cut_rows: clipped rows of prototypes,
    over all silos; unbounded: the run bounds updates, but had no comparison for these;
    added: silo -> fingerprint of its whole contribution to a sum that it can be taken out of again
    (`Method.fingerprint`);
    by_hospital: silo -> its own part, with its consent, in a run that asks for it; own: the hospitals' local models
    beside the measured one, None if not asked for or missing; several_labels: correct and examples are answers about
    labels, of which a record may have several.
    """

    round: int
    kind: TaskKind
    correct: tuple[float, ...]
    examples: tuple[float, ...]
    included: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    clipped: int = 0
    personal: Mapping[str, float] = field(default_factory=dict)
    cut: Mapping[str, str] = field(default_factory=dict)
    medians: Mapping[str, float] = field(default_factory=dict)
    clinical: ClinicalMetrics | None = None
    cut_rows: int = 0
    unbounded: bool = False
    added: Mapping[str, str] = field(default_factory=dict)
    by_hospital: Mapping[str, HospitalResult] = field(default_factory=dict)
    own: OwnModels | None = None
    several_labels: bool = False

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> RoundRecord:
        """Read the output of `to_dict` after JSON; numbers are unchanged, including infinite ones."""
        lists = {name: tuple(value) for name, value in raw.items() if isinstance(value, list)}
        clinical = raw.get("clinical")
        each = {name: HospitalResult.of(metrics) for name, metrics in raw.get("by_hospital", {}).items()}
        measured = {"clinical": clinical and ClinicalMetrics.of(clinical), "by_hospital": each}
        measured["own"] = (local := raw.get("own")) and OwnModels.of(local)
        return cls(**{**raw, **lists, **measured, "kind": TaskKind(raw["kind"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the record as it is stored, for `of`."""
        return asdict(self) | {"kind": self.kind.value}

    @property
    def trained(self) -> bool:
        """Whether the measured model was trained in this run, or the record is of the closing evaluation."""
        return self.round > 0 or self.kind.ends_run

    @property
    def accuracy(self) -> float:
        """Return correct / examples over all classes; -1 without test examples or a global model."""
        return sum(self.correct) / n if (n := sum(self.examples)) else -1.0

    @property
    def balanced_counts(self) -> Counts:
        """Return the counts whose mean share is the balanced accuracy."""
        return balanced_counts(self.correct, self.examples, self.clinical, self.several_labels)

    @property
    def balanced_accuracy(self) -> float:
        """Return the mean accuracy over classes with test examples; -1 if there are none, or labels are unknown."""
        mean = macro_mean(right / of if of else None for right, of in zip(*self.balanced_counts, strict=True))
        return -1.0 if mean is None else mean

    def class_accuracy(self) -> list[float | None]:
        """Return the accuracy per class, None for a class without test examples."""
        return [c / n if n else None for c, n in zip(self.correct, self.examples, strict=True)]


def fairness(scores: Mapping[str, float]) -> float | None:
    """Return the standard deviation over silos of PM(L), or of PA without it; None without scores."""
    return scores.get("pm_l_std", scores.get("pa_std"))


# ---- what became of updates ------------------------------------------------------------------------------------------

NO_BOUND = "too few updates to compare: only the norm of the initial weights limits them, and prototypes have no limit"
_REFUSALS = ("E-RUN-43", "E-RUN-44", "E-WIRE-05", "E-WIRE-06")
"""Codes of refusals by the check of an update. Silos that are missing for another reason sent no update."""


class HasUpdateOutcomes(Protocol):
    """The outcomes of a round's updates: a `RoundRecord`, or its form in a store or a message."""

    @property
    def missing(self) -> Mapping[str, str]: ...
    @property
    def cut(self) -> Mapping[str, str]: ...
    @property
    def cut_rows(self) -> int: ...
    @property
    def unbounded(self) -> bool: ...


def refused(missing: Mapping[str, str]) -> dict[str, str]:
    """Return the silos whose update arrived and was refused, with the reason."""
    return {name: why for name, why in missing.items() if why.startswith(_REFUSALS)}


def update_outcomes(rounds: Iterable[HasUpdateOutcomes]) -> dict[str, int]:
    """Count refused and clipped updates, clipped rows, and rounds without a bound, over rounds."""
    closed_rounds = list(rounds)
    return {
        "updates_refused": sum(len(refused(r.missing)) for r in closed_rounds),
        "updates_cut": sum(len(r.cut) for r in closed_rounds),
        "cut_rows": sum(r.cut_rows for r in closed_rounds),
        "unbounded_rounds": sum(r.unbounded for r in closed_rounds),
    }
