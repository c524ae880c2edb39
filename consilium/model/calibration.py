"""Calibrate a model with a hospital's own labelled examples, and store the calibration next to the model file.

A random third of each class fits the temperature and the distances. The other examples give the quantiles and the
threshold, so the guarantees hold for examples that had no influence on the scores.
The file contains feature means by class and no examples. It stays at the hospital: nothing sends it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from consilium.model import conformal
from consilium.model.conformal import Quantiles, Source
from consilium.model.distances import MIN_EXAMPLES, ClassDistances
from fl_core import rng
from fl_core.converter import ConversionError, structure
from fl_core.errors import ConfigError, DataError, StateError
from fl_core.models import pretrained
from fl_core.types.targets import FOUND, UNKNOWN

FORMAT = 1
SUFFIX = ".calibration.safetensors"
DISTANCES = ("features", "logits")
ANSWERS = ("not there", "there")
"""Answers about a label of a multi-label model, in the order of tuples by label and answer."""
MIN_IMAGES = 30
"""Over all classes. Fewer images cannot support a coverage of 90 %."""
_FIT = 3
_LOWEST, _HIGHEST = 0.5, 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFacts:
    """Facts in a calibration file; tuples are by class, for a multi-label model by label and answer.

    The answers for a label are "not there" and "there", in this order. A multi-label model flags nothing.
    model: SHA-256 of the model file   data: fingerprint of the examples, and their split
    fitted: number of examples for temperature and distances   held: number of examples for quantiles and threshold
    quantiles, sources: `conformal.Quantiles`   threshold: an example with a higher score belongs to no class
    Raises ConfigError (E-CFG-02) on values that no calibration can have.
    """

    model: str
    data: str
    classes: tuple[str, ...]
    coverage: float
    false_flags: float | None
    temperature: float
    fitted: tuple[int, ...]
    held: tuple[int, ...]
    quantiles: tuple[float, ...]
    sources: tuple[Source, ...]
    threshold: float | None
    multi_label: bool = False
    format: int = FORMAT

    def __post_init__(self) -> None:
        if {self.false_flags is None, self.threshold is None} != {self.multi_label}:
            raise ConfigError(
                "E-CFG-02",
                "the calibration needs both false_flags and threshold, or neither for multi-label models: calibrate "
                "again",
            )
        check_shares(self.coverage, self.false_flags)
        by_class = (self.fitted, self.held, self.quantiles, self.sources)
        counted = all(n >= 0 for n in (*self.fitted, *self.held))
        numbers = all(0 <= q <= 1 for q in self.quantiles) and math.isfinite(self.threshold or 0.0)
        categories = len(self.classes) * (2 if self.multi_label else 1)
        if self.format != FORMAT or any(len(values) != categories for values in by_class):
            raise ConfigError(
                "E-CFG-02",
                f"expected calibration format {FORMAT} with {categories} numbers per list, found format {self.format} "
                f"with {[len(values) for values in by_class]}: calibrate again",
            )
        if not counted or not numbers or not 0 < self.temperature < math.inf:
            raise ConfigError(
                "E-CFG-02",
                "expected counts from 0, quantiles from 0 to 1, a finite threshold and a positive temperature, "
                "found invalid numbers: calibrate again",
            )

    @property
    def judged(self) -> tuple[bool, ...]:
        """For each class, whether there were enough examples to tell it from "none of the classes"."""
        return tuple(n >= MIN_EXAMPLES and not self.multi_label for n in self.fitted)


@dataclass(frozen=True, eq=False, slots=True)
class Calibration:
    """A calibration to apply to new examples. distances: of features and of logits; None for several labels."""

    facts: CalibrationFacts
    distances: tuple[ClassDistances, ClassDistances] | None

    def score(self, features: Tensor, logits: Tensor) -> Tensor | None:
        """Return scores (n,) for features (n, d) and logits (n, C); larger: less like any class of this hospital."""
        return None if self.distances is None else _score(*self.distances, features, logits)

    def sets(self, p: Tensor) -> Tensor:
        """Return which classes are in the sets (n, C), from calibrated probabilities (n, C).

        For several labels (n, C, 2): whether "not there" and "there" are in the set of each label.
        """
        if not self.facts.multi_label:
            return conformal.in_set(p, self.facts.quantiles)
        both = torch.stack((1 - p, p), 2)
        return conformal.in_set(both.flatten(1), self.facts.quantiles).view(both.shape)


def _score(of_features: ClassDistances, of_logits: ClassDistances, features: Tensor, logits: Tensor) -> Tensor:
    return of_features.squared(features).log() + of_logits.squared(logits).log()


def check_shares(coverage: float, false_flags: float | None) -> None:
    """Raise ConfigError (E-CFG-02) on values out of range. false_flags: None for several labels."""
    if not _LOWEST <= coverage <= _HIGHEST:
        raise ConfigError("E-CFG-02", f"expected a coverage from {_LOWEST} to {_HIGHEST}, found {coverage}: change it")
    if false_flags is not None and not 1 - _HIGHEST <= false_flags <= _LOWEST:
        raise ConfigError(
            "E-CFG-02",
            f"expected a share of false flags from {1 - _HIGHEST:.3f} to {_LOWEST}, found {false_flags}: change it",
        )


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """The model and data of a calibration, and its guarantees. model, data: as in `CalibrationFacts`."""

    model: str
    data: str
    classes: Sequence[str]
    coverage: float = 0.9
    false_flags: float = 0.1


def calibrate(request: CalibrationRequest, logits: Tensor, features: Tensor, labels: Tensor) -> Calibration:
    """Calibrate with logits (n, C), features (n, d) and labels (n,) of examples that were not used in training.

    Raises DataError (E-DATA-08) if there are too few examples for the request, and on NaN or infinity.
    """
    check_shares(request.coverage, request.false_flags)
    n_classes = len(request.classes)
    _require_numbers(logits, features)
    fit = _drawn(labels, request.data)
    calibrating = ~fit
    needed = max(conformal.smallest(request.coverage), conformal.smallest(1 - request.false_flags))
    counts = torch.bincount(labels[fit], minlength=n_classes)
    if len(labels) < MIN_IMAGES or int(calibrating.sum()) < needed:
        raise _too_few(needed, request.coverage, len(labels))
    if int(counts.max()) < MIN_EXAMPLES:
        largest = int(torch.bincount(labels).max())
        raise DataError(
            "E-DATA-08",
            f"expected a class with at least {_FIT * MIN_EXAMPLES} labelled examples to calibrate, found at most "
            f"{largest} per class: add examples",
        )
    temperature = conformal.fit_temperature(logits[fit], labels[fit])
    of_features = ClassDistances.of(features[fit], labels[fit], n_classes)
    of_logits = ClassDistances.of(logits[fit], labels[fit], n_classes)
    p = conformal.probabilities(logits[calibrating], temperature)
    quantiles: Quantiles = conformal.class_quantiles(p, labels[calibrating], request.coverage)
    scores = _score(of_features, of_logits, features[calibrating], logits[calibrating])
    facts = CalibrationFacts(
        model=request.model,
        data=request.data,
        classes=tuple(request.classes),
        coverage=request.coverage,
        false_flags=request.false_flags,
        temperature=temperature,
        fitted=tuple(counts.tolist()),
        held=tuple(torch.bincount(labels[calibrating], minlength=n_classes).tolist()),
        quantiles=quantiles.values,
        sources=quantiles.sources,
        threshold=conformal.quantile(scores, 1 - request.false_flags),
    )
    return Calibration(facts, (of_features, of_logits))


def calibrate_labels(request: CalibrationRequest, logits: Tensor, labels: Tensor) -> Calibration:
    """Calibrate with logits (n, L) and labels (n, L), coded as in `types.targets`, of multi-label records.

    Unknown labels do not count. A third of the records, with all their answers, fits one temperature for all labels;
    the others give the quantiles. Ignores request.false_flags. Raises as `calibrate`.
    """
    check_shares(request.coverage, None)
    _require_numbers(logits)
    record, label = torch.nonzero(labels != UNKNOWN, as_tuple=True)
    z, present = logits[record, label].double(), (labels[record, label] == FOUND).long()
    both, fit = torch.stack((torch.zeros_like(z), z), 1), _drawn(labels.new_zeros(len(labels)), request.data)[record]
    coverage = request.coverage
    needed = conformal.smallest(coverage)
    if len(record) < MIN_IMAGES or int((~fit).sum()) < needed or not bool(fit.any()):
        raise _too_few(needed, request.coverage, len(record))
    temperature, n = conformal.fit_temperature(both[fit], present[fit]), len(request.classes)
    p = conformal.probabilities(both[~fit], temperature)
    quantiles = conformal.label_quantiles(p, present[~fit], label[~fit], n, coverage)
    fitted, calibrating = (
        torch.bincount((2 * label + present)[part], minlength=2 * n).tolist() for part in (fit, ~fit)
    )
    facts = CalibrationFacts(
        model=request.model,
        data=request.data,
        classes=tuple(request.classes),
        coverage=request.coverage,
        false_flags=None,
        temperature=temperature,
        fitted=tuple(fitted),
        held=tuple(calibrating),
        quantiles=quantiles.values,
        sources=quantiles.sources,
        threshold=None,
        multi_label=True,
    )
    return Calibration(facts, None)


def _require_numbers(*answers: Tensor) -> None:
    if not all(bool(torch.isfinite(values).all()) for values in answers):
        raise DataError(
            "E-DATA-08",
            "expected finite numbers from the model for every example, found NaN or infinity: check the examples, or "
            "train the model again",
        )


def _too_few(needed: int, coverage: float, found: int) -> DataError:
    least = max(MIN_IMAGES, math.ceil(needed * _FIT / (_FIT - 1)) + 1)
    return DataError(
        "E-DATA-08",
        f"expected at least {least} labelled examples to calibrate with a coverage of {coverage:g}, found {found}: "
        "add examples, lower --coverage or raise --false-flags",
    )


def _drawn(labels: Tensor, data: str) -> Tensor:
    """Draw a third of each class as a mask (n,); the same data always give the same mask."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for c in sorted(set(labels.tolist())):
        of_class = torch.nonzero(labels == c).squeeze(1)
        order = torch.randperm(len(of_class), generator=rng.stream(0, "calibration", data, c))
        chosen[of_class[order[: len(of_class) // _FIT]]] = True
    return chosen


# ---- the file --------------------------------------------------------------------------------------------------------


def calibration_path(model: Path) -> Path:
    return model.with_name(model.name.removesuffix(".safetensors") + SUFFIX)


def to_bytes(calibration: Calibration) -> bytes:
    tensors = dict[str, Tensor]()
    for name, distance in zip(DISTANCES, calibration.distances or (), strict=False):
        tensors |= distance.tensors(name)
    return save(tensors, metadata={"consilium": json.dumps(asdict(calibration.facts), sort_keys=True)})


def read(file: Path, model: str, classes: Sequence[str], multi_label: bool = False) -> Calibration:
    """Read a calibration of a model. model: SHA-256 of the model file.

    Raises StateError (E-STATE-22) on another model's calibration or another kind of file, ConfigError (E-CFG-02) if
    there is no such file.
    """
    content = pretrained.read_file(file)
    try:
        facts = structure(CalibrationFacts, content.facts, "")
        features, logits = (
            None if facts.multi_label else ClassDistances.read(content.tensors, name, len(facts.classes))
            for name in DISTANCES
        )
    except (ConversionError, ConfigError, ValueError) as error:
        text = error.message if isinstance(error, ConfigError) else str(error)
        raise StateError(
            "E-STATE-22", f"expected a calibration at {file}, found: {text}. Create it with `consilium calibrate`"
        ) from error
    if (facts.model, facts.classes, facts.multi_label) != (model, tuple(classes), multi_label):
        raise StateError(
            "E-STATE-22",
            f"expected a calibration of this model ({model[:16]}) at {file}, found one of {facts.model[:16]}: run "
            "consilium calibrate for this model, or choose another file with --calibration",
        )
    return Calibration(facts, None if features is None or logits is None else (features, logits))
