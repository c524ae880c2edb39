"""Classify examples with an exported model, as the silo's evaluation does, and report how certain the answers are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from consilium.model import conformal
from consilium.model.calibration import (
    Calibration,
    CalibrationRequest,
    calibrate,
    calibrate_labels,
    calibration_path,
    read,
)
from consilium.model.inputs import Inputs
from consilium.model.model_file import LoadedModel
from fl_core.errors import ConfigError, DataError
from fl_core.training.local_data import eval_batch
from fl_core.types.targets import FOUND, UNKNOWN
from fl_core.types.values import Examples

NONE_OF_THEM = "none of the classes"
NO_LABEL = "none of the labels"
NO_NUMBERS = "the model's output is not finite"
Progress = Callable[[int, int], None]
LabelSet = Literal["empty", "there", "not there", "open"]
"""Content of a label's set: one answer, both ("open") or none ("empty")."""
LABEL_SETS: Mapping[tuple[bool, bool], LabelSet] = {
    (False, False): "empty",
    (False, True): "there",
    (True, False): "not there",
    (True, True): "open",
}
"""By whether "not there" and "there" are in the set."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's prediction for one example.

    probabilities: by class; empty if there is a problem   answer: the most probable class; for a multi-label model, all
    labels with a probability above 0.5, separated by commas
    set: classes in the set at the calibration's coverage   unknown: whether the example fits none of the classes; both
    None without a calibration, and `unknown` also if the calibration had too few examples of the answer's class
    sets: for a multi-label model with a calibration, the content of each label's set
    label: the true class, if known; for a multi-label model, the labels found   labels: for a multi-label model, the
    labels in `answer`   right: for a multi-label model, whether the answer for each label is right, None if unknown
    problem: why the example was not classified.
    """

    name: str
    probabilities: tuple[float, ...] = ()
    answer: str = ""
    set: tuple[str, ...] | None = None
    unknown: bool | None = None
    label: str = ""
    labels: tuple[str, ...] = ()
    sets: Mapping[str, LabelSet] = field(default_factory=dict)
    right: tuple[bool | None, ...] = ()
    problem: str = ""

    def answers_among(self, names: Collection[str]) -> list[str]:
        """Return which of the names are among this example's answers."""
        return [name for name in self.labels or (self.answer,) if name in names]

    @property
    def answer_text(self) -> str:
        """The answer as shown to people; "" if the example was not classified."""
        if self.probabilities and not self.answer:
            return NO_LABEL
        return NONE_OF_THEM if self.unknown else self.answer


@dataclass(frozen=True, eq=False, slots=True)
class Predictor:
    """A model with its calibration, if it has one."""

    model: LoadedModel
    calibration: Calibration | None = None

    @classmethod
    def of(cls, model: Path, loaded: LoadedModel, file: Path | None = None, raw: bool = False) -> Predictor:
        """Use the named calibration, or the one in the model's folder. raw: use none, and no temperature of the export.

        Raises ConfigError (E-CFG-08) if both `raw` and `file` are given; as `calibration.read`.
        """
        if raw:
            if file is not None:
                raise ConfigError("E-CFG-08", "expected --raw or --calibration, found both: leave one out")
            return cls(replace(loaded, facts=replace(loaded.facts, temperature=None)))
        place, facts = file or calibration_path(model), loaded.facts
        if file is None and not place.exists():
            return cls(loaded)
        return cls(loaded, read(place, loaded.sha256, facts.classes, facts.multi_label))

    @property
    def temperature(self) -> float:
        """The calibration's temperature, else the export's, else 1 as in the silo's evaluation."""
        if self.calibration is not None:
            return self.calibration.facts.temperature
        return self.model.facts.temperature or 1.0

    def predictions(self, inputs: Inputs, progress: Progress = lambda *_: None) -> list[Prediction]:
        """Classify all inputs, then append their problems. A file that cannot be read also becomes a problem."""
        results = list[Prediction]()
        for indices in _batches(inputs.examples, self.model):
            results += self._batch(inputs, indices)
            progress(len(results), len(inputs.names))
        return results + [Prediction(name, problem=text) for name, text in inputs.problems]

    def _batch(self, inputs: Inputs, indices: Tensor) -> Iterator[Prediction]:
        try:
            x, labels = inputs.examples.batch(indices)
        except DataError as error:
            if len(indices) > 1:
                for one in torch.split(indices, 1):
                    yield from self._batch(inputs, one)
            else:
                yield Prediction(inputs.names[int(indices)], problem=_reason(error))
            return
        features, logits = self.model.answers(x)
        several = self.model.facts.multi_label
        p = conformal.probabilities(logits, self.temperature, several)
        scores = sets = None
        if self.calibration is not None:
            scores, sets = self.calibration.score(features, logits), self.calibration.sets(p)
        for k, index in enumerate(indices.tolist()):
            if not bool(torch.isfinite(logits[k]).all()):
                yield Prediction(inputs.names[index], problem=NO_NUMBERS)
                continue
            if several:
                truth = labels[k] if inputs.labelled else torch.full_like(p[k], UNKNOWN)
                chosen = None if sets is None else sets[k]
                yield self._of_labels(inputs.names[index], p[k], logits[k] > 0, truth, chosen)
                continue
            yield self._of_classes(
                inputs.names[index],
                p[k],
                None if sets is None else sets[k],
                None if scores is None else float(scores[k]),
                int(labels[k]) if inputs.labelled else -1,
            )

    def _of_labels(self, name: str, p: Tensor, said: Tensor, truth: Tensor, sets: Tensor | None) -> Prediction:
        classes = self.model.facts.classes
        pairs = list(zip(classes, said.tolist(), truth.tolist(), strict=True))
        answers = () if sets is None else zip(classes, sets.tolist(), strict=True)
        return Prediction(
            name,
            tuple(p.tolist()),
            ", ".join(found_labels := tuple(label for label, answer, _ in pairs if answer)),
            labels=found_labels,
            sets={label: LABEL_SETS[not_there, found_labels] for label, (not_there, found_labels) in answers},
            label=", ".join(label for label, _, finding in pairs if finding == FOUND),
            right=tuple(None if finding == UNKNOWN else answer == (finding == FOUND) for _, answer, finding in pairs),
        )

    def _of_classes(self, name: str, p: Tensor, chosen: Tensor | None, score: float | None, label: int) -> Prediction:
        classes, best = self.model.facts.classes, int(p.argmax())
        unknown: bool | None = None
        facts = None if self.calibration is None else self.calibration.facts
        if facts is not None and score is not None and facts.threshold is not None and facts.judged[best]:
            unknown = score > facts.threshold
        return Prediction(
            name,
            tuple(p.tolist()),
            classes[best],
            None if chosen is None else tuple(c for c, in_set in zip(classes, chosen.tolist(), strict=True) if in_set),
            unknown,
            classes[label] if label >= 0 else "",
        )


def _reason(error: DataError) -> str:
    return str(error.__cause__ or error.message)


def _batches(examples: Examples, model: LoadedModel) -> Sequence[Tensor]:
    return torch.split(torch.arange(len(examples)), eval_batch(model.facts.shape)) if len(examples) else ()


def calibrated(
    model: LoadedModel, inputs: Inputs, coverage: float, false_flags: float, progress: Progress = lambda *_: None
) -> Calibration:
    """Calibrate with labelled inputs; raises as `calibration.calibrate`, and DataError on an unreadable file.

    false_flags: ignored for a multi-label model.
    """
    features, logits = list[Tensor](), list[Tensor]()
    for indices in _batches(inputs.examples, model):
        answers = model.answers(inputs.examples.batch(indices)[0])
        features.append(answers[0])
        logits.append(answers[1])
        progress(int(indices[-1]) + 1, len(inputs.names))
    empty = torch.zeros(0, len(model.facts.classes))
    request = CalibrationRequest(model.sha256, inputs.fingerprint, model.facts.classes, coverage, false_flags)
    both = (torch.cat(logits), torch.cat(features)) if logits else (empty, empty)
    if model.facts.multi_label:
        return calibrate_labels(request, both[0], inputs.examples.labels)
    return calibrate(request, *both, inputs.examples.labels)


# ---- right answers, of examples with known labels --------------------------------------------------------------------


@dataclass(slots=True)
class ClassTally:
    """Counts over examples of one class; for a multi-label model, over known answers about one label.

    right: right answers   covered: sets with the true class or answer   in_sets: total size of the sets
    flagged: examples reported as none of the classes   judged: examples for which that could be decided
    """

    examples: int = 0
    right: int = 0
    covered: int = 0
    in_sets: int = 0
    flagged: int = 0
    judged: int = 0

    def add_label(self, right: bool, present: bool, chosen: LabelSet | None) -> None:
        """Count an answer about a label. present: whether the record has it   chosen: the content of its set."""
        self.examples += 1
        self.right += right
        self.covered += chosen in ("open", "there" if present else "not there")
        self.in_sets += {"open": 2, "empty": 0}.get(chosen or "empty", 1)

    def add(self, found: Prediction) -> None:
        self.examples += 1
        self.right += found.answer == found.label
        self.covered += found.label in (found.set or ())
        self.in_sets += len(found.set or ())
        self.flagged += bool(found.unknown)
        self.judged += found.unknown is not None


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts by class, and over all classes."""

    classes: dict[str, ClassTally] = field(default_factory=dict)
    whole: ClassTally = field(default_factory=ClassTally)


def tally(predictions: Sequence[Prediction], classes: Sequence[str]) -> Tally:
    """Count the predictions with a known label. Classes without predictions are left out."""
    sums = Tally()
    for prediction in predictions:
        for label, right in zip(classes, prediction.right, strict=False):
            if right is not None:
                for counted in (sums.classes.setdefault(label, ClassTally()), sums.whole):
                    counted.add_label(right, (label in prediction.labels) == right, prediction.sets.get(label))
        if not prediction.right and prediction.label and not prediction.problem:
            sums.classes.setdefault(prediction.label, ClassTally()).add(prediction)
            sums.whole.add(prediction)
    return Tally({c: sums.classes[c] for c in classes if c in sums.classes}, sums.whole)
