"""Checks of an update: the run's layout, finite numbers, and weights and counts within the silo's declaration.

| number                                   | range                                                                   |
|------------------------------------------|-------------------------------------------------------------------------|
| weight that counts examples, of the silo | 0 to n_k                                                                |
| weight that counts examples, per row     | each 0 or more, together at most n_k                                    |
| weight that counts a silo once           | 0 or 1                                                                  |
| optimiser steps                          | 0 to what n_k examples make of the run's schedule                       |
| metrics, per class                       | 0 <= correct <= examples, together at most the declared test examples   |
| clinical metrics                         | counts that agree with each other and with metrics (`clinical_fault`)   |
| metrics of personal models               | accuracies and their squares, from 0 to 1                               |
| anything of weight 0                     | 0                                                                       |

n_k is the size that the silo declared before the run. In a private run weights are known exactly and counts are noisy:
noise of a known size widens the ranges by twelve standard deviations; with noise of unknown size there are no ranges.
If sums per class have noise of a known size, their lengths are bounded as well (`NoisyRows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fl_core.aggregation.contributor_floor import HOSPITALS
from fl_core.aggregation.fixed_point import BUFFERS, RING64_BOUND, FixedPointFormat, check_layout
from fl_core.aggregation.number_blocks import blocks, split, sum_of_squares
from fl_core.errors import ProtocolError
from fl_core.tensors import Tensor, torch
from fl_core.training.clinical import answers
from fl_core.types.enums import Weighing
from fl_core.types.metric_parts import BY_HOSPITAL, CLINICAL_PART, METRIC_PARTS, METRICS, OWN, PAIRED, PERSONAL_PARTS
from fl_core.types.records import TrainConfig
from fl_core.types.values import Bundle, Layout, Part, PartRule, Tensors

_SIGMAS = 12.0
_COUNT_ROUNDING = 1e-6
"""Tolerance for float32, in which counts are sent; it is exact up to 16 million."""
_ROUNDING = 1e-4
_MIN_TESTED = 20
_MIN_LACKED = 0.2
_KNOWN = 0.5


@dataclass(frozen=True, slots=True)
class DeclaredSize:
    """A silo's upper bound on its training and test examples; infinite if undeclared."""

    train: float = math.inf
    test: float = math.inf


def with_undeclared(sizes: Mapping[str, DeclaredSize]) -> dict[str, DeclaredSize]:
    """Replace undeclared sizes by the largest declared one, and limit all sizes to the grid."""

    def largest(values: Sequence[float]) -> float:
        return max((n for n in values if n < math.inf), default=RING64_BOUND)

    train, test = largest([s.train for s in sizes.values()]), largest([s.test for s in sizes.values()])
    return {name: DeclaredSize(min(s.train, train), min(s.test, test)) for name, s in sizes.items()}


@dataclass(frozen=True, slots=True)
class NoisyRows:
    """Noise on sums and counts per class of a private run, in which a row is 0 unless its noisy count is positive.

    length: maximum length of one unit's vector, and of a method's result from a row with count 1
    count, value: standard deviation of the noise on a count, and on each number of a sum
    """

    length: float
    count: float
    value: float

    def longest(self, weight: float, numbers: int) -> float:
        """Bound the length of an honest row with `numbers` numbers and this noisy count."""
        return self.length * (weight + _SIGMAS * self.count) + self.value * (math.sqrt(numbers) + _SIGMAS)


@dataclass(frozen=True, slots=True)
class UpdateNorms:
    """The norms of an update's mean values, in float64.

    Attributes:
        norms: of each block, a part's values or its batch norm's buffers ("delta", "delta.buffers"); none of weight 0
        rows: per part with one weight per row (C,), NaN if the row has weight 0
        bias: change of the head's bias (C,); empty if it says nothing about classes, and also if the received model
            classifies half of the silo's test images correctly, since the rest may be a class without test images
        tested: test examples per class (C,)
        decay: the largest share of the received bias that weight decay removed
    """

    norms: Mapping[str, float]
    rows: Mapping[str, Tensor]
    bias: tuple[float, ...] = ()
    tested: tuple[float, ...] = ()
    decay: float = 0.0

    def direction(self, received: Tensor | None = None) -> float:
        """Return a number below 0 if the head's bias fell for the silo's own classes; 0 without information.

        received: the bias (C,) at the start of training. Weight decay reduces a large bias more, independent of the
        examples, and in a converged model it is the only change. So the result is below 0 only if no share of decay up
        to `decay` explains the update. The number is convex in that share.
        """
        if not self.bias:
            return 0.0
        bias, tested = (torch.tensor(v, dtype=torch.float64) for v in (self.bias, self.tested))
        sign = _sign(bias, tested)
        if sign < 0 and received is not None and received.shape == bias.shape:
            sign = max(sign, _sign(bias + self.decay * received.double(), tested))
        return sign


class MeasuredUpdate(dict[str, Part]):
    """An update that the run's check has already accepted and measured, with the same bytes."""

    def __init__(self, update: Bundle, measured: UpdateNorms) -> None:
        super().__init__(update)
        self.measured = measured


@dataclass(frozen=True, eq=False)
class UpdateCheck:
    """Checks single updates of one run, and measures them at the same time.

    Attributes:
        rules: as `Method.part_rules`
        sizes: per silo; a silo without one may claim what the grid can represent
        noise: in a private run the standard deviation of counts by part; infinite: not checked
        noisy_rows: in a private run the bounds on parts with a weight per class, if known
        signs: whether the head's bias reveals the silo's classes, as `Method.bias_follows_classes`
        multi_label: whether an example counts for several labels
        coarse: silos whose bias does not, since they train on coarse labels that no test example has
        updates: number of updates in the checked sum; the ranges of a sum are the sums of theirs
    """

    layout: Layout
    grid: FixedPointFormat
    rules: Mapping[str, PartRule] = field(default_factory=dict)
    train: TrainConfig = TrainConfig()  # noqa: RUF009
    sizes: Mapping[str, DeclaredSize] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    noisy_rows: NoisyRows | None = None
    signs: bool = False
    updates: int = 1
    coarse: frozenset[str] = frozenset()
    multi_label: bool = False

    def of(self, layout: Layout) -> UpdateCheck:
        """Return the check of updates with a part of the run's layout: those of one kind of round."""
        return replace(self, layout=layout)

    def of_sum(self, sizes: Sequence[DeclaredSize]) -> UpdateCheck:
        """Return the check of a sum of updates whose silos declared these sizes; its errors name no silo."""
        together, n = DeclaredSize(sum(s.train for s in sizes), sum(s.test for s in sizes)), len(sizes)
        noise, rows = {part: n * std for part, std in self.noise.items()}, self.noisy_rows
        rows = None if rows is None else NoisyRows(rows.length, n * rows.count, n * rows.value)
        return replace(self, sizes={"": together}, noise=noise, noisy_rows=rows, signs=False, updates=n)

    def check(self, update: Bundle, silo: str = "") -> UpdateNorms:
        """Check an update and measure it.

        Raises ProtocolError: E-WIRE-06 on another layout or a file that cannot be read, E-WIRE-05 on a number that is
        not finite, E-RUN-43 on a weight, a count or a metric out of its range.
        """
        if isinstance(update, MeasuredUpdate):
            return update.measured
        check_layout(update, self.layout)
        norms, rows = dict[str, float](), dict[str, Tensor]()
        bias: Tensor | None = None
        for name, part in update.items():
            if name == CLINICAL_PART:
                self._check_clinical(part, update[METRICS], silo)
                continue
            weight = self._weight(name, part, silo)
            squares: dict[str, Tensor] = {}
            for key in self._values(name, part, weight, silo):
                total = part.total
                if (name, key) == ("delta", "head.bias"):  # each tensor is read once: it may be in a file
                    bias = part.total[key]
                    total = {key: bias}
                squares[key] = self._square(name, key, total, weight, silo)
            if name in METRIC_PARTS:
                continue
            if weight.dim():
                square = sum(squares.values(), torch.zeros(len(weight), dtype=torch.float64))
                rows[name] = torch.where(weight > 0, square.sqrt() / weight, math.nan)
            elif weight > 0:
                norms |= {block: math.sqrt(v) / float(weight) for block, v in _by_block(name, squares).items()}
        signs = self.signs and silo not in self.coarse
        counted = float(update["delta"].weight) if bias is not None and signs else 0.0
        if bias is None or not counted > 0:
            return UpdateNorms(norms, rows)
        unit = 1.0 if bias.is_floating_point() else self._unit("delta", "head.bias")
        change = bias.detach().cpu().double() * unit / counted
        tested = self._numbers(f"{METRICS}.weight", update[METRICS].weight)
        correct = self._numbers(METRICS, update[METRICS].total["correct"])
        if float(correct.sum()) >= _KNOWN * float(tested.sum()):
            return UpdateNorms(norms, rows)
        return UpdateNorms(norms, rows, tuple(change.tolist()), tuple(tested.tolist()), self._decay(counted, silo))

    def _decay(self, weight: float, silo: str) -> float:
        """Bound the share of a parameter that weight decay removes in one round."""
        counted = self.rule("delta", False).weight is Weighing.EXAMPLES
        examples = weight if counted else self.sizes.get(silo, DeclaredSize()).train
        steps = most_steps(self.train, examples) if self.train.weight_decay else 0.0
        return min(1.0, self.train.lr * self.train.weight_decay * steps)

    def rule(self, name: str, per_row: bool) -> PartRule:
        """Return a part's meaning; by default prototypes and other parts with a weight per row count examples."""
        if name in (HOSPITALS, BY_HOSPITAL):
            return PartRule(Weighing.ONCE)
        if name in (METRICS, OWN, PAIRED, *PERSONAL_PARTS):
            return PartRule(Weighing.ONCE if name in PERSONAL_PARTS else Weighing.EXAMPLES)
        return self.rules.get(name, PartRule() if per_row else self.rules.get("delta", PartRule()))

    # ---- weights ---------------------------------------------------------------------------------------------------

    def _weight(self, name: str, part: Part, silo: str) -> Tensor:
        """Return the weight in float64, after checking its range."""
        weight, slack = self._numbers(f"{name}.weight", part.weight), self._slack(name, part.weight)
        size, rule = self.sizes.get(silo, DeclaredSize()), self.rule(name, bool(weight.dim()))
        most = size.test if name in (METRICS, OWN, PAIRED) else size.train
        if rule.weight is Weighing.ONCE:
            most = float(self.updates)
        elif rule.weight is Weighing.QUALITY:
            most = max(most, math.e * self.updates)
        low, rows = -slack, self._noisy(name, weight)
        if rows is not None:
            low, slack = 0.0, 0.0 if rule.weight is Weighing.ONCE else _SIGMAS * rows.count
        counted_once = rule.weight is Weighing.EXAMPLES and not self.multi_label
        together = most + slack * weight.numel() if counted_once else math.inf
        _within(f"weight of {name!r}", weight, low, most + slack, together, silo)
        return weight

    def _noisy(self, name: str, weight: Tensor) -> NoisyRows | None:
        return self.noisy_rows if weight.dim() and name not in METRIC_PARTS else None

    def _slack(self, name: str, weight: Tensor) -> float:
        """Return the most that noise may move a count; 0 for a single weight, which has no noise."""
        std = self.noise.get(name, 0.0) if weight.dim() else 0.0
        return _SIGMAS * std if std else 0.0

    def _numbers(self, segment: str, value: Tensor) -> Tensor:
        """Read a few numbers in float64; raises ProtocolError (E-WIRE-05) unless they are finite."""
        numbers = value.detach().cpu()
        numbers = numbers.double() if numbers.is_floating_point() else self.grid.decode(segment, numbers)
        if not bool(torch.isfinite(numbers).all()):
            raise _not_finite(segment)
        return numbers

    # ---- values ----------------------------------------------------------------------------------------------------

    def _values(self, name: str, part: Part, weight: Tensor, silo: str) -> Iterator[str]:
        """Yield the names of a total's value tensors; counts are checked at once."""
        rule = self.rule(name, bool(weight.dim()))
        for key in part.total:
            if name in METRIC_PARTS or key in (rule.counts, rule.steps):
                self._check_numbers(name, key, self._numbers(name, part.total[key]), weight, silo)
            else:
                yield key

    def _square(self, name: str, key: str, total: Tensors, weight: Tensor, silo: str) -> Tensor:
        """Return the sum of squares, per row if weights are; raises ProtocolError if it is not finite."""
        value = total[key] if weight.dim() else None
        rows = [blocks(total, key)] if value is None else map(split, value)
        sums = [sum_of_squares(row, lambda: self._unit(name, key)) for row in rows]
        if not all(map(math.isfinite, sums)):
            raise _not_finite(name)
        square = torch.tensor(sums if weight.dim() else sums[0], dtype=torch.float64)
        noisy = self._noisy(name, weight)
        if noisy is not None and value is not None:
            _within_noise(name, square.sqrt(), weight, noisy, value[:1].numel(), silo)
        empty = any(s for s, w in zip(sums, weight.reshape(-1).tolist(), strict=True) if w == 0)
        if empty and (noisy is not None or name not in self.noise):
            raise _refused(silo, f"{name!r} holds values of weight 0 in {key!r}", "0")
        return square

    def _unit(self, name: str, key: str) -> float:
        """Return the value of an integer's unit."""
        return 2.0 ** -self.grid.frac_bits(self.grid.segment(name, key))

    def _check_clinical(self, part: Part, metrics: Part, silo: str) -> None:
        """Check the clinical part against "metrics", which is checked separately; neither is ever noisy."""
        weight = self._numbers(f"{CLINICAL_PART}.weight", part.weight)
        total = {key: self._numbers(CLINICAL_PART, part.total[key]) for key in part.total}
        correct = self._numbers(METRICS, metrics.total["correct"])
        examples = self._numbers(f"{METRICS}.weight", metrics.weight)
        if self.updates > 1 and float(weight) < float(examples.sum()):  # of those that do not withhold it
            right, some = answers(total["confusion"])
            if bool((some > examples).any()) or bool((right > correct).any()):
                raise _refused(silo, "clinical metrics of more examples than are counted", "as many at most")
            correct, examples = right, some
        fault = clinical_fault(total, weight, correct, examples)
        if fault:
            who = f"{silo}: " if silo else ""
            raise ProtocolError(
                "E-RUN-43", f"{who}clinical metrics: {fault}: refused; both sides must run the same version"
            )

    def _check_numbers(self, name: str, key: str, value: Tensor, weight: Tensor, silo: str) -> None:
        """Check metrics, class counts and numbers of steps against the weight and the declared size."""
        size, slack = self.sizes.get(silo, DeclaredSize()), _SIGMAS * self.noise.get(name, 0.0)
        if not math.isfinite(slack):
            return
        if name == METRICS:
            _within("correct answers beyond the examples", value - weight, -math.inf, 2 * slack, math.inf, silo)
            _within("correct answers", value, -slack, math.inf, math.inf, silo)
        elif name == OWN:
            _within("correct answers of two models", value, 0.0, math.inf, math.inf, silo)
            _within("correct answers beyond the examples", value - weight, -math.inf, 0.0, math.inf, silo)
        elif name == PAIRED:
            n = float(weight)
            low, high = (-n, n) if key == "difference" else (0.0, n * n)
            _within(f"{name}.{key}", value, low, high, math.inf, silo)
        elif name == BY_HOSPITAL:
            _within("consent", value - weight, 0.0, 0.0, math.inf, silo)
        elif name in PERSONAL_PARTS:
            rest = _ROUNDING * self.updates
            low, high = (-rest, rest) if key.endswith("_rest") else (0.0, float(weight))
            _within(f"{name}.{key}", value, low, high, math.inf, silo)
        elif key == self.rule(name, False).steps:
            most = most_steps(self.train, size.train) * float(weight) if weight > 0 else 0.0
            _within("optimiser steps", value, 0.0, most, math.inf, silo)
        else:
            most = size.train * float(weight) if weight > 0 else 0.0
            _within(f"counts of {name!r}", value, -slack, most + slack, most, silo)


def _sign(bias: Tensor, counts: Tensor) -> float:
    """Return a number below 0 if a bias fell for a silo's own classes; 0 without information.

    The gradient of a cross-entropy lowers the bias of every class without an example, and the sum of all biases does
    not change. So the bias of an honest silo's classes rises on average, for any scale of the logits. Test examples,
    which every update counts, show these classes; a class without test examples may still have training examples. So
    the result is 0 with fewer than 20 test examples, or if fewer than a fifth of the classes lack test examples. It is
    below 0 only if the covariance with the classes' shares, in which small classes have little weight, is below 0, too.
    """
    present = counts > 0
    lacked = len(counts) - int(present.sum())
    if bias.shape != counts.shape or not _MIN_LACKED * len(counts) <= lacked < len(counts):
        return 0.0
    if float(counts.sum()) < _MIN_TESTED:
        return 0.0
    share, change = counts.double() / counts.double().sum(), bias.double()
    covariance = ((change - change.mean()) * (share - share.mean())).mean()
    return float(torch.maximum(covariance, change[present].mean() - change[~present].mean()))


def norms(part: str, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norms of tensors in float64, by block as in `UpdateNorms.norms`."""
    squares = {
        key: torch.tensor(sum_of_squares(split(v), lambda: 1.0), dtype=torch.float64) for key, v in tensors.items()
    }
    return {block: math.sqrt(v) for block, v in _by_block(part, squares).items()}


def _by_block(name: str, squares: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum squares of values and, separately, those of batch norm's statistics."""
    of_block: dict[str, list[float]] = {}
    for key, square in squares.items():
        of_block.setdefault(f"{name}.buffers" if key.endswith(BUFFERS) else name, []).append(float(square))
    return {block: math.fsum(values) for block, values in of_block.items()}


def most_steps(train: TrainConfig, examples: float) -> float:
    """Bound the steps of one round, and their effect with momentum."""
    if not math.isfinite(examples):
        return math.inf
    planned = train.epochs * math.ceil(max(examples, 1.0) / train.batch_size)
    return (min(planned, train.max_steps) if train.max_steps else planned) / (1.0 - train.momentum)


def _within(what: str, value: Tensor, low: float, high: float, together: float, silo: str) -> None:
    """Raise ProtocolError (E-RUN-43) unless all numbers are in their range, and their sum too if there are several.

    The tolerance is the rounding of float32 sums.
    """
    room = 1e-6 * max(1.0, abs(high)) if math.isfinite(high) else 0.0
    numbers, low = value.reshape(-1).tolist(), low or 0.0
    for number in numbers:
        if not low <= number <= high + room:  # nothing below: a weight of -1e-40 would have no mean
            raise _refused(silo, f"{what} {number:g}", f"{low:g} to {high:g}")
    if len(numbers) > 1 and (total := math.fsum(numbers)) > together + room:
        raise _refused(silo, f"{what}, {total:g} together", f"at most {together:g}")


def _within_noise(name: str, lengths: Tensor, weight: Tensor, noisy: NoisyRows, numbers: int, silo: str) -> None:
    """Raise ProtocolError (E-RUN-43) if a row of `numbers` numbers is longer than clip and noise permit."""
    for length, counted in zip(lengths.tolist(), weight.tolist(), strict=True):
        if counted > 0 and length > (most := noisy.longest(counted, numbers)):
            raise _refused(silo, f"a row of {name!r} of length {length:.3g}", f"at most {most:.3g}")


def _refused(silo: str, found: str, expected: str) -> ProtocolError:
    who = f"{silo}: " if silo else ""
    return ProtocolError(
        "E-RUN-43",
        f"{who}update refused: {found}, but the run allows {expected}. Restart the silo so that it declares its "
        "size again, then submit a new run.",
    )


def _not_finite(segment: str) -> ProtocolError:
    return ProtocolError("E-WIRE-05", f"expected finite numbers in {segment!r}, found NaN or infinity")


def clinical_fault(total: Mapping[str, Tensor], weight: Tensor, correct: Tensor, examples: Tensor) -> str:
    """Describe the first error of a clinical part, in words that end with the expectation; empty if it is correct.

    | tensor             | rule                                                                                |
    |--------------------|-------------------------------------------------------------------------------------|
    | all but confidence | whole numbers, 0 or more                                                            |
    | confusion          | row c adds up to the examples of class c in the part "metrics", its diagonal is the |
    |                    | correct answers there; of several labels each one's table likewise                  |
    | positive, negative | row c adds up to the examples of class c, and to all others; of several labels to   |
    |                    | those in which label c was found, and those in which it was not found               |
    | examples, correct  | add up to all examples, to all correct answers; correct <= examples in each bin     |
    | confidence         | in bin k between k / 15 and (k + 1) / 15 times its examples                         |

    A silo that withholds the part sends zeros of weight 0, whatever it says in "metrics".
    total, weight: of the clinical part   correct, examples: (C,) of "metrics". All float64 and finite.
    """
    counts = {name: v for name, v in total.items() if name != "confidence"}
    if float(weight) == 0:
        return "values of weight 0, expected 0" if any(bool(v.any()) for v in total.values()) else ""
    for name, v in counts.items():
        if bool((v < 0).any()) or not torch.equal(v, v.round()):
            return f"{name!r} has a value that is not a count, expected whole numbers of 0 or more"
    every, confusion = examples.sum(), counts["confusion"]
    right, of = answers(confusion)
    positive, negative = (confusion.sum(2)[:, (1, 0)].T) if confusion.dim() == 3 else (examples, every - examples)
    sums = (
        ("weight", weight, every),
        ("rows of 'confusion'", of, examples),
        ("diagonal of 'confusion'", right, correct),
        ("rows of 'positive'", counts["positive"].sum(1), positive),
        ("rows of 'negative'", counts["negative"].sum(1), negative),
        ("sum of 'examples'", counts["examples"].sum(), every),
        ("sum of 'correct'", counts["correct"].sum(), correct.sum()),
    )
    for what, actual, expected in sums:
        if bool(((actual - expected).abs() > _rounding_margin(expected)).any()):
            return f"{what} {_number_list(actual)}, expected {_number_list(expected)} as in 'metrics'"
    if bool((counts["correct"] > counts["examples"]).any()):
        return "more correct answers than examples in a bin, expected at most as many"
    edges = torch.arange(len(counts["examples"]) + 1, dtype=torch.float64) / len(counts["examples"])
    low, high = edges[:-1] * counts["examples"], edges[1:] * counts["examples"]
    confidence = total["confidence"]
    if bool(((confidence < low - _rounding_margin(low)) | (confidence > high + _rounding_margin(high))).any()):
        return "a sum of confidences outside its bin, expected between the bin's edges times its examples"
    return ""


def _rounding_margin(expected: Tensor) -> Tensor:
    return _COUNT_ROUNDING * expected.abs().clamp(min=1.0)


def _number_list(values: Tensor) -> str:
    return ", ".join(f"{v:g}" for v in values.reshape(-1)[:10].tolist()) + (" ..." if values.numel() > 10 else "")
